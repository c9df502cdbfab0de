"""Directories that live as long as one run, and vanish even when the run was killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from primus.errors import HostError

__all__ = ["Scratch", "scratch"]


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """One run's own directory; ``lock`` is the file that is locked while the run lives."""

    name: str
    path: Path
    lock: Path

    def remember(self, *cgroups: Path) -> None:
        """Note control groups to remove should this process be killed."""
        self.lock.write_text(json.dumps([str(group) for group in cgroups]))


@contextlib.contextmanager
def scratch(base: Path, remove: Callable[[Path], None]) -> Iterator[Scratch]:
    """Make a directory below ``base``; ``remove`` removes it at the end, and those of killed runs."""
    try:
        base.mkdir(parents=True, exist_ok=True)
        _sweep(base, remove)
        held, entry = _create(base)
    except OSError as error:
        raise HostError(
            f"cannot keep a run's files below {base}: {error.strerror}",
            hint="the directory must be yours and on a writable file system",
        ) from error
    try:
        yield entry
    finally:
        remove(entry.path)
        entry.lock.unlink(missing_ok=True)
        os.close(held)


def _create(base: Path) -> tuple[int, Scratch]:
    while True:
        name = uuid.uuid4().hex[:16]
        lock = base / f"{name}.lock"
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Another run's sweep may have caught the file before it was locked; then take another name.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(held).st_nlink:
                path = base / name
                path.mkdir()
                return held, Scratch(name=name, path=path, lock=lock)
        os.close(held)


def _sweep(base: Path, remove: Callable[[Path], None]) -> None:
    for lock in base.glob("*.lock"):
        try:
            held = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(lock.with_suffix(""))
            # A killed run's processes may take a moment to leave; then the next sweep removes the group.
            left = [group for group in _groups(lock) if not _gone(group)]
            if not left:
                lock.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(held)


def _gone(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _groups(lock: Path) -> list[Path]:
    try:
        return [Path(item) for item in json.loads(lock.read_text() or "[]") if "primus-" in item]
    except (OSError, ValueError):
        return []
