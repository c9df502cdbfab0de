"""The input of a container, as plain data: root file system, devices, limits and command."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from primus.errors import InputError

GIB = 1 << 30

# Standard input, output or error of a run: a file object with a descriptor, or None to inherit.
Stream = IO[Any] | None


@dataclass(frozen=True, kw_only=True)
class LayerRef:
    """One OCI layer blob of ``size`` bytes. ``digest`` is its ``sha256:…``, ``diff_id`` that of the uncompressed tar.

    ``media_type`` ends in ``tar``, ``tar+gzip`` or ``tar+zstd`` (or Docker's ``tar.gzip``).
    """

    digest: str
    diff_id: str
    size: int
    media_type: str


@dataclass(frozen=True, kw_only=True)
class RootFs:
    """An image, by the exact bytes of its OCI manifest and config.

    ``tar`` yields the uncompressed bytes of a layer, and raises HostError before their end if the blob is damaged.
    ``cache`` is the folder of unpacked layers. ``name`` is the image's name in messages.
    """

    name: str
    manifest: bytes
    config_bytes: bytes
    tar: Callable[[LayerRef], Iterator[bytes]]
    cache: Path

    @property
    def id(self) -> str:
        """The image's ID: the hexadecimal digest of its config."""
        return hashlib.sha256(self.config_bytes).hexdigest()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config."""
        config: dict[str, Any] = json.loads(self.config_bytes)
        return config

    @cached_property
    def layers(self) -> tuple[LayerRef, ...]:
        """The layers, bottom first."""
        return tuple(
            LayerRef(digest=entry["digest"], diff_id=diff_id, size=entry["size"], media_type=entry["mediaType"])
            for entry, diff_id in zip(
                json.loads(self.manifest)["layers"], self.config["rootfs"]["diff_ids"], strict=True
            )
        )


@dataclass(frozen=True, kw_only=True)
class Mount:
    """The host's ``source`` (file or folder) at the absolute path ``target`` inside."""

    source: Path
    target: str
    read_only: bool = True


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Paths of device nodes and names of CDI devices, and the groups that may open them."""

    names: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()

    def __add__(self, other: "Devices") -> "Devices":
        """Return the devices of both, each once."""
        return Devices(
            names=tuple(dict.fromkeys(self.names + other.names)),
            groups=tuple(dict.fromkeys(self.groups + other.groups)),
        )


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command and its options.

    If ``argv`` is empty, the image's Cmd runs. ``env`` adds to the image's Env. ``cwd`` and ``user`` (``name``,
    ``uid`` or either with ``:group``) replace the image's. ``entrypoint`` False skips the image's Entrypoint.
    ``network`` False creates a network with loopback only; True uses the host's. ``tty`` None requests a terminal
    if stdin and stdout are inherited terminals. ``memory_bytes`` is a limit; None means none.
    ``shm_bytes`` is the size of /dev/shm.
    """

    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    mounts: tuple[Mount, ...] = ()
    devices: Devices = field(default_factory=Devices)
    memory_bytes: int | None = None
    network: bool = False
    tty: bool | None = None
    user: str | None = None
    entrypoint: bool = True
    hostname: str | None = None
    shm_bytes: int = 8 * GIB


def layer_folder(digest: str) -> str:
    """Return the name of the folder of a layer. A mount's options have 4,095 bytes for the names of all layers."""
    return digest.partition(":")[2][:28]


def with_settings(root: RootFs, command: Command) -> Command:
    """Return the command with the image's settings. InputError if its argument list is empty or not UTF-8."""
    settings = root.config.get("config") or {}
    entry = list(settings.get("Entrypoint") or []) if command.entrypoint else []
    argv = [*entry, *(command.argv or settings.get("Cmd") or [])]
    if not argv:
        raise InputError(f"image {root.name} has no default command", hint="give a command after --")
    if re.search("[\ud800-\udfff]", "".join(argv)):
        raise InputError("an argument of the command is not UTF-8 text")
    env = dict(line.partition("=")[::2] for line in settings.get("Env") or [])
    return replace(
        command,
        argv=tuple(argv),
        env={**env, **command.env},
        cwd=command.cwd or settings.get("WorkingDir"),
        user=command.user or settings.get("User"),
    )


def check_mounts(command: Command) -> None:
    """Raise InputError for a mount that is not possible."""
    for mount in command.mounts:
        if not mount.target.startswith("/") or mount.target.strip("/") in ("", "proc", "sys", "dev"):
            hint = "give an absolute path inside the image"
            raise InputError(f"{mount.target!r} cannot be the target of a mount", hint=hint)
        if not mount.source.exists():
            message = f"{mount.source} does not exist, so it cannot be mounted at {mount.target}"
            raise InputError(message, hint="create it first")
