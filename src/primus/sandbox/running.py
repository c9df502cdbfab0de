"""The processes that threads of this one wait for, which must end when it is interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

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
            os.killpg(process.pid, signal.SIGKILL)
