"""The disk space that a build needs, checked before long work begins."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from primus.errors import HostError
from primus.plan.action import Action
from primus.terminal import bytes_text

if TYPE_CHECKING:
    from primus.plan.workspace import Workspace
    from primus.versions.lock import LockedFile

# Measured on the images of this repository and rounded down, so that no build that would fit is refused. A layer is
# at least this fraction of the size of its packages; a base is unpacked once and written to a tar once.
_LAYER, _BASE_SCRATCH = 0.8, 5
_NO_SPACE = (b"No space left on device", b"Disk quota exceeded", b"You don't have enough free space in")


def require_space_for(workspace: Workspace, todo: Sequence[Action], absent: Iterable[LockedFile]) -> None:
    """Raise HostError if ``todo`` and the files in ``absent``, which must be fetched, need more space than is free."""
    bases = [action for action in todo if action.kind == "debs" and "over" not in action.spec]
    scratch = max((_BASE_SCRATCH * sum(f.size for f in action.files) for action in bases), default=0)
    require_space(
        [
            (workspace.folder / "files", sum(file.size for file in absent)),
            (workspace.store.root, int(_LAYER * sum(f.size for a in todo if a.makes_layer for f in a.files))),
            # An ordinary user's mmdebstrap works in the folder for temporary files.
            (Path(tempfile.gettempdir()) if os.geteuid() else workspace.store.root, scratch),
        ]
    )


def require_space(needs: Iterable[tuple[Path, int]]) -> None:
    """Raise HostError if a file system has less free space than all paths on it need. ``needs`` are paths and bytes."""
    wanted: dict[int, int] = {}
    places: dict[int, Path] = {}
    for path, size in needs:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        device = there.stat().st_dev
        wanted[device] = wanted.get(device, 0) + size
        places.setdefault(device, there)
    for device, size in wanted.items():
        found = os.statvfs(places[device])
        free = found.f_bavail * found.f_frsize
        if free < size:
            raise HostError(
                f"the disk that holds {places[device]} has {bytes_text(free)} free, "
                f"and this build needs about {bytes_text(size)} there",
                hint="free some space, or keep the store on another disk (--store DIR)",
            )


def disk_is_full(log: Path, *places: Path) -> HostError | None:
    """Return an error if a tool failed because the disk is full, judging by the end of its log or by the disk
    itself.
    """
    full = next((place for place in places if place.exists() and os.statvfs(place).f_bavail == 0), None)
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 200_000))
            text = stream.read()
    except OSError:
        text = b""
    if full is None and not any(words in text for words in _NO_SPACE):
        return None
    return HostError(
        f"the disk that holds {full or places[0]} is full",
        hint=f"free some space and run it again: finished work is kept (log: {log})",
    )
