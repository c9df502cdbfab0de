"""Child processes that end with this process, whether it ends by itself, by Ctrl-C or by SIGKILL."""

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from os import killpg
from queue import SimpleQueue

_FORWARDED = [signal.Signals[f"SIG{name}"] for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH")]
_running: set[subprocess.Popen[bytes]] = set()


@contextlib.contextmanager
def tracked(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Yield ``process``, which leads its own session. If the block ends first, kill it with its session."""
    _running.add(process)
    try:
        yield process
    finally:
        if process.poll() is None:
            _kill(process)
            process.wait()
        _running.discard(process)


def stop_all() -> None:
    """Kill every tracked process with its process group, whichever thread waits for it."""
    for process in list(_running):
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    # Until it is waited for, the process leads its group, and its number cannot belong to another one.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def received_signals() -> Iterator[SimpleQueue[int]]:
    """Yield a queue of the signals that this process gets in the block, which then do nothing else. 0 ends it."""
    signals: SimpleQueue[int] = SimpleQueue()
    main = threading.current_thread() is threading.main_thread()
    before = {n: signal.signal(n, lambda number, _: signals.put(number)) for n in _FORWARDED} if main else {}
    try:
        yield signals
    finally:
        signals.put(0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def finally_run(argv: Sequence[str], env: Mapping[str, str]) -> Iterator[None]:
    """Run ``argv`` when the block ends, and wait for it; also if this process is killed in the block."""
    # The shell reads until the other end of its pipe is closed, by us or by the kernel.
    words, nothing = ["/bin/sh", "-c", 'read -r _; exec "$@"', "sh", *argv], subprocess.DEVNULL
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, env=env, cwd="/", start_new_session=True
    )
    try:
        yield
    finally:
        process.communicate()
