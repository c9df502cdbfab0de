"""Folders that exist for one run, and are removed even if the run was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from primus.errors import HostError


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """The folder of one run; ``lock`` is the file that is locked during the run."""

    name: str
    path: Path
    lock: Path


@contextlib.contextmanager
def scratch(base: Path, remove: Callable[[Path], bool]) -> Iterator[Scratch]:
    """Create a folder below ``base``. At the end, ``remove`` is called for it and for those of killed runs.

    If ``remove`` returns False, a later run tries again.
    """
    try:
        base.mkdir(parents=True, exist_ok=True)
        _sweep(base, remove)
        lock_fd, entry = _create(base)
    except OSError as error:
        raise HostError(
            f"cannot keep a run's files below {base}: {error.strerror}",
            hint="the directory must be yours and on a writable file system",
        ) from error
    try:
        yield entry
    finally:
        if remove(entry.path):
            entry.lock.unlink(missing_ok=True)
        os.close(lock_fd)


def _create(base: Path) -> tuple[int, Scratch]:
    while True:
        name = uuid.uuid4().hex[:16]
        lock = base / f"{name}.lock"
        lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Another run's cleanup may have removed the file before it was locked. Take another name then.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock_fd).st_nlink:
                path = base / name
                path.mkdir()
                return lock_fd, Scratch(name=name, path=path, lock=lock)
        os.close(lock_fd)


def _sweep(base: Path, remove: Callable[[Path], bool]) -> None:
    for lock in base.glob("*.lock"):
        try:
            lock_fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if remove(lock.with_suffix("")):
                lock.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock_fd)
