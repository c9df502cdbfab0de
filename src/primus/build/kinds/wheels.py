"""``wheels``: locked and built wheels as a layer, with the bytecode of their modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from primus.build import sandboxed
from primus.build.bytecode import bytecode_entries
from primus.build.kinds import Made
from primus.build.wheel import wheel_entries
from primus.oci.tar import Entry
from primus.plan.prefix import Prefix
from primus.plan.source import BYTECODE

if TYPE_CHECKING:
    from primus.build.execute import Workshop
    from primus.plan.action import Action


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """The sandbox that compiles the bytecode."""
    sandboxed.prepare(shop)


def make(action: Action, shop: Workshop, scratch: Path) -> Made:
    """Write the files of the wheels, and the bytecode that the image's own interpreter compiles from them."""
    python = str(action.spec["python"])
    prefix = Prefix(root=str(action.spec["prefix"]), python=python)
    without = cast("Collection[str]", action.spec.get("without", ()))
    entries: list[Entry] = []
    for wheel in shop.read_by(action):
        entries += wheel_entries(shop.file(wheel), wheel.file, prefix, without)
    script = sandboxed.own_code(action, "bytecode", BYTECODE, scratch)

    def run(inputs: Mapping[str, Path], out: Path, place: str) -> None:
        sandboxed.run(
            action,
            shop,
            [f"/usr/bin/python{python}", "-I", "/compile.py", place],
            inputs={**inputs, "/compile.py": script},
            outputs=out,
            what=f"compiling bytecode of {action.name}",
        )

    return shop.write(action, [*entries, *bytecode_entries(entries, prefix.site, scratch, run)])
