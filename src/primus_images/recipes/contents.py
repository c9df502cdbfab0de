"""The SHA-256 of the files that a recipe names, also of large ones in little time."""

import hashlib
import time
from contextlib import suppress
from pathlib import Path

from primus_images.files import mark_of, read_sealed, sha256_of, write_sealed

# Smaller files are read each time.
_LARGE = 64 << 20
# A file that changed as little ago may change again without another time.
_SETTLED_SECONDS = 2.0


def content_of(file: Path) -> str:
    """Return the SHA-256 of a file's content.

    That of a large file is kept in the folder ``.cache`` of the user, and holds as long as the file
    system's numbers of it (inode, size, times of change) are the same. Raises as
    :func:`primus_images.files.sha256_of`.
    """
    if file.stat().st_size < _LARGE:
        return sha256_of(file)
    state = _state(file)
    try:
        kept = _kept(file)
    except RuntimeError:  # the user has no folder
        return sha256_of(file)
    known = read_sealed(kept)
    if isinstance(known, dict) and known.get("state") == state:
        return str(known["sha256"])
    digest = sha256_of(file)
    settled = time.time() - file.stat().st_ctime > _SETTLED_SECONDS
    if settled and _state(file) == state:
        with suppress(OSError):  # what cannot be kept is computed again
            write_sealed(kept, {"state": state, "sha256": digest})
    return digest


def _state(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_dev, *mark_of(status)]


def _kept(file: Path) -> Path:
    name = hashlib.sha256(bytes(file.resolve())).hexdigest()
    return Path.home() / ".cache" / "primus-images" / "contents" / name[:32]
