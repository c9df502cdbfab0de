"""Child processes that end with this process, whether it ends by itself, by Ctrl-C or by SIGKILL."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import killpg

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")
FORWARDED = tuple(signal.Signals[name] for name in _NAMES)
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
def forwarded_signals() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Forward the signals that this process gets, also earlier ones, to the process with which the result is called."""
    receivers: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, _frame: object) -> None:
        for process in receivers:
            process.send_signal(number)
        if not receivers:
            early.append(number)

    def receive(process: subprocess.Popen[bytes]) -> None:
        receivers.append(process)
        for number in early:
            process.send_signal(number)

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, forward) for number in FORWARDED} if main else {}
    try:
        yield receive
    finally:
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
