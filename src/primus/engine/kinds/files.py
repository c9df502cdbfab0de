"""``files``: a layer from a folder of the project or from files that the plan contains."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from primus.engine.workshop import Made, Workshop
from primus.oci.tar import Entry
from primus.plan.action import Action
from primus.plan.skeleton import inline_entries


def prepare(actions: Sequence[Action], shop: Workshop) -> None:
    """Do nothing: copying files has no requirements."""


def make(action: Action, shop: Workshop, scratch: Path) -> Made:
    """Write the files unchanged, with the modes that the plan specifies."""
    return shop.write(action, list(entries(action)))


def entries(action: Action) -> Iterator[Entry]:
    """Yield the files of the action's tree, then those that the plan contains."""
    to = str(action.spec.get("to", "")).strip("/")
    for name, kind, value in action.tree:
        path = f"{to}/{name}" if to else name
        if kind == "link":
            yield Entry(path=path, kind="symlink", mode=0o777, link=value)
            continue
        source = Path(action.root) / name
        mode = 0o755 if kind == "exec" else 0o644
        yield Entry(path=path, mode=mode, size=_size(source), source=source, sha256=value)
    inline = action.spec.get("inline")
    if isinstance(inline, dict):
        yield from inline_entries(inline)


def _size(path: Path) -> int:
    """Return the file's size; 0 if it is gone, which the comparison of its hash reports."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
