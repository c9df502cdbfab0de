"""The content-addressed cache of fetched files: ``sha256/<hex>`` is either complete and correct, or absent.

Several processes may use a cache at once: a file being fetched is a locked ``.part`` file, which is renamed when
complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from primus.errors import InputError
from primus.files import open_regular, remove_folder

_BLOCK = 1 << 20


class Part:
    """A file being fetched; created by :meth:`FileCache.part`, which holds its lock."""

    def __init__(self, path: Path, final: Path, file: BinaryIO) -> None:
        self.path = path
        self._final = final
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0
        while block := file.read(_BLOCK):
            self._digest.update(block)
            self.size += len(block)

    def write(self, block: bytes) -> None:
        """Append ``block``."""
        self._file.write(block)
        self._digest.update(block)
        self.size += len(block)

    def restart(self) -> None:
        """Discard the bytes so far."""
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self.size = 0

    def sha256(self) -> str:
        """The hash of the bytes so far."""
        return self._digest.hexdigest()

    def commit(self) -> None:
        """Rename it to the cached file. The caller must have compared :meth:`sha256`."""
        self._file.flush()
        # A cached file is recognized by its size alone, so flush its bytes before the rename.
        os.fsync(self._file.fileno())
        self.path.chmod(0o444)
        self.path.replace(self._final)


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
        try:
            status = self.path(sha256).stat()
        except OSError:
            return False
        return status.st_size == size and stat.S_ISREG(status.st_mode)

    def mark(self, sha256: str) -> tuple[int, ...]:
        """Return size, times and inode, which change when the file is written to. Empty if it is not cached."""
        try:
            status = self.path(sha256).stat()
        except OSError:
            return ()
        return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def verify(self, sha256: str) -> bool:
        """Whether the file is cached and its bytes match its hash."""
        try:
            with open_regular(self.path(sha256)) as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == sha256  # type: ignore[arg-type]
        except (OSError, InputError):
            return False

    def drop(self, sha256: str) -> None:
        """Remove the file, so that it is fetched again."""
        path = self.path(sha256)
        if path.is_dir() and not path.is_symlink():
            remove_folder(path, strict=True)
        else:
            path.unlink(missing_ok=True)

    def put(self, source: Path, sha256: str) -> bool:
        """Add a copy of ``source``. Returns False, and keeps nothing, if its bytes do not match ``sha256``."""
        with self.part(sha256) as part:
            if part is None:
                return True
            part.restart()
            with source.open("rb") as file:
                while block := file.read(_BLOCK):
                    part.write(block)
            if part.sha256() != sha256:
                part.restart()
                return False
            part.commit()
            return True

    @contextmanager
    def part(self, sha256: str) -> Iterator[Part | None]:
        """Yield the file's locked ``.part`` with the bytes of an interrupted fetch. Waits while another process
        fetches it.

        Yields None if the file is complete when the lock is acquired.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path, final = self._folder / f"{sha256}.part", self.path(sha256)
        while True:
            with path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                # Meanwhile, the holder of the lock may have renamed this very inode.
                if not _same_file(path, file):
                    if final.exists():
                        yield None
                        return
                    continue
                if final.exists():
                    path.unlink()
                    yield None
                    return
                file.seek(0)
                yield Part(path, final, file)
                return


def _same_file(path: Path, file: BinaryIO) -> bool:
    try:
        there, here = path.stat(), os.fstat(file.fileno())
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
