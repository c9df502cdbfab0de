"""``turbo``: Triton kernels, compiled ahead of time in the image's own root file system. Needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from primus.engine import sandboxed
from primus.engine.kinds import Made, files
from primus.oci.tar import Entry
from primus.plan.aot import BAKED, command_of

if TYPE_CHECKING:
    from primus.engine.execute import Workshop
    from primus.plan.action import Action


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """Check that the sandbox can run the compiler."""
    sandboxed.prepare(shop)


def make(action: Action, shop: Workshop, scratch: Path) -> Made:
    """Run the compiler on a copy of this package's sources, and add the files it writes to /out."""
    out, sources = scratch / "out", scratch / "sources"
    for entry in files.entries(action):
        (sources / entry.path).parent.mkdir(parents=True, exist_ok=True)
        with (sources / entry.path).open("wb") as copy:
            copy.writelines(entry.chunks())
    sandboxed.run(
        action,
        shop,
        command_of(action),
        inputs={"/in/primus": sources},
        outputs=out,
        env={
            **cast("Mapping[str, str]", action.spec["environment"]),
            "PYTHONPATH": "/in",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        what=f"compiling {action.name}",
    )
    paths = sorted(path for path in out.rglob("*") if path.is_file())
    names = [f"{BAKED}/{path.relative_to(out)}".lstrip("/") for path in paths]
    sizes = [path.stat().st_size for path in paths]
    return shop.write(action, [Entry(path=n, size=s, source=p) for n, s, p in zip(names, sizes, paths, strict=True)])
