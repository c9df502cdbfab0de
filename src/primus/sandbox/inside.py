"""The helper processes of one embedded run, which end together with the runner.

The first one enters new mount and PID namespaces, mounts the image's overlay there and waits. The second one is process
1 of the PID namespace: it starts the OCI runtime, waits for the command and forwards signals. When either ends, for
whatever reason, the kernel ends everything in the container.

They run in interpreters of their own, which have no threads, so the runner may have some.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from primus.errors import HostError, PrimusError
from primus.sandbox import cgroups, channel, overlay, syscalls
from primus.sandbox.syscalls import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_REC
from primus.sandbox.users import identity

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
    """Run with the arguments job descriptor, report descriptor, PID of the runner. Returns the command's exit code."""
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
    # Blocked, so that an early signal is delivered when there is a handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    os.umask(0o022)
    scratch = Path(job["scratch"])
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID)
    syscalls.mount("none", "/", None, MS_REC | MS_PRIVATE)
    root = overlay.mount_overlay(job["lower"], scratch, user_namespace=job["user_namespace"])
    try:
        refused = _bundle(job, str(root))
        if refused:
            os.write(2, f"primus: {refused[1]}\n".encode())
            return refused[0]
        alive, ours = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            _first_process(job, report, alive)
        os.close(alive)
        return _wait(pid)
    finally:
        # This process is root of the user namespace, whereas the runner may not own these files.
        syscalls.unmount(root)
        for name in ("upper", "work"):
            shutil.rmtree(scratch / name, ignore_errors=True)


def _bundle(job: dict[str, Any], root: str) -> tuple[int, str] | None:
    """Add what only the image's files contain. Returns why the command cannot start, or None."""
    config = job["config"]
    process = config["process"]
    overlay.write_names(root, config["hostname"], network=job["network"])
    passwd, group = (Path(overlay.resolve_inside(root, f"/etc/{name}")) for name in ("passwd", "group"))
    who = identity(job["user"], passwd, group)
    process["user"] = {"uid": who.uid, "gid": who.gid, "additionalGids": [*who.groups, *job["groups"]]}
    if who.uid:
        # The capabilities after an exec by that user: none until it runs a setuid program.
        process["capabilities"] = {"bounding": process["capabilities"]["bounding"]}
    env = dict(item.split("=", 1) for item in process["env"])
    env = {"HOME": who.home, "HOSTNAME": config["hostname"], **({"TERM": job["term"]} if job["tty"] else {}), **env}
    process["env"] = [f"{key}={value}" for key, value in env.items()]
    Path(job["scratch"], "config.json").write_text(json.dumps(config))
    if not (_mapped("uid", who.uid) and _mapped("gid", who.gid)):
        return 126, f"cannot become user {who.uid}:{who.gid}, which is outside your subordinate ids"
    mounted = [entry["destination"] for entry in config["mounts"]]
    return overlay.missing_program(root, process["args"][0], env["PATH"], process["cwd"], mounted)


def _mapped(kind: str, number: int) -> bool:
    ranges = (line.split() for line in Path(f"/proc/self/{kind}_map").read_text().splitlines())
    return any(int(start) <= number < int(start) + int(count) for start, _, count in ranges)


def _first_process(job: dict[str, Any], report: int, alive: int) -> NoReturn:
    code = 125
    try:
        syscalls.die_with_parent()
        # If the guard ended before that, its end of the pipe is closed.
        if not select.select([alive], [], [], 0)[0]:
            code = _run(job)
            _finish(job)
    except (PrimusError, OSError) as error:
        channel.report(report, error)
    finally:
        os._exit(code)


def _run(job: dict[str, Any]) -> int:
    try:
        syscalls.mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError as error:
        raise HostError(
            f"the kernel refuses a fresh /proc: {error.strerror}",
            hint="this machine is itself a container that hides parts of /proc; start it with --privileged, "
            "or use --engine docker",
        ) from error
    syscalls.hide()
    scratch = Path(job["scratch"])
    words = [*job["runtime"], "run", "--bundle", str(scratch)]
    if job["tty"]:
        _terminal_for_the_runtime()
        # The runtime stays between the two terminals and forwards signals.
        # With --keep, the control groups, which count kills, are left to us. crun 1.8 does not have this option.
        keep = ["--keep"] if Path(words[0]).name == "runc" else []
        code = _wait(_start([*words, *keep, job["container"]]))
        if code:
            _raise_logged(job, scratch)
        return code
    # The command gets our own descriptors, and becomes our child when the runtime ends.
    pid_file = scratch / "pid"
    with _owners_kept():
        _, status = os.waitpid(_start([*words, "--detach", "--pid-file", str(pid_file), job["container"]]), 0)
    if status:
        _raise_logged(job, scratch)
        raise HostError(f"the OCI runtime {job['runtime'][0]} ended with exit code {os.waitstatus_to_exitcode(status)}")
    return _wait(int(pid_file.read_text()))


def _terminal_for_the_runtime() -> None:
    """Give the runtime the user's terminal that it expects, if stdin is not one."""
    if os.isatty(0):
        return
    if not (os.isatty(1) or os.isatty(2)):
        # The runtime copies its size. Nobody reads this terminal, because the runtime's messages are in its log.
        slave = os.openpty()[1]
        termios.tcsetwinsize(slave, (24, 80))
        os.dup2(slave, 2)
    # On a terminal, the end of a file is a character, which the runtime does not write.
    read, write = os.pipe()
    if os.fork() == 0:
        with contextlib.suppress(OSError):
            while data := os.read(0, 65536):
                os.write(write, data)
            os.write(write, b"\x04")
        os._exit(0)
    os.dup2(read, 0)
    os.close(write)


def _start(words: list[str]) -> int:
    # The interpreter ignores SIGPIPE and SIGXFSZ, and programs expect the default.
    defaults = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    return os.posix_spawn(words[0], words, env, setsigmask=[], setsigdef=defaults)


@contextlib.contextmanager
def _owners_kept() -> Iterator[None]:
    """Restore the owners of stdin, stdout and stderr, which the runtime gives to the container's user."""
    before = {}
    for number in (0, 1, 2):
        with contextlib.suppress(OSError):
            before[number] = os.fstat(number)
    yield
    for number, info in before.items():
        with contextlib.suppress(OSError):
            if os.fstat(number).st_uid != info.st_uid:
                os.fchown(number, info.st_uid, info.st_gid)


def _wait(pid: int) -> int:
    """Forward signals to ``pid`` until it ends, and reap other children. Returns the exit code, 128+n for signal n."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while True:
                done, status = os.waitpid(-1, os.WNOHANG)
                if done == pid:
                    code = os.waitstatus_to_exitcode(status)
                    return 128 - code if code < 0 else code
                if not done:
                    break
        info = signal.sigwaitinfo({*FORWARDED, signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, info.si_signo)


def _raise_logged(job: dict[str, Any], scratch: Path) -> None:
    """Raise the error in the runtime's log, if there is one."""
    message = ""
    with contextlib.suppress(OSError, ValueError):
        for line in (scratch / "runtime.log").read_text().splitlines():
            entry = json.loads(line)
            if entry.get("level") in ("error", "fatal"):
                message = str(entry.get("msg", ""))
    if not message:
        return
    if job["limits"] and "cgroup" in message.lower():
        raise HostError(
            f"this machine does not let you set a {job['limits']} limit: {message}",
            hint="run as root, use --engine docker, or start primus without the limit under: "
            "systemd-run --user --scope -p MemoryMax=… -p CPUQuota=…",
        )
    raise HostError(f"the OCI runtime cannot start the container: {message}")


def _finish(job: dict[str, Any]) -> None:
    """Report whether the memory limit killed a process, and let the runtime run its final hooks."""
    limit = job["config"]["linux"]["resources"].get("memory", {}).get("limit")
    if limit and cgroups.oom_kills(cgroups.groups_of(Path(job["scratch"], "state"))):
        text = f"primus: the kernel killed a process: over the memory limit of {limit / (1 << 20):.0f} MiB\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
    if job["config"]["hooks"].get("poststop"):
        os.waitpid(_start([*job["runtime"], "delete", "--force", job["container"]]), 0)
