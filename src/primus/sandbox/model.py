"""What a sandbox is given and what it is asked to run. Plain data; nothing here touches the machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from primus.errors import InputError

__all__ = [
    "GIB",
    "Command",
    "Engine",
    "LayerRef",
    "Limits",
    "Mount",
    "RootFs",
    "Stream",
    "check_mounts",
    "final_argv",
    "host_name",
    "image_env",
]

GIB = 1 << 30

# What an engine takes for stdin, stdout and stderr: a file object with a descriptor, or None to inherit.
Stream = IO[Any] | None

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, kw_only=True)
class LayerRef:
    """One OCI layer blob.

    ``digest`` is the blob's ``sha256:…``, ``diff_id`` the uncompressed tar's, ``size`` the blob's bytes,
    ``media_type`` ends in ``tar``, ``tar+gzip`` or ``tar+zstd`` (Docker's ``tar.gzip`` is understood too).
    """

    digest: str
    diff_id: str
    size: int
    media_type: str


@dataclass(frozen=True, kw_only=True)
class RootFs:
    """An image as a sandbox sees it.

    ``layers`` go bottom first; ``config`` is the OCI image config and ``config_bytes`` its exact bytes (their
    sha256 is the image id in a Docker engine); ``blob`` maps a digest to the blob's file; unpacked layers are
    kept below ``cache``, and scratch directories beside it; ``name`` is what people call the image.
    """

    layers: tuple[LayerRef, ...]
    config: Mapping[str, Any]
    blob: Callable[[str], Path]
    cache: Path
    name: str
    config_bytes: bytes = b""
    manifest: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Mount:
    """The host's ``source`` (file or directory) shown at the absolute path ``target`` inside."""

    source: Path
    target: str
    read_only: bool = True


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Most memory in bytes and most CPU in cores; None means no limit."""

    memory_bytes: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to run and how.

    ``argv`` may be empty: the image's Cmd then runs. ``env`` adds to the image's Env. ``cwd`` and ``user``
    (``name``, ``uid`` or either with ``:group``) replace the image's. ``entrypoint`` False skips the
    image's Entrypoint. ``network`` False gives an own network with only loopback, True the host's. ``tty``
    None means: a terminal when stdin and stdout are inherited terminals. ``shm_bytes`` is the most that
    /dev/shm may hold. ``devices`` are host device nodes shown at the same path inside.
    """

    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    mounts: tuple[Mount, ...] = ()
    devices: tuple[Path, ...] = ()
    limits: Limits = field(default_factory=Limits)
    network: bool = False
    tty: bool | None = None
    user: str | None = None
    entrypoint: bool = True
    hostname: str | None = None
    shm_bytes: int = 8 * GIB
    read_only_root: bool = False


class Engine(Protocol):
    """Something that runs a command in a root file system."""

    name: str

    def available(self) -> str | None:
        """None when this engine can run here, else one sentence: what is missing and what to do."""

    def run(
        self,
        root: RootFs,
        command: Command,
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> int:
        """Run ``command`` and return its exit code.

        128+n for a command ended by signal n, 127 when it is not found, 126 when it cannot be executed.
        Raises InputError for a bad mount, user or option and HostError when the machine cannot run it.
        """


def final_argv(root: RootFs, command: Command) -> list[str]:
    """The argument list that really runs, from the image's Entrypoint and Cmd; InputError when empty."""
    settings = root.config.get("config") or {}
    entry = list(settings.get("Entrypoint") or []) if command.entrypoint else []
    argv = [*entry, *(command.argv or settings.get("Cmd") or [])]
    if not argv:
        raise InputError(f"image {root.name} has no command of its own", hint="name one after --")
    return argv


def image_env(root: RootFs, command: Command) -> dict[str, str]:
    """The environment inside: a PATH, then the image's Env, then the command's. The host's stays out."""
    env = {"PATH": _DEFAULT_PATH}
    for item in (root.config.get("config") or {}).get("Env") or []:
        key, _, value = str(item).partition("=")
        env[key] = value
    env.update(command.env)
    return env


def host_name(root: RootFs, command: Command) -> str:
    """The host name inside: the command's, else one made from the image's name."""
    return command.hostname or re.sub(r"[^A-Za-z0-9-]+", "-", root.name).strip("-")[:63] or "primus"


def check_mounts(command: Command) -> None:
    """InputError for a mount or device that cannot be."""
    for mount in command.mounts:
        if not mount.target.startswith("/") or mount.target.strip("/") in ("", "proc", "sys", "dev"):
            raise InputError(f"{mount.target!r} is no place for a mount", hint="give an absolute path inside the image")
        if not mount.source.exists():
            raise InputError(
                f"{mount.source} does not exist, so it cannot be mounted at {mount.target}",
                hint="make it first",
            )
    for device in command.devices:
        if not str(device).startswith("/dev/") or not device.exists():
            raise InputError(f"{device} is no device of this machine", hint="ls /dev shows what there is")
