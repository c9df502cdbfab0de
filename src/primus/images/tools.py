"""Tools the host must have; a missing one is installed (Debian, Ubuntu, root), and that is said aloud."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from primus.errors import HostError
from primus.progress import Progress

__all__ = ["is_debian_like", "need"]

_LISTS = Path("/var/lib/apt/lists")
_STALE_S = 24 * 3600


def need(tool: str, package: str, *, progress: Progress) -> Path:
    """Where the executable ``tool`` is, after installing the Debian package ``package`` if it was missing.

    Raises HostError, with the command to type, where it cannot be installed.
    """
    found = _which(tool)
    if found is not None:
        return found
    command = ["apt-get", "install", "-y", "--no-install-recommends", package]
    typed = shlex.join(command)
    if not is_debian_like(_os_release()) or shutil.which("apt-get") is None:
        raise HostError(f"{tool} is missing", hint=f"install it (Debian and Ubuntu call the package {package})")
    if os.geteuid() != 0:
        raise HostError(f"{tool} is missing", hint=f"sudo {typed}")
    progress.say(f"{tool} is missing: installing it with `{typed}`")
    if _lists_stale(_LISTS, time.time()):
        _apt(["apt-get", "-q", "update"], tool, typed)
    _apt(command, tool, typed)
    found = _which(tool)
    if found is None:
        raise HostError(f"package {package} is installed, but brought no {tool}")
    return found


def is_debian_like(os_release: str) -> bool:
    """Whether the text of /etc/os-release is that of Debian, Ubuntu or a relative."""
    fields = dict(line.split("=", 1) for line in os_release.splitlines() if "=" in line)
    words = f"{fields.get('ID', '')} {fields.get('ID_LIKE', '')}".replace('"', "").split()
    return "debian" in words or "ubuntu" in words


def _which(tool: str) -> Path | None:
    # Administrators' tools lie in sbin, which a user's PATH may leave out.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    found = shutil.which(tool, path=path)
    return Path(found) if found else None


def _os_release() -> str:
    try:
        return Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return ""


def _lists_stale(lists: Path, now: float) -> bool:
    times = [p.stat().st_mtime for p in lists.glob("*_*Release")] if lists.is_dir() else []
    return not times or now - lists.stat().st_mtime > _STALE_S


def _apt(command: list[str], tool: str, typed: str) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"},
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("E:")]
        reason = lines[0][3:] if lines else f"exit code {done.returncode}"
        raise HostError(f"{tool} is missing and could not be installed: {reason}", hint=f"try: apt-get update; {typed}")
