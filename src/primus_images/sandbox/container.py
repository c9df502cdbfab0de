"""The input of a container, as plain data: root file system, limits, command and devices.

Devices are GPUs by number, CDI devices by name, and nodes by path.

GPUs come from a Container Device Interface (CDI) specification if the machine has one, AMD's
otherwise from device nodes. AMD's and NVIDIA's container toolkits write the specifications, and
podman and Docker apply them.
"""

import hashlib
import json
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

GIB = 1 << 30

# Standard input, output or error of a run: a file object with a descriptor, or None to inherit.
Stream = IO[Any] | None
CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
_KINDS = {"amd": "amd.com/gpu", "nvidia": "nvidia.com/gpu"}


@dataclass(frozen=True, kw_only=True)
class LayerRef:
    """One OCI layer blob of ``size`` bytes. ``digest`` is its ``sha256:…``, ``diff_id`` that of the
    uncompressed tar.

    ``media_type`` ends in ``tar``, ``tar+gzip`` or ``tar+zstd`` (or Docker's ``tar.gzip``).
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
        rows = zip(
            json.loads(self.manifest)["layers"], self.config["rootfs"]["diff_ids"], strict=True
        )
        return tuple(
            LayerRef(
                digest=entry["digest"],
                diff_id=diff_id,
                size=entry["size"],
                media_type=entry["mediaType"],
            )
            for entry, diff_id in rows
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
    """Return the name of the folder of a layer. A mount's options have 4,095 bytes for the names of
    all layers.
    """
    return digest.partition(":")[2][:28]


def with_settings(root: RootFs, command: Command) -> Command:
    """Return the command with the image's settings. InputError if its argument list is empty or not
    UTF-8.
    """
    settings = root.config.get("config") or {}
    if command.entrypoint:
        entry = list(settings.get("Entrypoint") or [])
    else:
        entry = []
    argv = [*entry, *(command.argv or settings.get("Cmd") or [])]
    if not argv:
        raise InputError(
            f"image {root.name} has no default command", hint="give a command after --"
        )
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
        if not mount.target.startswith("/") or mount.target.strip("/") in (
            "",
            "proc",
            "sys",
            "dev",
        ):
            raise InputError(
                f"{mount.target!r} cannot be the target of a mount",
                hint="give an absolute path inside the image",
            )
        if not mount.source.exists():
            raise InputError(
                f"{mount.source} does not exist, so it cannot be mounted at {mount.target}",
                hint="create it first",
            )


def gpus(number: str, *, root: Path = Path("/"), folders: Sequence[Path] = CDI_FOLDERS) -> Devices:
    """Return the devices for the requested GPUs: ``none``, ``all``, or a number for the first ones.

    Raises InputError for another word or an unreadable CDI specification, HostError if the machine
    has fewer GPUs.
    """
    if number == "none":
        return Devices()
    if number != "all" and not (number.isascii() and number.isdigit() and int(number) > 0):
        raise InputError(
            f"--gpus {number!r} is not a number of GPUs", hint="--gpus all, --gpus none or --gpus 2"
        )
    if number == "all":
        count = None
    else:
        count = int(number)
    machine = detect(root)
    kinds = [kind for vendor, kind in _KINDS.items() if machine.vendor in (vendor, "")]
    names = [name for kind in kinds for name in cdi_names(folders) if name.startswith(f"{kind}=")]
    if names:
        first = [name for name in names if name.partition("=")[0] == names[0].partition("=")[0]]
        if first[0].startswith("amd"):
            nodes = [root / "dev/kfd", *(root / "dev/dri").glob("renderD*")]
        else:
            nodes = []
        return Devices(names=tuple(_first(first, count)), groups=_groups(filter(_is_device, nodes)))
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


def listed(items: Iterable[str]) -> Devices:
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
        nodes = filter(
            _is_device, [Path(item), *Path(item).glob("*")] if item.startswith("/dev/") else []
        )
        devices += Devices(names=(item,), groups=_groups(nodes))
    return devices


def cdi_names(folders: Sequence[Path] = CDI_FOLDERS) -> list[str]:
    """Return the names of all CDI devices of this machine, such as ``amd.com/gpu=0``.

    Raises InputError, with the place, for a file that is not a specification.
    """
    names = []
    for path in sorted(
        path for folder in folders for path in folder.glob("*") if path.suffix in (".json", ".yaml")
    ):
        # JSON is YAML except for tabs, which a JSON string cannot contain.
        text = text_if_readable(path)
        data: Any = yamlfile.parse(
            text.replace("\t", " ") if path.suffix == ".json" else text, str(path)
        ).data
        try:
            names += [f"{data['kind']}={device['name']}" for device in data["devices"]]
        except (KeyError, TypeError):
            raise InputError(
                "a CDI specification needs a kind and devices with names", where=str(path)
            ) from None
    return sorted(set(names))


def _first(names: Sequence[str], count: int | None) -> Sequence[str]:
    kind = names[0].partition("=")[0]
    if count is None and f"{kind}=all" in names:
        return [f"{kind}=all"]
    numbers = sorted(int(number) for name in names if (number := name.partition("=")[2]).isdigit())
    _check_count(count, len(numbers))
    return [f"{kind}={number}" for number in numbers[:count]] or names


def _check_count(count: int | None, available: int) -> None:
    if count is not None and count > available:
        raise HostError(
            f"--gpus {count}: this machine has {available} GPU{'s' if available != 1 else ''}"
        )


def _amd(root: Path, count: int | None) -> Devices:
    cards = []
    for facts in kfd_gpus(root).values():
        render = f"renderD{facts.get('drm_render_minor', '')}"
        beside = (root / "sys/class/drm" / render / "device/drm").glob("card*")
        cards.append([render, *sorted(path.name for path in beside)])
    nodes = [
        root / "dev/kfd",
        *(root / "dev/dri" / name for names in cards[:count] for name in names),
    ]
    present = [node for node in nodes if _is_device(node)]
    if not present:
        node_text = nodes[0]
        raise HostError(
            f"the driver shows GPUs, but {node_text} is missing",
            hint="in a container: start it with the GPU's devices; else: amd-ctk cdi generate",
        )
    return Devices(
        names=tuple(f"/{node.relative_to(root)}" for node in present), groups=_groups(present)
    )


def _groups(nodes: Iterable[Path]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(gid for node in nodes if (gid := node.stat().st_gid)))


def _is_device(path: Path) -> bool:
    return path.is_char_device() or path.is_block_device()
