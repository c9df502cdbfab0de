"""User namespaces for regular users: the user is root inside, and the user's subordinate ids are all other users."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from primus.errors import HostError
from primus.sandbox.running import tracked

_Range = tuple[int, int]

# Runs first in the child: enters a new user namespace, waits for the parent to write the id maps, becomes root in it,
# and executes the actual command. Two pipes connect it to the parent.
_ENTER = """
import ctypes, os, sys
ready, go, parent, keep_groups = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "keep"
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(1, 9, 0, 0, 0)
if os.getppid() != parent:
    os._exit(137)
if libc.unshare(0x10000000) < 0:
    os.write(ready, str(ctypes.get_errno()).encode())
    os._exit(125)
if keep_groups:
    with open("/proc/self/setgroups", "w") as file:
        file.write("deny")
os.write(ready, b"0")
if os.read(go, 1) != b"1":
    os._exit(125)
os.close(ready); os.close(go)
if not keep_groups:
    os.setgroups([])
os.setresgid(0, 0, 0); os.setresuid(0, 0, 0)
libc.prctl(1, 9, 0, 0, 0)
if os.getppid() != parent:
    os._exit(137)
try:
    os.execvp(sys.argv[5], sys.argv[5:])
except OSError as error:
    sys.stderr.write(f"{sys.argv[5]}: {error.strerror}\\n")
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""

_REMOVE = "import shutil, sys; [shutil.rmtree(path, ignore_errors=True) for path in sys.argv[1:]]"


def needed() -> bool:
    """Return whether this process needs a user namespace to do what root can do directly."""
    return os.geteuid() != 0


def helper(module: str, *args: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment that run ``main(args)`` of one of our modules in a new interpreter."""
    boot = (
        "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('PRIMUS_PATH')); "
        "from importlib import import_module; sys.exit(import_module(sys.argv.pop(1)).main(sys.argv[1:]))"
    )
    # The container's first process starts here, so it must not have the host's environment, which may contain tokens.
    # Without site and user settings, it starts in a third of the time, and they cannot affect it.
    env = {"PRIMUS_PATH": json.dumps([str(Path(entry).absolute()) for entry in sys.path])}
    if "LD_LIBRARY_PATH" in os.environ:
        env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return [sys.executable, "-I", "-S", "-c", boot, module, *args], env


def _ranges(path: Path, user: str, uid: int) -> list[_Range]:
    found = []
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        fields = line.strip().split(":")
        if len(fields) == 3 and fields[0] in (user, str(uid)) and fields[1].isdigit() and fields[2].isdigit():
            found.append((int(fields[1]), int(fields[2])))
    return [entry for entry in found if entry[1] > 0]


def _user() -> tuple[str, int]:
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name, uid
    except KeyError:
        return str(uid), uid


def missing() -> tuple[str, str] | None:
    """Return what prevents this user from creating a user namespace, as (problem, remedy), or None."""
    with contextlib.suppress(OSError, ValueError):
        if int(Path("/proc/sys/user/max_user_namespaces").read_text()) == 0:
            hint = "as root: sysctl -w user.max_user_namespaces=15000"
            return "user namespaces are switched off in this kernel", hint
    with contextlib.suppress(OSError):
        if Path("/proc/sys/kernel/unprivileged_userns_clone").read_text().strip() == "0":
            return (
                "user namespaces are for root only on this machine",
                "as root: sysctl -w kernel.unprivileged_userns_clone=1",
            )
    absent = [tool for tool in ("newuidmap", "newgidmap") if not shutil.which(tool)]
    if absent:
        return f"{' and '.join(absent)} is not installed", "as root: apt-get install uidmap"
    user, uid = _user()
    lacking = [str(path) for path in (Path("/etc/subuid"), Path("/etc/subgid")) if not _ranges(path, user, uid)]
    if lacking:
        return (
            f"user {user} has no subordinate ids in {' and '.join(lacking)}",
            f"as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}",
        )
    return None


def _map(ranges: Sequence[_Range], own: int) -> list[str]:
    args = ["0", str(own), "1"]
    inside = 1
    for start, count in ranges:
        args += [str(inside), str(start), str(count)]
        inside += count
    return args


def start(
    argv: Sequence[str], *, pass_fds: Sequence[int] = (), keep_groups: bool = False, **options: Any
) -> subprocess.Popen[bytes]:
    """Start ``argv`` as root of a new user namespace or, if this user is root, as a plain process.

    ``options`` are passed to Popen. With ``keep_groups``, the process keeps the user's supplementary groups, and no
    process in the namespace can change its own. Raises HostError if the kernel refuses.
    """
    if not needed():
        return subprocess.Popen(list(argv), pass_fds=tuple(pass_fds), **options)
    lack = missing()
    if lack:
        raise HostError(lack[0], hint=lack[1])
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    try:
        process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                _ENTER,
                str(ready_write),
                str(go_read),
                str(os.getpid()),
                "keep" if keep_groups else "drop",
                *argv,
            ],
            pass_fds=(*pass_fds, ready_write, go_read),
            **options,
        )
        os.close(ready_write)
        ready_write = -1
        try:
            _write_maps(process.pid, os.read(ready_read, 16))
        except BaseException:
            process.kill()
            process.wait()
            raise
        os.write(go_write, b"1")
        return process
    finally:
        for number in (ready_read, ready_write, go_read, go_write):
            if number >= 0:
                os.close(number)


def _write_maps(pid: int, answer: bytes) -> None:
    if answer != b"0":
        number = int(answer or b"1")
        restricted = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
        hint = "use --engine docker, or ask root to allow user namespaces"
        if restricted.exists():
            hint = "as root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        raise HostError(f"the kernel refuses a user namespace: {os.strerror(number)}", hint=hint)
    user, uid = _user()
    for tool, path, own in (
        ("newuidmap", Path("/etc/subuid"), uid),
        ("newgidmap", Path("/etc/subgid"), os.getegid()),
    ):
        argv = [tool, str(pid), *_map(_ranges(path, user, uid), own)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise HostError(
                f"{tool} refuses the ids that {path} gives to {user}: {done.stderr.strip()}",
                hint=f"{tool} must be setuid root and ranges must not overlap: apt-get install --reinstall uidmap",
            )


def in_namespace(argv: Sequence[str], **options: Any) -> int:
    """Run a host command as root of the user namespace (directly if this user is root). Returns its exit code."""
    with start(argv, **options) as process:
        return process.wait()


def remove(path: Path) -> None:
    """Remove a folder and its contents, including files of mapped ids. A missing folder is not an error."""
    if not path.exists():
        return
    shutil.rmtree(path, ignore_errors=True)
    if path.exists() and needed() and missing() is None:
        in_namespace([sys.executable, "-I", "-S", "-c", _REMOVE, str(path)])


@contextlib.contextmanager
def child(argv: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process of :func:`start` in its own session, see :func:`primus.sandbox.running.tracked`."""
    # The terminal's Ctrl-C reaches only the runner, which forwards it once.
    with tracked(start(argv, start_new_session=True, **options)) as process:
        yield process
