"""The content-addressed cache of fetched files: ``sha256/<hex>`` is either complete and correct, or
absent.

Several processes may use a cache at once: a file being fetched is a locked ``.part`` file, renamed
when complete.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from primus_images.errors import InputError
from primus_images.files import mark_of, remove_path, sha256_of
from primus_images.waits import lock


class FileCache:
    """The cache of fetched files in ``root``/sha256."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folder = root / "sha256"

    def path(self, sha256: str) -> Path:
        """Return the file's path, whether or not it exists."""
        return self._folder / sha256

    def has(self, sha256: str, size: int) -> bool:
        """Whether the file is cached, judging by its size; :meth:`verify` reads it."""
        return self.mark(sha256)[:1] == (size,)

    def size(self, sha256: str) -> int:
        """Return how many bytes of the file are here, complete or from an interrupted fetch."""
        for path in (self.path(sha256), self._folder / f"{sha256}.part"):
            with suppress(OSError):
                return path.stat().st_size
        return 0

    def mark(self, sha256: str) -> tuple[int, ...]:
        """Return size, times and inode, which change when the file is written to. Empty if it is
        not cached.
        """
        try:
            status = self.path(sha256).stat()
        except OSError:
            return ()
        if not stat.S_ISREG(status.st_mode):
            return ()
        return tuple(mark_of(status))

    def verify(self, sha256: str) -> bool:
        """Whether the file is cached and its bytes match its hash."""
        try:
            return sha256_of(self.path(sha256)) == sha256
        except (OSError, InputError):
            return False

    def drop(self, sha256: str) -> None:
        """Remove the file, so that it is fetched again."""
        remove_path(self.path(sha256))

    def put(self, source: Path, sha256: str) -> bool:
        """Add a copy of ``source``. Returns False, and keeps nothing, if its bytes do not match
        ``sha256``.
        """
        with self.part(sha256) as part:
            if part is None:
                return True
            part.truncate(0)
            with source.open("rb") as file:
                shutil.copyfileobj(file, part, 1 << 20)
            return self.commit(part, sha256) == sha256

    @contextmanager
    def part(self, sha256: str) -> Iterator[BinaryIO | None]:
        """Yield the locked ``.part`` with the bytes of an interrupted fetch; None if another
        process completed it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{sha256}.part"
        final = self.path(sha256)
        while True:
            with path.open("a+b") as file:
                lock(file.fileno(), f"another download of {sha256[:12]}", path)
                # A power cut may have left a file of its name and other bytes.
                if final.exists() and not self.verify(sha256):
                    self.drop(sha256)
                if final.exists():
                    if _same_file(path, file):
                        path.unlink()
                    yield None
                    return
                # Meanwhile, the holder of the lock may have renamed this very inode.
                if _same_file(path, file):
                    yield file
                    return

    def commit(self, part: BinaryIO, sha256: str) -> str:
        """Make the part the cached file, and return the hash of its bytes. Empties the part if they
        are other ones.
        """
        part.seek(0)
        digest = hashlib.file_digest(part, "sha256").hexdigest()  # type: ignore[arg-type]
        if digest == sha256:
            # A cached file is recognized by its size alone, so flush its bytes before the rename.
            os.fsync(part.fileno())
            path = Path(part.name)
            path.chmod(0o444)
            path.replace(self.path(sha256))
        else:
            part.truncate(0)
        return digest


def _same_file(path: Path, file: BinaryIO) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False
