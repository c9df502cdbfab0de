"""Whether the files of a folder survive the container that a command runs in."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

# The file in which an image describes itself.
IMAGE_FILE = Path("/etc/primus/image.json")
MOUNTS = Path("/proc/self/mountinfo")
# File systems that are deleted with the container: its own writable layer, and memory.
_OWN = frozenset({"overlay", "tmpfs", "ramfs"})
_ESCAPED = re.compile(r"\\([0-7]{3})")


def mount_of(folder: Path, mountinfo: str) -> tuple[Path, str]:
    """Return the mount point of ``folder`` and the type of its file system. ``mountinfo`` is the text of proc(5)'s
    file.

    If the text names no mount point, the result is ``/`` with an empty type.
    """
    best, kind = Path("/"), ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        # A later mount on the same point hides the earlier one.
        if folder.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, after.split()[0]
    return best, kind


def warning(folder: Path) -> str:
    """Return a sentence if ``folder`` is deleted with this container, with the option that keeps it; otherwise "".

    Outside the images of this project, the result is always empty.
    """
    if not IMAGE_FILE.exists():
        return ""
    with suppress(OSError):
        folder = folder.resolve()
        point, kind = mount_of(folder, MOUNTS.read_text(encoding="utf-8", errors="surrogateescape"))
        if point == Path("/") or kind in _OWN:
            # A mount on the folder in which jobs start would hide the image's files there.
            kept = folder if folder.parent in (Path("/"), Path.cwd()) else folder.parent
            return (
                f"{folder} is inside the container and is lost when the container is removed\n"
                f'  → to keep it, start the container with -v "$PWD/{kept.name}:{kept}"'
            )
    return ""
