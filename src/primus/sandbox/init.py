"""The container's first process: sets the scene, starts the command, reaps, passes signals on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import stat
import termios
from pathlib import Path
from typing import Any, NoReturn

from primus.errors import HostError, InputError
from primus.sandbox import rootfs, syscalls
from primus.sandbox.users import Identity, identity

__all__ = ["run"]


def run(job: dict[str, Any], guard: socket.socket) -> int:
    """Run the job in this (first) process of a pid namespace and return the command's exit code.

    Raises InputError or HostError before the command starts; afterwards all trouble is an exit code.
    """
    fields = dict(job["view"])
    fields["mounts"] = [(source, target, bool(writable)) for source, target, writable in fields["mounts"]]
    view = rootfs.View(**fields)
    flags = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWCGROUP
    if not view.network:
        flags |= syscalls.CLONE_NEWNET
    syscalls.unshare(flags)
    os.umask(0o022)
    syscalls.set_hostname(view.hostname)
    if not view.network:
        syscalls.loopback_up()
    groups = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in job["cgroup_procs"]]
    root = rootfs.assemble(view)
    who = identity(
        job["user"],
        Path(rootfs.resolve_inside(root, "/etc/passwd")),
        Path(rootfs.resolve_inside(root, "/etc/group")),
    )
    _working_directory(root, job["cwd"])
    syscalls.pivot_root(root)
    env = dict(job["env"])
    env.setdefault("HOME", who.home)
    env.setdefault("HOSTNAME", view.hostname)
    slave = -1
    if job["tty"]:
        env.setdefault("TERM", job["term"])
        slave = _terminal(guard, who)
    # Nothing that runs from here on may hold a way out.
    guard.close()
    syscalls.drop_capabilities()
    syscalls.hide()
    problem_read, problem_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _command(job, env=env, who=who, slave=slave, groups=groups, problem=problem_write)
    for number in (problem_write, slave, *groups):
        if number >= 0:
            os.close(number)
    return _reap(pid, job["argv"][0], problem_read)


def _working_directory(root: str, cwd: str) -> None:
    if not cwd.startswith("/"):
        raise InputError(f"the working directory {cwd!r} is not absolute")
    found = Path(rootfs.resolve_inside(root, cwd))
    if found.exists() and not found.is_dir():
        raise InputError(f"the working directory {cwd} is a file in this image")
    with contextlib.suppress(OSError):
        found.mkdir(parents=True, exist_ok=True)


def _terminal(guard: socket.socket, who: Identity) -> int:
    master, slave = os.openpty()
    with contextlib.suppress(OSError):
        os.fchown(slave, who.uid, -1)
    socket.send_fds(guard, [b"t"], [master])
    os.close(master)
    return slave


def _command(
    job: dict[str, Any], *, env: dict[str, str], who: Identity, slave: int, groups: list[int], problem: int
) -> NoReturn:
    try:
        os.setsid()
        if slave >= 0:
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            for number in (0, 1, 2):
                os.dup2(slave, number)
        for number in groups:
            os.write(number, b"0")
        for number in range(1, signal.NSIG):
            # The interpreter ignores SIGPIPE and SIGXFSZ; programs expect neither.
            if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                with contextlib.suppress(OSError, ValueError):
                    signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _become(who)
        os.chdir(job["cwd"])
        _execute(job["argv"], env)
    except OSError as error:
        os.write(problem, f"{error.errno} {error.filename or ''}".encode("utf-8", "surrogateescape"))
    except HostError as error:
        os.write(problem, f"0 {error.message}".encode())
    finally:
        os._exit(126)


def _become(who: Identity) -> None:
    try:
        os.setgroups(who.groups)
        os.setresgid(who.gid, who.gid, who.gid)
        os.setresuid(who.uid, who.uid, who.uid)
    except OSError as error:
        raise HostError(f"cannot become user {who.uid}:{who.gid}, which is outside your subordinate ids") from error


def _execute(argv: list[str], env: dict[str, str]) -> None:
    name = argv[0]
    if "/" in name:
        os.execve(name, argv, env)
    denied: OSError | None = None
    for directory in env.get("PATH", "").split(":"):
        path = f"{directory or '.'}/{name}"
        try:
            if stat.S_ISDIR(os.stat(path).st_mode):  # noqa: PTH116
                continue
            os.execve(path, argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            denied = denied or error
    raise denied or FileNotFoundError(errno.ENOENT, "", name)


def _reap(pid: int, name: str, problem: int) -> int:
    waited = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    code: int | None = None
    while code is None:
        info = signal.sigwaitinfo(waited)
        if info.si_signo != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, info.si_signo)
            continue
        with contextlib.suppress(ChildProcessError):
            while True:
                done, status = os.waitpid(-1, os.WNOHANG)
                if done == pid:
                    ended = os.waitstatus_to_exitcode(status)
                    code = 128 - ended if ended < 0 else ended
                if not done:
                    break
    with open(problem, "rb") as file:
        told = file.read().decode("utf-8", "replace")
    return _explain(name, told) if told else code


def _explain(name: str, told: str) -> int:
    number, _, detail = told.partition(" ")
    if number == "0":
        sentence, code = detail, 126
    elif int(number) in (errno.ENOENT, errno.ENOTDIR):
        sentence, code = f"{name}: not found in the image", 127
        if "/" in name and Path(name).exists():
            sentence = f"{name}: its interpreter is not in the image"
    elif int(number) == errno.ENOEXEC:
        sentence, code = f"{name}: not a program for this machine, and no #! line", 126
    else:
        sentence, code = f"{detail or name}: {os.strerror(int(number))}", 126
    os.write(2, f"primus: {sentence}\n".encode())
    return code
