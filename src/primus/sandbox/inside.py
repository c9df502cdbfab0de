"""The helper process of one embedded run: makes the namespaces, stays outside as their guard, relays signals.

It is its own interpreter, so that the runner may have threads and the container's first process has none.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
from pathlib import Path
from typing import Any, NoReturn

from primus.errors import PrimusError
from primus.sandbox import channel, init, relay, syscalls

__all__ = ["FORWARDED", "main"]

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)


def main(args: list[str]) -> int:
    """``args``: job descriptor, report descriptor, the runner's pid. Returns the command's exit code."""
    report = int(args[1])
    os.set_inheritable(report, False)
    job = channel.unpack(int(args[0]))
    try:
        syscalls.die_with_parent(int(args[2]))
        return _guard(job, report)
    except (PrimusError, OSError) as error:
        channel.report(report, error)
        return 125


def _guard(job: dict[str, Any], report: int) -> int:
    watched = {*FORWARDED, signal.SIGCHLD}
    # Blocked until somebody listens: a signal that comes early then waits, in the container's init too.
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    ours, theirs = socket.socketpair()
    syscalls.unshare(syscalls.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _first_process(job, report, theirs)
    theirs.close()
    terminal: relay.Terminal | None = None
    code: int | None = None
    try:
        # The init says when it is tied to our life; if we die before the answer, it sees the socket close.
        if ours.recv(1):
            ours.send(b"1")
        if job["tty"]:
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
            terminal = relay.Terminal(fds[0]) if fds else None
        code = _watch(pid, watched, terminal)
        return code
    finally:
        if terminal:
            terminal.close()
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for name in ("upper", "work"):
            # Here we are root of the user namespace; the runner may be nobody to these files.
            shutil.rmtree(Path(job["view"]["scratch"], name), ignore_errors=True)


def _first_process(job: dict[str, Any], report: int, theirs: socket.socket) -> NoReturn:
    code = 125
    try:
        syscalls.die_with_parent()
        theirs.send(b"1")
        if theirs.recv(1):
            code = init.run(job, theirs)
    except (PrimusError, OSError) as error:
        channel.report(report, error)
    finally:
        os._exit(code)


def _watch(pid: int, watched: set[signal.Signals], terminal: relay.Terminal | None) -> int:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in watched:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if terminal:
                terminal.drain()
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code
        reads, writes = terminal.interests() if terminal else ([], [])
        ready, writable, _ = select.select([wake_read, *reads], writes, [])
        if terminal:
            terminal.move(ready, writable)
        if wake_read not in ready:
            continue
        for got in os.read(wake_read, 512):
            if terminal and got == signal.SIGWINCH:
                terminal.resize()
            elif got != signal.SIGCHLD:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, got)
