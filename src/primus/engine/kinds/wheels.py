"""``wheels`` and ``build``: a layer from locked and built wheels, with the bytecode of their modules; and a wheel that
the sandbox builds from source, for a ``wheels`` action to use.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from primus.engine.wheel import wheel_entries
from primus.engine.workshop import Wheel, Workshop, own_code
from primus.errors import CheckFailed
from primus.oci.store import Layer
from primus.oci.tar import Entry, open_part
from primus.plan.action import Action
from primus.plan.compile_bytecode import is_compiled
from primus.plan.skeleton import BYTECODE, ORDER, Prefix
from primus.schema import read_json


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """Check that the sandbox can compile the bytecode or build the wheel."""
    shop.prepare_sandbox()


def make(action: Action, shop: Workshop, scratch: Path) -> Layer:
    """Write the files of the wheels and the bytecode, which the image's own interpreter compiles."""
    python = str(action.spec["python"])
    prefix = Prefix(root=str(action.spec["prefix"]), python=python)
    without = cast("Collection[str]", action.spec.get("without", ()))
    entries: list[Entry] = []
    for wheel in shop.read_by(action):
        entries += wheel_entries(shop.file(wheel), wheel.file, prefix, without)
    script = own_code(action, "bytecode", BYTECODE, scratch)

    def run(inputs: Mapping[str, Path], out: Path, place: str) -> None:
        shop.run_isolated(
            action,
            [f"/usr/bin/python{python}", "-I", "/compile.py", place],
            inputs={**inputs, "/compile.py": script},
            outputs=out,
            what=f"compiling bytecode of {action.name}",
        )

    return shop.write(action, [*entries, *bytecode_entries(entries, prefix.site, scratch, run)])


def bytecode_entries(
    entries: Sequence[Entry], site: str, scratch: Path, run: Callable[[dict[str, Path], Path, str], None]
) -> Iterator[Entry]:
    """Compile the modules among ``entries`` that lie below ``site``, and return the bytecode files as entries.

    ``run`` runs :data:`primus.plan.skeleton.BYTECODE` in the sandbox; its arguments are the mounts, the folder for
    /out and the script's argument.

    Raises CheckFailed if what the script wrote was cut short.
    """
    modules = [e for e in entries if e.path.startswith(site + "/") and is_compiled(e.path)]
    if not modules:
        return
    source, out = scratch / "source", scratch / "out"
    source.mkdir()
    out.mkdir()
    with (source / "modules").open("wb") as stream:
        for entry in modules:
            stream.writelines(entry.chunks())
    index = [(entry.path.removeprefix(site + "/"), entry.size) for entry in modules]
    (source / "index.json").write_text(json.dumps(index), encoding="utf-8")
    run({"/in": source}, out, f"/{site}")
    rows: Any = read_json(out / "index.json").data
    (source / "modules").unlink()
    sizes = {pack: (out / str(pack)).stat().st_size for pack in {int(row[1]) for row in rows}}
    for path, pack, offset, size in rows:
        if offset + size > sizes[pack]:
            raise CheckFailed(f"the bytecode of {path} was cut short")
        yield Entry(
            path=f"{site}/{path}", size=size, source=functools.partial(open_part, out / str(pack), offset, size)
        )


def build(action: Action, shop: Workshop, scratch: Path) -> Wheel:
    """Run the build script without network on a read-only source. The script must write one wheel to /out."""
    (source,) = action.files
    inside, out = f"/in/{source.file}", scratch / "out"
    shop.run_isolated(
        action,
        ["/bin/sh", "-c", str(action.spec["script"]), "wheel", inside, str(action.spec["python"])],
        inputs={
            inside: shop.file(source),
            "/in/order/sitecustomize.py": own_code(action, "sorted folders", ORDER, scratch),
        },
        outputs=out,
        env={**_environment(action.job_bytes), **cast("Mapping[str, str]", action.spec["environment"])},
        what=action.name,
    )
    wheels = [path for path in out.glob("*.whl") if path.is_file() and not path.is_symlink()]
    if len(wheels) != 1:
        names = ", ".join(sorted(w.name for w in wheels)) or "none"
        raise CheckFailed(f"{action.name} must build one wheel, but built {names}", where=str(shop.log(action)))
    with wheels[0].open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    wheel = Wheel(file=wheels[0].name, sha256=sha256, size=wheels[0].stat().st_size)
    shop.files.put(wheels[0], sha256)
    return wheel


def _environment(job_bytes: int) -> dict[str, str]:
    """Return the environment of every build. It allows as many compiler processes as cores and memory permit."""
    (line,) = [m for m in Path("/proc/meminfo").read_text().splitlines() if m.startswith("MemAvailable:")]
    memory = 1024 * int(line.split()[1])
    jobs = str(max(1, min(len(os.sched_getaffinity(0)), memory // max(job_bytes, 1))))
    return {
        "CMAKE_BUILD_PARALLEL_LEVEL": jobs,
        "MAX_JOBS": jobs,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PYTHONPATH": "/in/order",
    }
