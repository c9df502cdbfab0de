"""The input of a container, as plain data: root file system, limits, command and devices.

Devices are GPUs by number, CDI devices by name, and nodes by path.

GPUs come from a Container Device Interface (CDI) specification if the machine has one, AMD's
otherwise from device nodes. AMD's and NVIDIA's container toolkits write the specifications, and
podman and Docker apply them.
"""

import hashlib
import json
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from primus_images import yamlfile
from primus_images.errors import HostError, InputError
from primus_images.files import text_if_readable
from primus_images.gpus.detect import detect, kfd_gpus
from primus_images.terminal import counted

GIB = 1 << 30

# Standard input, output or error of a run: a file object with a descriptor, or None to inherit.
Stream = IO[Any] | None
CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
_KINDS = {"amd": "amd.com/gpu", "nvidia": "nvidia.com/gpu"}


@dataclass(frozen=True, kw_only=True)
class LayerRef:
    """One OCI layer blob of ``size`` bytes.

    ``digest`` is its ``sha256:…``, ``diff_id`` that of the uncompressed tar. ``media_type`` ends in
    ``tar``, ``tar+gzip`` or ``tar+zstd`` (or Docker's ``tar.gzip``).
    """

    digest: str
    diff_id: str
    size: int
    media_type: str


@dataclass(frozen=True, kw_only=True)
class RootFs:
    """An image, by the exact bytes of its OCI manifest and config.

    ``tar`` yields the uncompressed bytes of a layer, and raises HostError before their end if the
    blob is damaged. ``cache`` is the folder of unpacked layers. ``name`` is the image's name in
    messages.
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
        descriptors = json.loads(self.manifest)["layers"]
        layers = []
        for entry, diff_id in zip(descriptors, self.config["rootfs"]["diff_ids"], strict=True):
            layer = LayerRef(
                digest=entry["digest"],
                diff_id=diff_id,
                size=entry["size"],
                media_type=entry["mediaType"],
            )
            layers.append(layer)
        return tuple(layers)


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

    If ``argv`` is empty, the image's Cmd runs. ``env`` adds to the image's Env. ``cwd`` and
    ``user`` (``name``, ``uid`` or either with ``:group``) replace the image's. ``entrypoint`` False
    skips the image's Entrypoint. ``network`` False creates a network with loopback only; True uses
    the host's. ``memory_bytes`` is a limit; None means none. ``shm_bytes`` is the size of /dev/shm.
    """

    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    mounts: tuple[Mount, ...] = ()
    devices: Devices = field(default_factory=Devices)
    memory_bytes: int | None = None
    network: bool = False
    user: str | None = None
    entrypoint: bool = True
    hostname: str | None = None
    shm_bytes: int = 8 * GIB


def layer_folder(digest: str) -> str:
    """Return the name of the folder of a layer.

    It is short: a mount's options have 4,095 bytes for the names of all layers.
    """
    return digest.partition(":")[2][:28]


def with_settings(root: RootFs, command: Command) -> Command:
    """Return the command with the image's settings.

    Raises InputError if its argument list is empty or not UTF-8.
    """
    settings = root.config.get("config") or {}
    argv = [*(command.argv or settings.get("Cmd") or [])]
    if command.entrypoint:
        argv = [*(settings.get("Entrypoint") or []), *argv]
    if not argv:
        hint = "give a command after --"
        raise InputError(f"image {root.name} has no default command", hint=hint)
    if re.search("[\ud800-\udfff]", "".join(argv)):
        raise InputError("an argument of the command is not UTF-8 text")
    env = {}
    for line in settings.get("Env") or []:
        name, _, value = line.partition("=")
        env[name] = value
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
        target = mount.target
        place = posixpath.normpath(target).strip("/")
        outside = not target.startswith("/") or ".." in target.split("/")
        if outside or place in ("", "proc", "sys", "dev"):
            hint = "give an absolute path inside the image"
            raise InputError(f"{target!r} cannot be the target of a mount", hint=hint)
        if not mount.source.exists():
            message = f"{mount.source} does not exist, so it cannot be mounted at {target}"
            raise InputError(message, hint="create it first")


def gpus(number: str, *, root: Path = Path("/"), folders: Sequence[Path] = CDI_FOLDERS) -> Devices:
    """Return the devices for the requested GPUs: ``none``, ``all``, or a number for the first ones.

    Raises InputError for another word or an unreadable CDI specification, HostError if the machine
    has fewer GPUs.
    """
    if number == "none":
        return Devices()
    count = _count(number)
    machine = detect(root)
    names = cdi_names(folders)
    for vendor, kind in _KINDS.items():
        of_kind = [name for name in names if name.startswith(f"{kind}=")]
        if of_kind and machine.vendor in (vendor, ""):
            nodes = []
            if vendor == "amd":
                nodes = [root / "dev/kfd", *(root / "dev/dri").glob("renderD*")]
            return Devices(names=_first(kind, of_kind, count), groups=_groups(nodes))
    if not machine.vendor:
        raise HostError(
            "no GPU was found on this machine: no CDI specification, no AMD GPU below "
            "/sys/class/kfd, no /dev/nvidia0",
            hint="load the GPU's driver, or leave --gpus out",
        )
    if machine.vendor == "nvidia":
        raise HostError(
            "no CDI specification describes the GPUs of this machine",
            hint="as root: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        )
    _check_count(count, len(machine.names))
    return _amd(root, count)


def _count(number: str) -> int | None:
    """Return the number of GPUs; None for all."""
    if number == "all":
        return None
    if not re.fullmatch("[0-9]+", number) or int(number) == 0:
        hint = "--gpus all, --gpus none or --gpus 2"
        raise InputError(f"--gpus {number!r} is not a number of GPUs", hint=hint)
    return int(number)


def devices_named(items: Iterable[str]) -> Devices:
    """Return the devices of ``--device``: CDI names, device nodes, folders of nodes such as
    /dev/dri.

    Raises InputError for anything else. The engine refuses a device that does not exist.
    """
    devices = Devices()
    for item in items:
        if not re.fullmatch(r"/dev/.+|[^/=]+/[^/=]+=[^/]+", item) or ".." in Path(item).parts:
            raise InputError(
                f"--device {item!r} is neither a path below /dev nor a CDI device",
                hint="--device /dev/kfd, or --device amd.com/gpu=0 as /etc/cdi describes it",
            )
        nodes = []
        if item.startswith("/dev/"):
            nodes = [Path(item), *Path(item).glob("*")]
        devices += Devices(names=(item,), groups=_groups(nodes))
    return devices


def cdi_names(folders: Sequence[Path] = CDI_FOLDERS) -> list[str]:
    """Return the names of all CDI devices of this machine, such as ``amd.com/gpu=0``.

    Raises InputError, with the place, for a file that is not a specification.
    """
    paths: list[Path] = []
    for folder in folders:
        paths += [*folder.glob("*.json"), *folder.glob("*.yaml")]
    names = set()
    for path in sorted(paths):
        # JSON is YAML except for tabs, which a JSON string cannot contain.
        text = text_if_readable(path).replace("\t", " ")
        data: Any = yamlfile.parse(text, str(path)).data
        try:
            for device in data["devices"]:
                names.add(f"{data['kind']}={device['name']}")
        except (KeyError, TypeError):
            message = "a CDI specification needs a kind and devices with names"
            raise InputError(message, where=path) from None
    return sorted(names)


def _first(kind: str, names: Sequence[str], count: int | None) -> tuple[str, ...]:
    if count is None and f"{kind}=all" in names:
        return (f"{kind}=all",)
    words = [name.partition("=")[2] for name in names]
    numbers = sorted(int(word) for word in words if word.isdigit())
    _check_count(count, len(numbers))
    if not numbers:
        return tuple(names)
    return tuple(f"{kind}={number}" for number in numbers[:count])


def _check_count(count: int | None, available: int) -> None:
    if count is not None and count > available:
        raise HostError(f"--gpus {count}: this machine has {counted(available, 'GPU')}")


def _amd(root: Path, count: int | None) -> Devices:
    nodes = [root / "dev/kfd"]
    for facts in [*kfd_gpus(root).values()][:count]:
        render = f"renderD{facts.get('drm_render_minor', '')}"
        nodes.append(root / "dev/dri" / render)
        beside = (root / "sys/class/drm" / render / "device/drm").glob("card*")
        nodes += sorted(root / "dev/dri" / card.name for card in beside)
    present = [node for node in nodes if _is_device(node)]
    if not present:
        raise HostError(
            f"the driver shows GPUs, but {nodes[0]} is missing",
            hint="in a container: start it with the GPU's devices; else: amd-ctk cdi generate",
        )
    names = tuple(f"/{node.relative_to(root)}" for node in present)
    return Devices(names=names, groups=_groups(present))


def _groups(nodes: Iterable[Path]) -> tuple[int, ...]:
    """Return the groups other than root's that own these device nodes."""
    groups = [node.stat().st_gid for node in nodes if _is_device(node)]
    return tuple(dict.fromkeys(filter(None, groups)))


def _is_device(path: Path) -> bool:
    return path.is_char_device() or path.is_block_device()
