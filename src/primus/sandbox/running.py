"""Processes that this one waits for in some thread, and must end when it is interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

_running: set[subprocess.Popen[bytes]] = set()


@contextlib.contextmanager
def tracked(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """``process``, which leads a session of its own; with what is in it, it is killed should the block end first."""
    _running.add(process)
    try:
        yield process
    finally:
        if process.poll() is None:
            _kill(process)
            process.wait()
        _running.discard(process)


def stop_all() -> None:
    """Kill every tracked process and its session's group, whatever thread waits for it."""
    for process in list(_running):
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    # It leads its group as long as it was not waited for, and only then the number is surely its own.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
