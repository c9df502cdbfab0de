"""A sound machine with AMD GPUs, as its kernel's files describe it, below any folder."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from primus_images.gpus.table import generation
from tables import text_of

FILES = yaml.safe_load(text_of("sound_machine.yaml"))
_TARGET_VERSIONS = {"gfx942": 90402, "gfx950": 90500}


def write_all(folder: Path, files: Mapping[str, str]) -> None:
    """Write path → text below a folder."""
    for name, text in files.items():
        path = folder / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_machine(root: Path, gpu: str = "mi300x", gpus: int = 8) -> Path:
    """Make a machine with so many GPUs of a generation."""
    row = generation(gpu)
    device = int(row.device_ids[0], 16)
    version = _TARGET_VERSIONS[row.arch]
    for number in range(gpus):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number + 2}"
        facts = f"simd_count {4 * row.compute_units}\ngfx_target_version {version}\n"
        facts += f"device_id {device}\n"
        write_all(node, {"properties": facts})
        for link in range(gpus - 1):
            write_all(node / f"io_links/{link}", {"properties": "type 11\nweight 15\n"})
        write_all(root / f"sys/class/drm/renderD{128 + number}/device", FILES["card"])
        write_all(root / f"sys/bus/pci/devices/{number}", FILES["gpu"])
        write_all(root, {f"dev/dri/renderD{128 + number}": ""})
    write_all(root, FILES["host"])
    (root / "dev/shm").mkdir(parents=True)
    return root
