"""A job's processes: starting them, writing their log, and ending them."""

import ctypes
import errno
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import primus_images

GRACE_SECONDS = 15.0
# Space reserved for the end of the log, so that a job can report that its disk is full.
_RESERVE_BYTES = 4 << 20
# Signals of a shell, a scheduler and a closed terminal. Ranks are in their own sessions and do not
# receive them.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_SECONDS = 0.5
# Whoever looks this late was stopped itself.
_STOPPED_SECONDS = 20.0
# With less free space than this, files of the ranks are incomplete, too.
_FULL_BYTES = 64 << 10
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What follows a job while it runs.

    ``on_line`` gets each line of its output. After ``patience()`` seconds without one (0: never),
    ``on_silence`` is called once with the launcher's process id, and must end the ranks. The
    launcher is ended ``GRACE_SECONDS`` later, and as long after ``should_end`` becomes true, for
    example because another node has failed.
    """

    on_line: Callable[[str], object] = lambda _line: None
    patience: Callable[[], float] = lambda: 0.0
    on_silence: Callable[[int], object] = lambda _launcher: None
    should_end: Callable[[], bool] = lambda: False


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a launch. A negative ``exit_code`` is a signal."""

    exit_code: int
    seconds: float
    disk_full: bool = False


def dropped(inherited: Mapping[str, str]) -> list[str]:
    """Return the variables of another torchrun, which torchrun would read as its own arguments."""
    pattern = re.compile("PET_|TORCHELASTIC_(?!LOG_LINE_PREFIX_TEMPLATE$)")
    return sorted(filter(pattern.match, inherited))


def clean(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return ``inherited`` without what would make the ranks run other code.

    These are the variables :func:`dropped`, and the current folder in the module path: a folder
    ``torchtitan`` or a file ``torch.py`` there would be trained instead of the installed package.
    """
    variables = dict(inherited)
    # transformers reads docstrings, which PYTHONOPTIMIZE=2 removes.
    for name in (*dropped(inherited), "PYTHONOPTIMIZE"):
        variables.pop(name, None)
    own = str(Path(primus_images.__file__).parents[1])
    kept = []
    for place in variables.pop("PYTHONPATH", "").split(os.pathsep):
        here = Path(place).resolve() == Path.cwd()
        # The current folder stays if this very package was loaded from it.
        if Path(place).is_absolute() and (place == own or not here):
            kept.append(place)
    if kept:
        variables["PYTHONPATH"] = os.pathsep.join(kept)
    variables["PYTHONSAFEPATH"] = "1"
    return variables


def run(
    argv: Sequence[str], *, log: Path, environment: Mapping[str, str], watch: Watch | None = None
) -> Ended:
    """Run ``argv``, and write its output to ``log``.

    SIGINT, SIGTERM and SIGHUP end the ranks first (after ``GRACE_SECONDS`` by force), then raise
    KeyboardInterrupt with the signal's name. If the disk is full, the job ends ``GRACE_SECONDS``
    later, and the end of the log is written to reserved space. Raises OSError if that space is not
    free at the start, or if the log cannot be written at the end. No process of the job outlives
    this call, even if the launcher was killed.
    """
    started = time.monotonic()
    watch = watch or Watch()
    # Processes whose parent has ended become children of this one.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    others = _children(os.getpid())
    stop = threading.Event()
    with _Log(log) as writer, _signals(stop) as caught:
        process = subprocess.Popen(
            list(argv),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            preexec_fn=ending_with(os.getpid()),
        )
        reader = _Reader(process, writer, watch)
        reader.start()
        _wait(process, reader, watch, stop)
        code = _ended(process)
        # Ranks are in their own sessions. Those that the launcher did not end are children of this
        # process now.
        _end(_children(os.getpid()) - others)
        reader.join(timeout=10)
        if process.stdout is not None and not reader.is_alive():
            process.stdout.close()
    if stop.is_set():
        raise KeyboardInterrupt(caught[0])
    return Ended(exit_code=code, seconds=time.monotonic() - started, disk_full=writer.full)


class _Reader(threading.Thread):
    """Copies the output of a process to its log, and passes each line on."""

    def __init__(self, process: subprocess.Popen[str], log: "_Log", watch: Watch) -> None:
        super().__init__(daemon=True)
        self.last_line = time.monotonic()
        self.log = log
        self._process = process
        self._watch = watch

    def run(self) -> None:
        try:
            for line in self._lines():
                self._watch.on_line(line)
        finally:
            # The job goes on when its lines can no longer be shown.
            for _ in self._lines():
                pass

    def _lines(self) -> Iterator[str]:
        for line in self._process.stdout or ():
            self.last_line = time.monotonic()
            self.log.write(line)
            yield line


def _wait(
    process: subprocess.Popen[str], reader: _Reader, watch: Watch, stop: threading.Event
) -> None:
    """Wait for the end of the launcher, or for a reason to end it."""
    deadline = math.inf
    looked = time.monotonic()
    while process.poll() is None and not stop.is_set() and time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_LOOK_SECONDS)
        # The ranks were stopped with this process, as `scontrol suspend` does: none is silent.
        if time.monotonic() - looked > _STOPPED_SECONDS:
            reader.last_line = time.monotonic()
        looked = time.monotonic()
        if deadline < math.inf or process.poll() is not None:
            continue
        silent = 0 < watch.patience() < time.monotonic() - reader.last_line
        # On a full disk, torchrun writes to its store forever, long after its ranks have failed.
        if silent or reader.log.full or watch.should_end():
            deadline = time.monotonic() + GRACE_SECONDS
        if silent:
            watch.on_silence(process.pid)


def _ended(process: subprocess.Popen[str]) -> int:
    process.terminate()  # nothing if it has ended
    try:
        return process.wait(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class _Log:
    """A log with reserved space, which is used once the disk is ``full``."""

    def __init__(self, path: Path) -> None:
        self.full = False
        self._path = path
        self._reserve = path.with_name(".reserve")
        # A reader may outlive the log.
        self._lock = threading.Lock()

    def __enter__(self) -> "_Log":
        with self._reserve.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
        self._file = self._path.open("wb")
        return self

    def write(self, line: str) -> None:
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(line.encode("utf-8", "replace"))
                self._file.flush()
            except OSError as error:
                self.full |= error.errno in (errno.ENOSPC, errno.EDQUOT)
                self._reserve.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            disk = os.fstatvfs(self._file.fileno())
            self.full |= disk.f_bavail * disk.f_frsize < _FULL_BYTES
            self._reserve.unlink(missing_ok=True)
            # Writes what could not be written before.
            self._file.close()


@contextmanager
def _signals(stop: threading.Event) -> Iterator[list[str]]:
    caught: list[str] = []

    def end(number: int, _frame: object) -> None:
        caught.append(signal.Signals(number).name)
        stop.set()

    # One that is ignored, as under nohup, stays ignored.
    numbers = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ending_with(parent: int) -> Callable[[], None]:
    """Return a function for a new process, which then gets SIGTERM when ``parent`` dies.

    That is so even if SIGKILL ends it. The launcher then ends its ranks, which nothing else would
    do.
    """
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    return ask


def processes() -> dict[int, tuple[int, str]]:
    """Return process id → its parent's, and its state as in ``/proc``, such as "T" for stopped."""
    rows = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The command name, in parentheses, can contain spaces.
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            rows[int(entry.name)] = int(parent), state
    return rows


def _children(ancestor: int) -> set[int]:
    parents = {pid: parent for pid, (parent, _) in processes().items()}
    descendants: set[int] = set()
    generation = {ancestor}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        generation -= descendants
        descendants |= generation
    return descendants


def _end(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
