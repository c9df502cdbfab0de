"""The cache of fetched inputs, by content: ``sha256/<hex>`` is either whole and right, or absent.

Several processes may use one cache at once: a file being fetched is a locked ``.part`` beside its place, and
appears by rename.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from primus.errors import InputError
from primus.files import open_regular

_BLOCK = 1 << 20


class Part:
    """A file on its way into the cache; made by :meth:`FileCache.part`, which holds its lock."""

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
        """Throw away what is there."""
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self.size = 0

    def sha256(self) -> str:
        """Hash of what is there."""
        return self._digest.hexdigest()

    def commit(self) -> None:
        """Make it the cached file. The caller has compared :meth:`sha256`."""
        self._file.flush()
        # Presence is judged by size alone, so the bytes must be down before the name is.
        os.fsync(self._file.fileno())
        self.path.chmod(0o444)
        self.path.replace(self._final)


class FileCache:
    """Fetched files under ``root``/sha256."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folder = root / "sha256"

    def path(self, sha256: str) -> Path:
        """Where the file is, or would be."""
        return self._folder / sha256

    def has(self, sha256: str, size: int) -> bool:
        """Whether the file is here, by one stat; :meth:`verify` reads it."""
        try:
            status = self.path(sha256).stat()
        except OSError:
            return False
        return status.st_size == size and stat.S_ISREG(status.st_mode)

    def mark(self, sha256: str) -> tuple[int, ...]:
        """What changes when the file is written to: size, times, inode. Empty when it is not here."""
        try:
            status = self.path(sha256).stat()
        except OSError:
            return ()
        return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def verify(self, sha256: str) -> bool:
        """Whether the file is here and its bytes still hash to its name."""
        try:
            with open_regular(self.path(sha256)) as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == sha256  # type: ignore[arg-type]
        except (OSError, InputError):
            return False

    def drop(self, sha256: str) -> None:
        """Forget the file, so that it is fetched again."""
        path = self.path(sha256)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def put(self, source: Path, sha256: str) -> bool:
        """Take a copy of ``source`` in; False (and nothing kept) when its bytes do not hash to ``sha256``."""
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
        """The file's ``.part``, locked, with what an interrupted fetch left; waits while another process fetches it.

        None when the file is complete by the time the lock is ours.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path, final = self._folder / f"{sha256}.part", self.path(sha256)
        while True:
            with path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                # While we waited, the holder may have renamed this very inode into place.
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
