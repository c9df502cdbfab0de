"""Build the container's file system in an own mount namespace: overlay, /proc, /dev, /sys, mounts."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from primus.errors import HostError, InputError
from primus.sandbox import syscalls as sys_calls
from primus.sandbox.syscalls import MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC, mount

__all__ = ["View", "assemble", "resolve_inside"]

_NODES = ("null", "zero", "full", "random", "urandom", "tty")
_HIDDEN = ("kcore", "keys", "timer_list", "latency_stats", "sched_debug")
_FIXED = ("sys", "sysrq-trigger", "irq", "bus", "fs")
_MAX_LINKS = 40


@dataclass(frozen=True, kw_only=True)
class View:
    """What to assemble. ``lower`` lists layer directories bottom first; ``scratch`` is an empty directory."""

    lower: list[str]
    scratch: str
    hostname: str
    network: bool
    shm_bytes: int
    read_only_root: bool
    mounts: list[tuple[str, str, bool]]
    devices: list[str]
    user_namespace: bool


def resolve_inside(root: str, path: str) -> str:
    """The host path of ``path`` below ``root``, with every symbolic link kept inside ``root``."""
    todo = [part for part in path.split("/") if part not in ("", ".")][::-1]
    done: list[str] = []
    links = 0
    while todo:
        part = todo.pop()
        if part == "..":
            done = done[:-1]
            continue
        candidate = "/".join((root, *done, part))
        if Path(candidate).is_symlink():
            links += 1
            if links > _MAX_LINKS:
                raise InputError(f"{path}: too many symbolic links in the image")
            link = str(Path(candidate).readlink())
            if link.startswith("/"):
                done = []
            todo += [piece for piece in link.split("/") if piece not in ("", ".")][::-1]
            continue
        done.append(part)
    return "/".join((root, *done))


def _directory(root: str, path: str) -> str:
    found = resolve_inside(root, path)
    try:
        Path(found).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {path} in the image: {error.strerror}") from error
    return found


def _file(root: str, path: str) -> str:
    found = resolve_inside(root, path)
    try:
        Path(found).parent.mkdir(parents=True, exist_ok=True)
        if not Path(found).exists():
            Path(found).touch()
    except OSError as error:
        raise InputError(f"cannot make {path} in the image: {error.strerror}") from error
    return found


def _overlay(view: View) -> str:
    base = Path(view.scratch)
    for name in ("upper", "work", "root", "l"):
        (base / name).mkdir(exist_ok=True)
    (base / "upper").chmod(0o755)
    # Short names relative to a working directory: the kernel reads at most one page of options.
    for number, layer in enumerate(reversed(view.lower)):
        (base / "l" / str(number)).symlink_to(layer)
    os.chdir(base / "l")
    lower = ":".join(str(number) for number in range(len(view.lower)))
    plain = f"lowerdir={lower},upperdir=../upper,workdir=../work"
    if view.user_namespace:
        plain += ",userxattr"
    root = str(base / "root")
    problem: OSError | None = None
    # Older kernels refuse names they do not know; the defaults are then the same or harmless.
    for extra in (",redirect_dir=off,metacopy=off,index=off", ",redirect_dir=off,index=off", ""):
        try:
            mount("overlay", root, "overlay", MS_NODEV, plain + extra)
        except OSError as error:
            problem = error
        else:
            os.chdir("/")
            return root
    reason = problem.strerror if problem else ""
    raise HostError(
        f"overlayfs cannot use {view.scratch}: {reason}",
        hint="keep the store on a local file system such as ext4, xfs or btrfs, not NFS or another overlay",
    )


def _devices(root: str, view: View) -> None:
    dev = _directory(root, "/dev")
    mount("tmpfs", dev, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=65536k")
    for name in _NODES:
        Path(dev, name).touch()
        sys_calls.bind(f"/dev/{name}", f"{dev}/{name}")
    for name in ("pts", "shm", "mqueue"):
        Path(dev, name).mkdir()
    options = "newinstance,ptmxmode=0666,mode=0620"
    try:
        mount("devpts", f"{dev}/pts", "devpts", MS_NOSUID | MS_NOEXEC, options + ",gid=5")
    except OSError:
        mount("devpts", f"{dev}/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)
    flags = MS_NOSUID | MS_NODEV
    mount("shm", f"{dev}/shm", "tmpfs", flags, f"mode=1777,size={view.shm_bytes}")
    with contextlib.suppress(OSError):
        mount("mqueue", f"{dev}/mqueue", "mqueue", flags | MS_NOEXEC)
    for name, link in (
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ):
        Path(dev, name).symlink_to(link)
    for source in view.devices:
        target = dev + source.removeprefix("/dev")
        if Path(source).is_dir():
            Path(target).mkdir(parents=True, exist_ok=True)
        else:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).touch()
        sys_calls.bind(source, target)


def _proc(root: str) -> None:
    proc = _directory(root, "/proc")
    try:
        mount("proc", proc, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError as error:
        raise HostError(
            f"the kernel refuses a fresh /proc: {error.strerror}",
            hint="this machine is itself a container that hides parts of /proc; start it with --privileged, "
            "or use --engine docker",
        ) from error
    for name in _FIXED:
        path = f"{proc}/{name}"
        if Path(path).exists():
            sys_calls.bind(path, path, writable=False)
    for name in _HIDDEN:
        path = f"{proc}/{name}"
        if Path(path).exists():
            sys_calls.bind("/dev/null", path)


def _sys(root: str) -> None:
    path = _directory(root, "/sys")
    try:
        mount("sysfs", path, "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
    except OSError:
        # The host's network is not ours to show afresh from a user namespace; the host's own /sys is.
        sys_calls.bind("/sys", path, writable=False)


def _names(root: str, view: View) -> None:
    hosts = f"127.0.0.1\tlocalhost {view.hostname}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    resolver = "# no network\n"
    if view.network:
        with contextlib.suppress(OSError):
            hosts = Path("/etc/hosts").read_text() + f"127.0.0.1\t{view.hostname}\n"
        with contextlib.suppress(OSError):
            resolver = Path("/etc/resolv.conf").read_text()
    for path, text in (
        ("/etc/hosts", hosts),
        ("/etc/resolv.conf", resolver),
        ("/etc/hostname", f"{view.hostname}\n"),
    ):
        target = Path(resolve_inside(root, path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_text(text)


def assemble(view: View) -> str:
    """Mount everything below ``view.scratch`` and return the new root, ready for pivot_root.

    The process must be in own mount, pid (as its first process), ipc and network namespaces.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    root = _overlay(view)
    _names(root, view)
    _proc(root)
    _sys(root)
    _devices(root, view)
    for source, target, writable in view.mounts:
        # One after the other: a target may lie inside an earlier mount.
        place = _target(root, source, target)
        try:
            sys_calls.bind(source, place, writable=writable)
        except OSError as error:
            raise HostError(f"cannot mount {source}: {error.strerror}") from error
    if view.read_only_root:
        flags = MS_RDONLY | MS_NODEV
        mount("none", root, None, sys_calls.MS_REMOUNT | sys_calls.MS_BIND | flags)
    return root


def _target(root: str, source: str, target: str) -> str:
    if Path(source).is_dir():
        return _directory(root, target)
    return _file(root, target)
