"""Starting a job's processes, writing their log, and ending them."""

import collections
import ctypes
import errno
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
# Space reserved for the end of the log and the results, so that a job can report that its disk is
# full.
_RESERVE_BYTES = 4 << 20
# Signals of a shell, a scheduler and a closed terminal. Ranks are in their own sessions and do not
# receive them.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TAIL_LINES = 1000
_LOOK_SECONDS = 0.5
# With less free space than this, files of the ranks are incomplete, too.
_FULL_BYTES = 64 << 10
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a launch: exit code (negative: a signal), wall seconds, and whether the disk of
    the log was full.
    """

    exit_code: int
    seconds: float
    disk_full: bool = False


def dropped(inherited: Mapping[str, str]) -> list[str]:
    """Return the variables of another torchrun that :func:`clean` drops: torchrun reads them as its
    own arguments.
    """
    return sorted(
        filter(re.compile("PET_|TORCHELASTIC_(?!LOG_LINE_PREFIX_TEMPLATE$)").match, inherited)
    )


def clean(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return ``inherited`` without :func:`dropped`, and with a module path that the current folder
    is never part of.

    A folder ``torchtitan`` or a file ``torch.py`` there would otherwise be trained instead of the
    installed package.
    """
    # transformers reads docstrings, which PYTHONOPTIMIZE=2 removes.
    variables = {
        k: value
        for k, value in inherited.items()
        if k not in (*dropped(inherited), "PYTHONOPTIMIZE")
    }
    places = [
        place
        for place in variables.pop("PYTHONPATH", "").split(os.pathsep)
        if Path(place).is_absolute()
    ]
    own = str(Path(primus_images.__file__).parents[1])
    # The current folder stays if this very package was loaded from it.
    kept = [place for place in places if Path(place).resolve() != Path.cwd() or place == own]
    return (
        variables
        | {"PYTHONSAFEPATH": "1"}
        | ({"PYTHONPATH": os.pathsep.join(kept)} if kept else {})
    )


def run(
    argv: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    on_line: Callable[[str], None] | None = None,
    patience: Callable[[], float] = lambda: 0,
    on_silence: Callable[[int], None] = lambda _launcher: None,
    hopeless: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run ``argv``, write its output to ``log`` and pass each line to ``on_line``.

    SIGINT, SIGTERM and SIGHUP end the ranks first (after ``GRACE_SECONDS`` by force), then raise
    KeyboardInterrupt. If the disk is full, the job ends ``GRACE_SECONDS`` later, and the last
    ``_TAIL_LINES`` lines are written to reserved space. Raises OSError if that space is not free at
    the start, or if the log cannot be written at the end. If ``on_line`` raises, it is not called
    again, and the job goes on.

    No process of the job outlives this call, even if the launcher was killed. After ``patience()``
    seconds without a line (0: never), ``on_silence`` is called once with the launcher's process id
    and must end the ranks. The launcher is ended ``GRACE_SECONDS`` later, and as long after
    ``hopeless`` becomes true, as when another node has failed.
    """
    started = last_line = time.monotonic()
    # Processes whose parent has ended become children of this one.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    others = _children(os.getpid())
    stop = threading.Event()
    with _Log(log) as writer, _signals(stop):
        process = subprocess.Popen(
            list(argv),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            preexec_fn=_ending_with(os.getpid()),
        )

        def copy() -> None:
            nonlocal last_line
            follow = on_line
            for line in process.stdout or ():
                last_line = time.monotonic()
                writer.write(line)
                try:
                    if follow:
                        follow(line)
                except Exception as error:
                    follow = None
                    writer.write(
                        "primus: the command no longer follows this log: "
                        f"{type(error).__name__}: {error}\n"
                    )

        reader = threading.Thread(target=copy, daemon=True)
        reader.start()
        end: float | None = None
        while (
            process.poll() is None and not stop.is_set() and (end is None or time.monotonic() < end)
        ):
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_LOOK_SECONDS)
            silent = 0 < patience() < time.monotonic() - last_line
            # On a full disk, torchrun writes to its store forever, long after its ranks have
            # failed.
            if end is None and process.poll() is None and (silent or writer.full or hopeless()):
                end = time.monotonic() + GRACE_SECONDS
                if silent:
                    on_silence(process.pid)
        code = _ended(process)
        # Ranks are in their own sessions. Those that the launcher did not end are children of this
        # process now.
        _end(_children(os.getpid()) - others)
        reader.join(timeout=10)
        if process.stdout is not None and not reader.is_alive():
            process.stdout.close()
    if stop.is_set():
        raise KeyboardInterrupt
    return Ended(exit_code=code, seconds=time.monotonic() - started, disk_full=writer.full)


def _ended(process: subprocess.Popen[str]) -> int:
    process.terminate()  # nothing if it has ended
    try:
        return process.wait(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class _Log:
    """A log that keeps its last lines in memory once it cannot be written, and writes them at the
    end.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._reserve = path, path.with_name(".reserve")
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._lost = 0
        self._closed = False
        # A reader that outlives the log must not write to another file that got the log's
        # descriptor.
        self._lock = threading.Lock()
        # Whether a line found no space, or the disk had none left at the end.
        self.full = False

    def __enter__(self) -> "_Log":
        with self._reserve.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        return self

    def write(self, line: str) -> None:
        with self._lock:
            if self._closed:
                return
            if not self._lost:
                data = line.encode("utf-8", "replace")
                try:
                    # A short write means that the disk has just become full.
                    self.full = os.write(self._file, data) < len(data)
                    if not self.full:
                        return
                except OSError as error:
                    self.full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._lost += 1
            self._tail.append(line)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            disk = os.fstatvfs(self._file)
            why = "this log could not be written"
            if self.full:
                why = "the disk was full"
            self.full |= disk.f_bavail * disk.f_frsize < _FULL_BYTES
            self._reserve.unlink(missing_ok=True)
            if self._lost:
                note = f"\nprimus: {why}; {self._lost - len(self._tail)} lines are missing here\n"
                os.write(self._file, "".join([note, *self._tail]).encode("utf-8", "replace"))
            os.close(self._file)


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    # One that is ignored, as under nohup, stays ignored.
    numbers = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending_with(parent: int) -> Callable[[], None]:
    """Return a function for a new process, which then gets SIGTERM when ``parent`` dies, even by
    SIGKILL.

    The launcher then ends its ranks, which nothing else would do.
    """
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    return ask


def processes() -> dict[int, tuple[int, str]]:
    """Return the id of each process → its parent's, and its state as in ``/proc``, such as "T" if
    it is stopped.
    """
    rows = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # The command name, in parentheses, can contain spaces.
                state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                rows[int(entry.name)] = int(parent), state
    return rows


def _children(ancestor: int) -> set[int]:
    every = processes()
    descendants = set[int]()
    frontier = {ancestor}
    while frontier:
        frontier = {pid for pid, (parent, _) in every.items() if parent in frontier} - descendants
        descendants |= frontier
    return descendants


def _end(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
