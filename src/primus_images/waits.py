"""Waits that explain themselves: after 2 seconds, a line says for what, and how to go on.

Locks are those of flock(2), which the kernel releases when their holder dies.
"""

import contextlib
import fcntl
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from primus_images.errors import HostError
from primus_images.files import ownership, text_if_readable

_PATIENCE_S = 2.0
# Threads that wait for the same thing print one line, and another one after a minute.
_AGAIN_S = 60.0
_PRINTED: dict[str, float] = {}
_PRINTING = threading.Lock()


@contextlib.contextmanager
def explained(reason: Callable[[], str], progress: Callable[[], int] = int) -> Iterator[None]:
    """Print ``reason()`` to standard error if ``progress()`` stays the same for 2 s.

    Each new reason after it is printed, too. An empty reason means that nothing is awaited.
    """
    ended = threading.Event()

    def watch() -> None:
        before = progress()
        while not ended.wait(_PATIENCE_S):
            amount = progress()
            text = reason()
            if text and amount == before and not ended.is_set():
                _say_once(text)
            before = amount

    threading.Thread(target=watch, daemon=True, name="wait").start()
    try:
        yield
    finally:
        ended.set()


def _say_once(text: str) -> None:
    with _PRINTING:
        now = time.monotonic()
        if now - _PRINTED.get(text, -_AGAIN_S) >= _AGAIN_S:
            print(f"… {text}", file=sys.stderr, flush=True)
            _PRINTED[text] = now


def answer_of(
    source: str, progress: Callable[[], int] = int
) -> contextlib.AbstractContextManager[None]:
    """Say after 2 s that the context waits for ``source``.

    It is a program or an address (without credentials).
    """
    sentence = f"waiting for {source} (Ctrl-C ends this command; finished work is kept)"
    return explained(lambda: sentence, progress)


def lock(handle: int, what: str, path: Path, *, shared: bool = False) -> None:
    """Take the lock of the open file ``path``.

    After 2 s, say who holds it: ``what`` completes "waiting for …".
    """
    if not try_lock(handle, shared=shared):
        with explained(lambda: f"waiting for {what}: {holders(handle, path)}"):
            fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def try_lock(handle: int, *, shared: bool = False) -> bool:
    """Take the lock of an open file or folder, unless another process holds it.

    Returns whether it was taken. It never is on a file system without locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_unlocked(path: Path) -> bool:
    """Whether nobody holds the lock of the file or folder ``path``.

    False for one that cannot be opened, and for a link.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return try_lock(handle)
    finally:
        os.close(handle)


def holders(handle: int, path: Path) -> str:
    """Return a sentence about the processes that hold the lock of the open file ``path``."""
    status = os.fstat(handle)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    table = text_if_readable(Path("/proc/locks"))
    sentences = []
    for pid in re.findall(rf": FLOCK +\S+ +\S+ (\d+) {file} ", table):
        if int(pid) == os.getpid():
            sentences.append("another part of this command holds it")
        elif Path(f"/proc/{pid}").exists():
            command = text_if_readable(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
            printable = "".join(c if c.isprintable() else " " for c in command[:100])
            sentences.append(f"process {pid} (`{printable}`) holds it (to end it: kill {pid})")
    return " and ".join(sentences) or f"`fuser -v {path}` names who holds it"


class InUse:
    """The lock file ``path`` that keeps ``primus clean`` from removing what another command uses.

    It guards the folder ``where``, which messages call ``what``.
    """

    def __init__(self, path: Path, what: str, where: Path) -> None:
        self._path = path
        self._what = what
        self._where = where
        self._held: int | None = None

    def hold(self) -> None:
        """Prevent :meth:`alone` from starting until this process ends. Does nothing if the folder
        does not exist.

        Raises HostError if this user may not read the folder, which would otherwise look empty.
        """
        if self._where.exists() and not os.access(self._where / ".", os.R_OK | os.X_OK):
            raise HostError(
                f"you may not read {self._what}: {ownership(self._where)}",
                hint="run this as its owner, or choose another one with --store or --project",
            )
        if self._held is None:
            # Readers of another user's folder hold the lock, too. A folder without this file was
            # never cleaned or built in.
            with contextlib.suppress(OSError):
                self._held = os.open(
                    self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644
                )
                lock(self._held, f"`primus clean` in {self._where}", self._path, shared=True)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other commands from using the folder. Raises HostError if one is using it."""
        if self._held is not None and not try_lock(self._held):
            users = holders(self._held, self._path)
            raise HostError(
                f"another command uses {self._what}: {users}",
                where=self._where,
                hint="run this again when it has ended",
            )
        try:
            yield
        finally:
            if self._held is not None:
                fcntl.flock(self._held, fcntl.LOCK_SH)
