"""The input of a sandbox, as plain data: root file system, devices, limits and command."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from primus.errors import InputError

GIB = 1 << 30

T = TypeVar("T")

# Standard input, output or error of an engine's run: a file object with a descriptor, or None to inherit.
Stream = IO[Any] | None

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, kw_only=True)
class LayerRef:
    """One OCI layer blob.

    ``digest`` is the blob's ``sha256:…``, ``diff_id`` that of the uncompressed tar, and ``size`` the number of
    bytes of the blob. ``media_type`` ends in ``tar``, ``tar+gzip`` or ``tar+zstd`` (or Docker's ``tar.gzip``).
    """

    digest: str
    diff_id: str
    size: int
    media_type: str


@dataclass(frozen=True, kw_only=True)
class RootFs:
    """An image as a sandbox needs it.

    ``layers`` start at the bottom. ``config`` is the OCI image config and ``config_bytes`` its exact bytes, whose
    sha256 is the image id in a Docker engine. ``blob`` maps a digest to the blob's file. Unpacked layers are kept
    below ``cache``, with scratch folders beside them. ``name`` is the image's name in messages.
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
    """The host's ``source`` (file or folder) at the absolute path ``target`` inside.

    ``options`` are mount options of the OCI runtime specification; None means a private recursive bind mount.
    """

    source: Path
    target: str
    read_only: bool = True
    options: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceNode:
    """A device of the host: ``source`` is its node on the host, ``target`` the path inside.

    ``permissions`` are those of the device control group: letters of ``rwm``. ``mode``, ``uid`` and ``gid`` are
    those of the node inside; None keeps the host's.
    """

    source: Path
    target: str
    permissions: str = "rwm"
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A program of the host that the OCI runtime starts at the stage ``name``; ``timeout`` is in seconds."""

    name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices for a container, with everything that they need.

    ``env`` is set inside, and ``groups`` are additional group ids of the process. ``cdi`` is the qualified name
    (``vendor.com/class=name``) of the source, for an engine that reads the specifications itself.
    """

    nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    hooks: tuple[Hook, ...] = ()
    groups: tuple[int, ...] = ()
    cdi: str = ""


def merged(parts: Iterable[Devices]) -> Devices:
    """Return all ``parts`` together without duplicates and without a name."""
    parts = tuple(parts)
    env: dict[str, str] = {}
    for part in parts:
        env.update(part.env)
    return Devices(
        nodes=_unique(node for part in parts for node in part.nodes),
        mounts=_unique(mount for part in parts for mount in part.mounts),
        env=env,
        hooks=_unique(hook for part in parts for hook in part.hooks),
        groups=_unique(group for part in parts for group in part.groups),
    )


def _unique(items: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest memory in bytes and CPU time in cores; None means no limit."""

    memory_bytes: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command and its options.

    If ``argv`` is empty, the image's Cmd runs. ``env`` adds to the image's Env. ``cwd`` and ``user`` (``name``,
    ``uid`` or either with ``:group``) replace the image's. ``entrypoint`` False skips the image's Entrypoint.
    ``network`` False creates a network with loopback only; True uses the host's. ``tty`` None requests a terminal
    if stdin and stdout are inherited terminals. ``shm_bytes`` is the size of /dev/shm. ``devices`` are host
    devices, see :mod:`primus.sandbox.devices`.
    """

    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    mounts: tuple[Mount, ...] = ()
    devices: tuple[Devices, ...] = ()
    limits: Limits = field(default_factory=Limits)
    network: bool = False
    tty: bool | None = None
    user: str | None = None
    entrypoint: bool = True
    hostname: str | None = None
    shm_bytes: int = 8 * GIB
    read_only_root: bool = False


class Engine(Protocol):
    """A way to run a command in a root file system."""

    name: str

    def available(self) -> str | None:
        """Return None if this engine can run here, else one sentence with the problem and the remedy."""

    def prepare_host(self) -> None:
        """Install what this engine needs, if it is allowed to. Raises HostError if that fails."""

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

        The code is 128+n for a command ended by signal n, 127 if it is not found, 126 if it cannot be executed.
        Raises InputError for an invalid mount, user or option, and HostError if the machine cannot run it.
        """


def final_argv(root: RootFs, command: Command) -> list[str]:
    """Return the argument list to run, from the image's Entrypoint and Cmd. Raises InputError if it is empty."""
    settings = root.config.get("config") or {}
    entry = list(settings.get("Entrypoint") or []) if command.entrypoint else []
    argv = [*entry, *(command.argv or settings.get("Cmd") or [])]
    if not argv:
        raise InputError(f"image {root.name} has no default command", hint="give a command after --")
    return argv


def image_env(root: RootFs, command: Command) -> dict[str, str]:
    """Return the environment inside: PATH, the image's Env, the devices', the command's; nothing of the host's."""
    env = {"PATH": _DEFAULT_PATH}
    for item in (root.config.get("config") or {}).get("Env") or []:
        key, _, value = str(item).partition("=")
        env[key] = value
    env.update(merged(command.devices).env)
    env.update(command.env)
    return env


def host_name(root: RootFs, command: Command) -> str:
    """Return the host name inside: the command's, or else one derived from the image's name."""
    return command.hostname or re.sub(r"[^A-Za-z0-9-]+", "-", root.name).strip("-")[:63] or "primus"


def check_mounts(command: Command) -> None:
    """Raise InputError for a mount that is not possible."""
    for mount in (*command.mounts, *merged(command.devices).mounts):
        if not mount.target.startswith("/") or mount.target.strip("/") in ("", "proc", "sys", "dev"):
            raise InputError(
                f"{mount.target!r} cannot be the target of a mount", hint="give an absolute path inside the image"
            )
        if not mount.source.exists():
            raise InputError(
                f"{mount.source} does not exist, so it cannot be mounted at {mount.target}",
                hint="create it first",
            )
