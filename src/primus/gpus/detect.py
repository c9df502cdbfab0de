"""Is there a GPU, and which? Asked of the kernel's own files, without loading torch or starting a tool."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Found", "detect", "name_of_gfx"]

_NAMES = Path(__file__).with_name("names.yaml")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the machine shows. ``names`` has one entry per GPU; a GPU that no table knows is named as unknown.

    ``vendor`` is "amd", "nvidia" or "" for none. ``usable`` tells that the device nodes training needs can be
    opened by this user; ``obstacle`` says why not.
    """

    vendor: str = ""
    names: tuple[str, ...] = ()
    usable: bool = False
    obstacle: str = ""

    def sentence(self) -> str:
        """For the banner: what was found, in a few words."""
        if not self.names:
            return "none found; training runs on the CPU"
        counted = ", ".join(f"{count} × {name}" for name, count in Counter(self.names).items())
        return counted + (f" ({self.obstacle})" if self.obstacle else "")


def detect(root: Path = Path("/")) -> Found:
    """Look below ``root`` for AMD GPUs (KFD topology), then NVIDIA ones (driver's files). Never raises."""
    try:
        return _amd(root) or _nvidia(root) or Found()
    except (OSError, ValueError):
        return Found()


def _amd(root: Path) -> Found | None:
    names = []
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for node in sorted(nodes.glob("*"), key=lambda path: path.name.zfill(6)):
        properties = dict(
            line.split(maxsplit=1) for line in _lines(node / "properties") if len(line.split(maxsplit=1)) == 2
        )
        # CPUs are nodes of the topology too; only GPUs have SIMDs.
        if int(properties.get("simd_count", "0")) > 0:
            names.append(name_of_gfx(int(properties.get("gfx_target_version", "0"))))
    device = root / "dev/kfd"
    if not names:
        return None
    obstacle = (
        ""
        if _openable(device)
        else f"/{device.relative_to(root)} cannot be opened: pass --device /dev/kfd --device /dev/dri"
    )
    return Found(vendor="amd", names=tuple(names), usable=not obstacle, obstacle=obstacle)


def _nvidia(root: Path) -> Found | None:
    names = []
    for gpu in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        model = next(
            (line.partition(":")[2].strip() for line in _lines(gpu / "information") if line.startswith("Model")),
            "",
        )
        names.append(model or "unknown NVIDIA GPU")
    nodes = [node for node in (root / "dev").glob("nvidia[0-9]*") if node.name[6:].isdigit()]
    if not names:
        names = ["unknown NVIDIA GPU"] * len(nodes)
    if not names:
        return None
    obstacle = "" if any(_openable(node) for node in nodes) else "no /dev/nvidia* can be opened: pass --gpus all"
    return Found(vendor="nvidia", names=tuple(names), usable=not obstacle, obstacle=obstacle)


def name_of_gfx(version: int) -> str:
    """The name for KFD's ``gfx_target_version`` (90402 → gfx942): a known generation, or "unknown …"."""
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    arch = f"gfx{major}{minor:x}{step:x}"
    known = _names().get(arch)
    return f"{known} ({arch})" if known else f"unknown AMD GPU ({arch})"


@cache
def _names() -> dict[str, str]:
    import yaml

    table = yaml.safe_load(_NAMES.read_text(encoding="utf-8"))
    return {str(arch): str(name) for arch, name in table["gfx"].items()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _openable(path: Path) -> bool:

    return path.exists() and os.access(path, os.R_OK | os.W_OK)
