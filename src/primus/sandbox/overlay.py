"""The image's file system: an overlay of its unpacked layers, and the files that the host reads and writes in it."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from primus.errors import HostError, InputError
from primus.sandbox.syscalls import MS_NODEV, mount

_MAX_LINKS = 40


def mount_overlay(lower: list[str], base: Path, *, user_namespace: bool) -> Path:
    """Mount the layer folders ``lower`` (bottom first) at ``base/root`` and return that path."""
    for name in ("upper", "work", "root", "l"):
        (base / name).mkdir(exist_ok=True)
    (base / "upper").chmod(0o755)
    # Short names relative to a working directory, because the kernel reads at most one page of options.
    for number, layer in enumerate(reversed(lower)):
        (base / "l" / str(number)).symlink_to(layer)
    os.chdir(base / "l")
    plain = f"lowerdir={':'.join(map(str, range(len(lower))))},upperdir=../upper,workdir=../work"
    if user_namespace:
        plain += ",userxattr"
    problem: OSError | None = None
    # Older kernels refuse unknown names. Their defaults are the same, or harmless.
    for extra in (",redirect_dir=off,metacopy=off,index=off", ",redirect_dir=off,index=off", ""):
        try:
            mount("overlay", base / "root", "overlay", MS_NODEV, plain + extra)
        except OSError as error:
            problem = error
        else:
            os.chdir("/")
            return base / "root"
    raise HostError(
        f"overlayfs cannot use {base}: {problem.strerror if problem else ''}",
        hint="keep the store on a local file system such as ext4, xfs or btrfs, not NFS or another overlay",
    )


def resolve_inside(root: str, path: str) -> str:
    """Return the host path of ``path`` below ``root``, resolving every symbolic link inside ``root``."""
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


def write_names(root: str, hostname: str, *, network: bool) -> None:
    """Write /etc/hosts, /etc/hostname and /etc/resolv.conf; with ``network``, copy the host's entries."""
    hosts = f"127.0.0.1\tlocalhost {hostname}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    resolver = "# no network\n"
    if network:
        with contextlib.suppress(OSError):
            hosts = Path("/etc/hosts").read_text() + f"127.0.0.1\t{hostname}\n"
        with contextlib.suppress(OSError):
            resolver = Path("/etc/resolv.conf").read_text()
    for path, text in (("/etc/hosts", hosts), ("/etc/resolv.conf", resolver), ("/etc/hostname", f"{hostname}\n")):
        target = Path(resolve_inside(root, path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_text(text)


def missing_program(root: str, name: str, search: str, cwd: str, mounted: list[str]) -> tuple[int, str] | None:
    """Return why ``name`` cannot be started in the image, as (exit code, sentence), or None if it probably can.

    An OCI runtime reports this too late or not at all. ``search`` is PATH. ``mounted`` are the targets of mounts,
    below which nothing is looked up.
    """
    places = [name] if "/" in name else [f"{folder or '.'}/{name}" for folder in search.split(":")]
    unusable = ""
    for place in places:
        inside = place if place.startswith("/") else f"{cwd}/{place}"
        path = resolve_inside(root, inside)
        if any(_below(path, resolve_inside(root, target)) for target in mounted):
            return None
        with contextlib.suppress(OSError):
            mode = os.stat(path).st_mode  # noqa: PTH116
            if stat.S_ISREG(mode) and mode & 0o111:
                return _not_executable(root, name, path)
            unusable = unusable or inside
    if unusable:
        return 126, f"{name}: Permission denied"
    return 127, f"{name}: not found in the image"


def _below(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}/")


def _not_executable(root: str, name: str, path: str) -> tuple[int, str] | None:
    with open(path, "rb") as file:  # noqa: PTH123
        start = file.read(256)
    if start.startswith(b"#!"):
        words = start[2:].split(b"\n")[0].split()
        if words and not Path(resolve_inside(root, os.fsdecode(words[0]))).exists():
            return 127, f"{name}: its interpreter {os.fsdecode(words[0])} is not in the image"
    elif not start.startswith(b"\x7fELF"):
        return 126, f"{name}: not a program for this machine, and no #! line"
    return None
