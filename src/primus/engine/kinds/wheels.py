"""``wheels``: a layer from locked and built wheels, with the bytecode of their modules."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from primus.engine.wheel import wheel_entries
from primus.engine.workshop import Made, Workshop, own_code
from primus.errors import CheckFailed
from primus.oci.tar import Entry, open_part
from primus.plan.action import Action
from primus.plan.compile_bytecode import is_compiled
from primus.plan.scripts import BYTECODE
from primus.plan.skeleton import Prefix
from primus.schema import read_json


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """Check that the sandbox can compile the bytecode."""
    shop.prepare_sandbox()


def make(action: Action, shop: Workshop, scratch: Path) -> Made:
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

    ``run`` runs :data:`primus.plan.scripts.BYTECODE` in the sandbox; its arguments are the mounts, the folder for
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
