"""Selecting the devices of a container: GPUs by number, CDI devices by name, nodes by path.

GPUs come from a CDI specification if the machine has one, otherwise from plain device nodes.
"""

from __future__ import annotations

import os
import platform
import re
import stat
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from primus.errors import HostError, InputError
from primus.files import text_if_readable
from primus.gpus.detect import detect
from primus.sandbox import cdi
from primus.sandbox.container import DeviceNode, Devices, Mount

_KINDS = {"amd": "amd.com/gpu", "nvidia": "nvidia.com/gpu"}
_WRITES_A_SPECIFICATION = {
    "amd": "amd-ctk cdi generate --output=/etc/cdi/amd.json",
    "nvidia": "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
}
_NVIDIA_SHARED = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
# The user-space part of NVIDIA's driver, whose version must equal the kernel module's.
_NVIDIA_LIBRARIES = re.compile(
    r"\s(lib(?:cuda|cudadebugger|nvidia-(?:ml|ptxjitcompiler|nvvm|nvvm70))\.so[.\d]*) \(.*x86-64.*\) => (\S+)"
)


def gpus(asked: str, *, root: Path = Path("/"), folders: Sequence[Path] = cdi.FOLDERS) -> tuple[Devices, ...]:
    """Return the devices for the requested GPUs: ``none``, ``all``, or a number for the first ones.

    Raises InputError for another word or an invalid CDI specification, HostError if the machine has fewer GPUs.
    """
    if asked == "none":
        return ()
    if asked != "all" and not (asked.isascii() and asked.isdigit() and int(asked) > 0):
        raise InputError(f"--gpus {asked!r} is not a number of GPUs", hint="--gpus all, --gpus none or --gpus 2")
    count = None if asked == "all" else int(asked)
    found = detect(root)
    registry = cdi.read(folders)
    kinds = [kind for vendor, kind in _KINDS.items() if registry.names(kind) and found.vendor in (vendor, "")]
    if len(kinds) > 1:
        raise InputError(
            f"this machine has CDI specifications for {' and '.join(kinds)}, but no GPU that shows which applies",
            hint=f"--device {kinds[0]}=0 names one",
        )
    if kinds:
        return registry.find(_names(registry, kinds[0], count))
    if not found.vendor:
        raise HostError(
            "no GPU was found on this machine: no CDI specification, no AMD GPU below /sys/class/kfd, no /dev/nvidia0",
            hint="load the GPU's driver, or leave --gpus out",
        )
    _check_count(count, len(found.names))
    return (_amd(root, count) if found.vendor == "amd" else _nvidia(root, count),)


def listed(items: Iterable[str], *, folders: Sequence[Path] = cdi.FOLDERS) -> tuple[Devices, ...]:
    """Return the devices of ``--device``: qualified CDI names, device nodes, folders of nodes such as /dev/dri.

    Raises InputError for anything else.
    """
    found: list[Devices] = []
    for item in items:
        if cdi.qualified(item):
            found += cdi.read(folders).find([item])
            continue
        path = Path(item)
        nodes: list[Path] = []
        if item.startswith("/dev/") and ".." not in path.parts:
            nodes = _nodes_below(path) if path.is_dir() else [path] if _is_device(path) else []
        if not nodes:
            raise InputError(
                f"--device {item!r} is neither a device node below /dev nor a CDI device",
                hint="--device /dev/kfd, or --device amd.com/gpu=0 as /etc/cdi describes it",
            )
        found.append(_plain(nodes))
    return tuple(found)


def _names(registry: cdi.Registry, kind: str, count: int | None) -> list[str]:
    names = registry.names(kind)
    numbers = sorted((name for name in names if name.isdigit()), key=int)
    if count is None:
        return [f"{kind}=all"] if "all" in names else [f"{kind}={name}" for name in numbers or names]
    _check_count(count, len(numbers))
    return [f"{kind}={name}" for name in numbers[:count]]


def _check_count(count: int | None, have: int) -> None:
    if count is not None and count > have:
        raise HostError(f"--gpus {count}: this machine has {have} GPU{'s' if have != 1 else ''}")


def _amd(root: Path, count: int | None) -> Devices:
    """Return /dev/kfd, which all GPUs share, and each GPU's nodes in /dev/dri."""
    cards = []
    for node in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*"), key=lambda path: path.name.zfill(6)):
        properties = dict(
            line.split(maxsplit=1) for line in text_if_readable(node / "properties").splitlines() if " " in line
        )
        if int(properties.get("simd_count", "0")) > 0:
            render = f"renderD{properties.get('drm_render_minor', '')}"
            beside = (root / "sys/class/drm" / render / "device/drm").glob("card*")
            cards.append([render, *sorted(path.name for path in beside)])
    nodes = [root / "dev/kfd", *(root / "dev/dri" / name for names in cards[:count] for name in names)]
    return _plain([node for node in nodes if _is_device(node)] or _missing("/dev/kfd", "amd"), root)


def _nvidia(root: Path, count: int | None) -> Devices:
    """Return the driver's nodes, each GPU's own, and the driver's libraries."""
    numbers = sorted(int(path.name[6:]) for path in (root / "dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())
    nodes = [root / "dev" / name for name in (*_NVIDIA_SHARED, *(f"nvidia{n}" for n in numbers[:count]))]
    found = _plain([node for node in nodes if _is_device(node)] or _missing("/dev/nvidia0", "nvidia"), root)
    return replace(found, mounts=_driver_libraries(_linker_cache()))


def _driver_libraries(cache: str) -> tuple[Mount, ...]:
    """Return the driver's libraries in ``ldconfig -p``, where Debian's and Ubuntu's linkers look for them."""
    place = f"/usr/lib/{platform.machine()}-linux-gnu"
    return tuple(
        Mount(source=Path(path).resolve(), target=f"{place}/{name}")
        for name, path in _NVIDIA_LIBRARIES.findall(cache)
        if Path(path).exists()
    )


def _linker_cache() -> str:
    try:
        return subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def _missing(node: str, vendor: str) -> list[Path]:
    raise HostError(
        f"the driver shows GPUs, but {node} is missing",
        hint=f"in a container: start it with the GPU's devices; else {_WRITES_A_SPECIFICATION[vendor]}",
    )


def _plain(nodes: Iterable[Path], root: Path = Path("/")) -> Devices:
    """Return nodes with the owner and mode that they have on the host."""
    found = []
    for node in nodes:
        info = node.stat()
        inside = "/" + str(node.relative_to(root))
        mode = stat.S_IMODE(info.st_mode)
        found.append(DeviceNode(source=node, target=inside, mode=mode, uid=info.st_uid, gid=info.st_gid))
    return Devices(nodes=tuple(found))


def _nodes_below(folder: Path) -> list[Path]:
    # Links, such as those in /dev/dri/by-path, lead to nodes that are listed anyway.
    paths = (Path(where) / name for where, _, names in os.walk(folder) for name in sorted(names))
    return [path for path in paths if not path.is_symlink() and _is_device(path)]


def _is_device(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
