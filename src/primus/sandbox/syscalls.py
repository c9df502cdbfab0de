"""The few Linux calls Python 3.11 has no function for. Every failure is an OSError that names the call."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from pathlib import Path

__all__ = [
    "bind",
    "die_with_parent",
    "drop_capabilities",
    "hide",
    "loopback_up",
    "mount",
    "pivot_root",
    "read_only",
    "set_hostname",
    "unmount",
    "unshare",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SYS_MOUNT_SETATTR = 442  # one number on every architecture: it is newer than the unified table
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100
_MOUNT_ATTR_RDONLY = 0x1
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

# Docker's default set: enough for package managers and daemons, not enough to touch the host.
_KEPT_CAPABILITIES = frozenset((0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31))

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Move this process (or, for pids, its children) into new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str | Path, kind: str | None, flags: int = 0, options: str = "") -> None:
    """mount(2); ``options`` is the file system's own option string."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        os.fsencode(kind) if kind else None,
        ctypes.c_ulong(flags),
        os.fsencode(options) if options else None,
    )
    _check(result, f"mount {kind or source} at {target}")


def bind(source: str | Path, target: str | Path, *, writable: bool = True) -> None:
    """Show ``source`` (with what is mounted below it) at ``target`` too."""
    mount(str(source), target, None, MS_BIND | MS_REC)
    if not writable:
        read_only(target)


def read_only(target: str | Path) -> None:
    """Make the mount at ``target``, and all below it, read-only."""
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_AT_RECURSIVE),
        buffer,
        ctypes.c_size_t(len(attributes)),
    )
    if result == 0:
        return
    # Kernels before 5.12 lack the call. A user namespace may not clear a mount's flags: repeat them.
    flags = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def unmount(target: str | Path, flags: int = MNT_DETACH) -> None:
    """umount2(2), lazily unless told otherwise."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)), f"unmount {target}")


def pivot_root(new_root: str | Path) -> None:
    """Make ``new_root`` (a mount) the root of this mount namespace; the old tree is gone from view."""
    os.chdir(new_root)
    number = _SYS_PIVOT_ROOT.get(os.uname().machine, 155)
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), f"pivot_root to {new_root}")
    unmount(".")
    os.chdir("/")


def set_hostname(name: str) -> None:
    """Set the host name of this UTS namespace."""
    raw = os.fsencode(name)[:64]
    _check(_libc.sethostname(raw, ctypes.c_size_t(len(raw))), "sethostname")


def die_with_parent(parent: int | None = None) -> None:
    """Get SIGKILL when the parent thread ends; end now when it is no longer process ``parent``."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0), "prctl")
    # The parent may have died before the call above.
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def hide() -> None:
    """Close this process's memory and environment to others with the same uid."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def drop_capabilities() -> None:
    """Keep only what an ordinary container has, for this process and all it starts."""
    for number in range(64):
        if number in _KEPT_CAPABILITIES:
            continue
        if _libc.prctl(_PR_CAPBSET_READ, ctypes.c_ulong(number), 0, 0, 0) != 1:
            continue
        _check(_libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0), "prctl(PR_CAPBSET_DROP)")
    _libc.prctl(_PR_CAP_AMBIENT, ctypes.c_ulong(_PR_CAP_AMBIENT_CLEAR_ALL), 0, 0, 0)
    held = _permitted()
    kept = sum(1 << n for n in _KEPT_CAPABILITIES) & held
    low, high = kept & 0xFFFFFFFF, kept >> 32
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    data = ctypes.create_string_buffer(struct.pack("=6I", low, low, 0, high, high, 0))
    _check(_libc.capset(header, data), "capset")


def _permitted() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapPrm:"):
            return int(line.split()[1], 16)
    return 0


def loopback_up() -> None:
    """Bring up ``lo`` in this network namespace, so that 127.0.0.1 answers."""
    siocgifflags, siocsifflags, iff_up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH22x", b"lo", 0)
        flags = struct.unpack("16sH22x", fcntl.ioctl(probe, siocgifflags, request))[1]
        fcntl.ioctl(probe, siocsifflags, struct.pack("16sH22x", b"lo", flags | iff_up))
