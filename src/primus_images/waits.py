"""Waits that explain themselves: after 2 seconds, a line says for what, who causes the wait, and
how to go on.

Locks are those of flock(2), which the kernel releases when their holder dies.
"""

import contextlib
import fcntl
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from primus_images.errors import HostError
from primus_images.files import ownership, text_if_readable
from primus_images.yamlfile import read_values

_PATIENCE_S = 2.0
# Threads that wait for the same thing print one line, and another one after a minute.
_AGAIN_S = 60.0
_PRINTED: dict[str, float] = {}
_PRINTING = threading.Lock()


@contextlib.contextmanager
def explained(reason: Callable[[], str], progress: Callable[[], int] = int) -> Iterator[None]:
    """Print ``reason()`` to standard error if ``progress()`` stays the same for 2 s, and each new
    reason after it.

    An empty reason means that nothing is awaited.
    """
    ended = threading.Event()

    def watch() -> None:
        last = ""
        before = progress()
        while not ended.wait(_PATIENCE_S):
            amount = progress()
            text = reason()
            with _PRINTING:
                new = (
                    text not in ("", last)
                    and time.monotonic() - _PRINTED.get(text, -_AGAIN_S) >= _AGAIN_S
                )
                if amount == before and new and not ended.is_set():
                    print(f"… {text}", file=sys.stderr, flush=True)
                    last = text
                    _PRINTED[text] = time.monotonic()
            before = amount

    threading.Thread(target=watch, daemon=True, name="wait").start()
    try:
        yield
    finally:
        ended.set()


def answer_of(
    source: str, progress: Callable[[], int] = int
) -> contextlib.AbstractContextManager[None]:
    """Say after 2 s that the context waits for ``source``: a program or an address (without
    credentials).
    """
    return explained(
        lambda: f"waiting for {source} (Ctrl-C ends this command; finished work is kept)", progress
    )


def lock(handle: int, what: str, path: Path, *, shared: bool = False) -> None:
    """Take the lock of the open file ``path``. After 2 s, say who holds it: ``what`` completes
    "waiting for …".
    """
    if shared:
        kind = fcntl.LOCK_SH
    else:
        kind = fcntl.LOCK_EX
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        with explained(lambda: f"waiting for {what}: {holders(handle, path)}"):
            fcntl.flock(handle, kind)


def holders(handle: int, path: Path) -> str:
    """Return a sentence about the processes that hold the lock of the open file ``path``, and how
    to go on.
    """
    table = re.findall(r": FLOCK +\S+ +\S+ (\d+) (\S+) ", text_if_readable(Path("/proc/locks")))
    status = os.fstat(handle)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    described = [_process(int(pid)) for pid, place in table if place == file]
    if not (described and all(described)):
        # A process that took the lock has died, but a child that it started without exec holds the
        # same open file.
        described = [_process(pid) for pid in _openers(status)]
    if not any(described):
        return (
            f"it is held on another machine or in another container; `fuser -v {path}` names "
            "it there"
        )
    return " and ".join(filter(None, described))


def _openers(status: os.stat_result) -> Iterator[int]:
    for info in Path("/proc").glob("[0-9]*/fdinfo/*"):
        with contextlib.suppress(OSError):
            opened = os.stat(f"{info.parent.parent}/fd/{info.name}")
            if os.path.samestat(opened, status) and "FLOCK" in info.read_text():
                yield int(info.parent.parent.name)


def _process(pid: int) -> str:
    if pid == os.getpid():
        return "another part of this command holds it"
    folder = Path(f"/proc/{pid}")
    state, *fields = text_if_readable(folder / "stat").rpartition(")")[2].split() or ["X"]
    if state in ("X", "Z"):
        return ""
    command = (
        " ".join(filter(None, text_if_readable(folder / "cmdline").split("\0")))
        or "unknown command"
    )
    command = "".join(c if c.isprintable() else " " for c in command)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[18]) / os.sysconf("SC_CLK_TCK")
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - age))
    states: Mapping[str, str] = read_values(Path(__file__).with_name("waits.yaml")).data
    condition = states.get(state, states["R"]).format(pid=pid)
    return f"process {pid} (`{command[:100]}`, since {since}) holds it and is {condition}"


class InUse:
    """The lock file ``path`` that keeps ``primus clean`` from removing what another command uses:
    the folder ``where``, which messages call ``what``.
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
            if not self._where.is_dir():
                raise HostError(
                    f"{self._where} is not a folder",
                    hint="choose another one with --store or --project",
                )
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
        if self._held is not None:
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                users = holders(self._held, self._path)
                raise HostError(
                    f"another command uses {self._what}: {users}",
                    where=self._where,
                    hint="run this again when it has ended",
                ) from None
        try:
            yield
        finally:
            if self._held is not None:
                fcntl.flock(self._held, fcntl.LOCK_SH)
