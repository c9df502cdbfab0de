"""Devices from Container Device Interface (CDI) specifications.

AMD's and NVIDIA's container toolkits write such files: ``amd-ctk cdi generate``, ``nvidia-ctk cdi generate``. A file in
``/var/run/cdi`` overrides the same device of one in ``/etc/cdi``. See https://github.com/cncf-tags/container-device-interface.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from primus import schema, yamlfile
from primus.errors import InputError, nearest
from primus.sandbox.container import DeviceNode, Devices, Hook, Mount, merged

# Later folders take precedence.
FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))

_VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
_HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?"
_KIND = r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?/[A-Za-z](?:[A-Za-z0-9_-]*[A-Za-z0-9])?"
_ABSOLUTE = {"pattern": r"/[^\0]*", "shape": "an absolute path"}
_NUMBER = {"pattern": r"0[oO]?[0-7]+|[0-9]+", "shape": "a number"}


# Names as in the files.
@dataclass(frozen=True, kw_only=True)
class _Node:
    path: str = field(metadata=_ABSOLUTE)
    hostPath: str | None = field(default=None, metadata=_ABSOLUTE)
    type: str | None = None
    major: int | None = None
    minor: int | None = None
    fileMode: str | None = field(default=None, metadata=_NUMBER)
    permissions: str | None = field(default=None, metadata={"pattern": r"[rwm]*", "shape": "letters of rwm"})
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Mount:
    hostPath: str = field(metadata=_ABSOLUTE)
    containerPath: str = field(metadata=_ABSOLUTE)
    type: str | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Hook:
    hookName: str = field(metadata={"pattern": "|".join(_HOOKS), "shape": "one of " + ", ".join(_HOOKS)})
    path: str = field(metadata=_ABSOLUTE)
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Edits:
    env: tuple[str, ...] = field(
        default=(), metadata={"pattern": r"(?s)[^=\0]+=[^\0]*", "shape": "a list of NAME=value"}
    )
    deviceNodes: tuple[_Node, ...] = ()
    mounts: tuple[_Mount, ...] = ()
    hooks: tuple[_Hook, ...] = ()
    additionalGids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Device:
    name: str = field(metadata={"pattern": _NAME, "shape": "a device name"})
    containerEdits: _Edits = field(default_factory=_Edits)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Spec:
    cdiVersion: str
    kind: str = field(metadata={"pattern": _KIND, "shape": "vendor.com/class"})
    devices: tuple[_Device, ...]
    containerEdits: _Edits = field(default_factory=_Edits)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Registry:
    """The devices of all specifications, by qualified name, and what all devices of a kind share."""

    devices: Mapping[str, Devices]

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the names of the devices of ``kind``, for example ``0``, ``1``, ``all`` of ``amd.com/gpu``."""
        return tuple(name.partition("=")[2] for name in self.devices if name.partition("=")[0] == kind)

    def find(self, names: Iterable[str]) -> tuple[Devices, ...]:
        """Return the devices of these qualified names. Raises InputError for one that no specification describes."""
        found = []
        for name in names:
            if name not in self.devices:
                known = ", ".join(self.devices) or "none"
                raise InputError(
                    f"no CDI specification describes the device {name}{nearest(name, self.devices)}",
                    hint=f"described in {' and '.join(map(str, FOLDERS))}: {known}",
                )
            found.append(self.devices[name])
        return tuple(found)


def qualified(text: str) -> bool:
    """Return whether ``text`` is the qualified name of a CDI device: ``vendor.com/class=name``."""
    return re.fullmatch(f"{_KIND}={_NAME}", text) is not None


def read(folders: Sequence[Path] = FOLDERS) -> Registry:
    """Read every specification (``*.json``, ``*.yaml``) in ``folders``; missing folders are empty.

    Raises InputError, with the place, for a file that is not a specification, for an unknown version or edit
    (leaving one out would change what the device needs), and for a device that another file of the folder describes
    as well.
    """
    found: dict[str, Devices] = {}
    for folder in folders:
        here: dict[str, tuple[Path, Devices]] = {}
        for path in _files(folder):
            for name, devices in _read(path).items():
                if name in here:
                    raise InputError(
                        f"{name} is described here and in {here[name][0]}",
                        where=str(path),
                        hint="remove one of the two",
                    )
                here[name] = (path, devices)
        found.update({name: devices for name, (_, devices) in here.items()})
    return Registry(devices=dict(sorted(found.items())))


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.suffix in (".json", ".yaml") and p.is_file())
    except OSError:
        return []


def _read(path: Path) -> dict[str, Devices]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(f"this CDI specification cannot be read: {reason}", where=str(path)) from None
    # JSON is YAML except for tabs, which a JSON string cannot contain.
    document = yamlfile.parse(text.replace("\t", " ") if path.suffix == ".json" else text, str(path))
    data = document.data
    version = data.get("cdiVersion") if isinstance(data, dict) else None
    if isinstance(version, str) and version not in _VERSIONS:
        raise InputError(
            f"CDI version {version} is not supported", where=document.where(("cdiVersion",)),
            hint=f"supported: {', '.join(_VERSIONS)}",
        )  # fmt: skip
    spec = schema.build(_Spec, document)
    if not spec.devices:
        raise InputError("a CDI specification must describe a device", where=document.where(("devices",)))
    found: dict[str, Devices] = {}
    for number, device in enumerate(spec.devices):
        name = f"{spec.kind}={device.name}"
        if name in found:
            raise InputError(f"duplicate device {device.name!r}", where=document.where(("devices", number, "name")))
        edits = merged((_devices(spec.containerEdits), _devices(device.containerEdits)))
        found[name] = replace(edits, cdi=name)
    return found


def _devices(edits: _Edits) -> Devices:
    return Devices(
        nodes=tuple(_node(node) for node in edits.deviceNodes),
        mounts=tuple(_mount(mount) for mount in edits.mounts),
        env=dict(item.split("=", 1) for item in edits.env),
        hooks=tuple(Hook(name=h.hookName, path=h.path, args=h.args, env=h.env, timeout=h.timeout) for h in edits.hooks),
        groups=tuple(gid for gid in edits.additionalGids if gid),
    )


def _node(node: _Node) -> DeviceNode:
    # The host's node determines type, major and minor. A specification with other values is out of date.
    return DeviceNode(
        source=Path(node.hostPath or node.path),
        target=node.path,
        permissions=node.permissions or "rwm",
        mode=_number(node.fileMode),
        uid=node.uid,
        gid=node.gid,
    )


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    return int(text.replace("o", "").replace("O", ""), 8) if text[0] == "0" else int(text)


def _mount(mount: _Mount) -> Mount:
    options = mount.options
    if not {"bind", "rbind"} & set(options):
        options = ("rbind", *options)
    return Mount(source=Path(mount.hostPath), target=mount.containerPath, read_only="ro" in options, options=options)
