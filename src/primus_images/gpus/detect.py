"""Detecting GPUs from the kernel's files, without loading torch or running a tool.

For AMD GPUs, the kernel reports an architecture, which several products share, and a PCI device id,
which identifies the product. ``Found.generation`` is known only if the product is identified and no
GPU is a partition.
"""

import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from primus_images.files import text_if_readable
from primus_images.gpus.table import by_product_name, load_table

_SIMDS_PER_UNIT = 4


@dataclass(frozen=True, kw_only=True)
class Found:
    """The GPUs of a machine.

    ``names`` has one entry per GPU; a GPU that is not in the table is called unknown.
    ``generation`` is the name in the table of all GPUs, or "" if they differ or are not identified.
    ``vendor`` is "amd", "nvidia" or "". ``driver`` is the version of the kernel driver, or of the
    kernel if the driver is part of it. ``firmware`` is that of the GPUs: their VBIOS, and on AMD
    GPUs also that of their engines; "" if it is not known.
    """

    vendor: str = ""
    names: tuple[str, ...] = ()
    generation: str = ""
    driver: str = ""
    firmware: str = ""

    def sentence(self) -> str:
        """Return a short description for the banner."""
        if not self.names:
            return "none found; training runs on the CPU"
        return ", ".join(f"{count} × {name}" for name, count in Counter(self.names).items())


def detect(root: Path = Path("/")) -> Found:
    """Look below ``root`` for AMD GPUs (KFD topology), then for NVIDIA GPUs (files of the driver).
    Never raises.
    """
    try:
        return _amd(root) or _nvidia(root) or Found()
    except (OSError, ValueError):
        return Found()


def memory_bytes(root: Path = Path("/")) -> float | None:
    """Return the memory of the smallest GPU of this machine in bytes, or None if it is not known.

    AMD's is in KFD's topology; NVIDIA's driver tells it to ``nvidia-smi`` only.
    """
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    banks = [properties(path) for path in nodes.glob("*/mem_banks/*/properties")]
    # Heaps 1 and 2 are a GPU's memory, visible to the CPU and not. Heap 0 is the CPU's.
    sizes = [
        float(bank["size_in_bytes"])
        for bank in banks
        if bank.get("heap_type", "0").strip() in ("1", "2")
    ]
    if not sizes:
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        try:
            text = subprocess.run(
                command, capture_output=True, errors="replace", timeout=20, check=False
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            return None
        sizes = [float(line) * 2**20 for line in text.split() if line.isdigit()]
    return min(sizes, default=None)


def visible(count: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices, out of ``count`` on the machine, that a process may use, as
    HIP_VISIBLE_DEVICES names them.

    ROCR_VISIBLE_DEVICES applies first, and the other variables count among the devices that it
    leaves.
    """
    outer = environment.get("ROCR_VISIBLE_DEVICES")
    if outer is not None:
        count = len(_words(outer))
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        text = environment.get(name)
        if text is not None:
            return tuple(_words(text))
    return tuple(map(str, range(count)))


def properties(path: Path) -> dict[str, str]:
    """Return name → value of a file of KFD's topology, which has one pair in a line; empty if it
    cannot be read.
    """
    lines = (line.split(maxsplit=1) for line in text_if_readable(path).splitlines())
    return {words[0]: words[1].strip() for words in lines if len(words) == 2}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip() not in ("", "-1")]


def kfd_gpus(root: Path) -> dict[Path, dict[str, str]]:
    """Return the nodes of AMD GPUs in KFD's topology, with their properties. CPUs are nodes without
    SIMDs.
    """
    nodes = sorted(
        (root / "sys/class/kfd/kfd/topology/nodes").glob("*"), key=lambda path: path.name.zfill(6)
    )
    facts = {node: properties(node / "properties") for node in nodes}
    return {node: about for node, about in facts.items() if int(about.get("simd_count", "0")) > 0}


def _amd(root: Path) -> Found | None:
    names = []
    generations = set()
    for facts in kfd_gpus(root).values():
        version = int(facts.get("gfx_target_version", "0"))
        device = int(facts.get("device_id", "0"))
        name, generation = _product(version, device, int(facts["simd_count"]))
        names.append(name)
        generations.add(generation)
    if not names:
        return None
    files = [
        (path.name.removesuffix("_version").removesuffix("_fw"), text_if_readable(path).strip())
        for device in (root / "sys/class/drm").glob("card*/device")
        for path in (device / "vbios_version", *device.glob("fw_version/*_fw_version"))
    ]
    return Found(
        vendor="amd",
        names=tuple(names),
        generation=_only(generations),
        driver=_driver(root, "amdgpu"),
        firmware=", ".join(
            sorted({f"{name} {version}" for name, version in files if version.strip("0x")})
        ),
    )


def _product(version: int, device_id: int, simds: int) -> tuple[str, str]:
    arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    same = [gpu for gpu in load_table().generations if gpu.arch == arch]
    if not device_id:
        first, *rest = [gpu.title for gpu in same] or ["unknown AMD GPU"]
        # "AMD Instinct MI300X or MI325X": the vendor is named once.
        names = " or ".join([first, *(title.rpartition(" ")[2] for title in rest)])
        return f"{names} ({arch})", ""
    product = next((gpu for gpu in same if f"0x{device_id:04x}" in gpu.device_ids), None)
    if product is None:
        return f"unknown AMD GPU ({arch}, device 0x{device_id:04x})", ""
    units = simds // _SIMDS_PER_UNIT
    if units != product.compute_units:
        # A partition has the name of the whole GPU, but only a part of its peak.
        return (
            f"part of {product.title} ({arch}, {units} of {product.compute_units} compute units)",
            "",
        )
    return f"{product.title} ({arch})", product.name


def _nvidia(root: Path) -> Found | None:
    facts = [
        {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in text.splitlines())
        }
        for text in map(
            text_if_readable, sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
        )
    ]
    nodes = [node for node in (root / "dev").glob("nvidia[0-9]*") if node.name[6:].isdigit()]
    names = [gpu.get("Model", "unknown NVIDIA GPU") for gpu in facts or [{} for _ in nodes]]
    if not names:
        return None
    # The model is that of the whole GPU, even if a container sees only an instance (MIG) of it.
    split = any((root / "proc/driver/nvidia/capabilities").glob("gpu*/mig/gi*"))
    products = {None if split else by_product_name(name) for name in names}
    return Found(
        vendor="nvidia",
        names=tuple(names),
        generation=_only({gpu.name if gpu else "" for gpu in products}),
        driver=_driver(root, "nvidia"),
        firmware=", ".join(sorted({gpu["Video BIOS"] for gpu in facts if gpu.get("Video BIOS")})),
    )


def _only(generations: set[str]) -> str:
    if len(generations) == 1:
        return generations.pop()
    return ""


def _driver(root: Path, module: str) -> str:
    version = text_if_readable(root / "sys/module" / module / "version").strip()
    if version:
        return f"{module} {version}"
    kernel = text_if_readable(root / "proc/sys/kernel/osrelease").strip()
    if kernel:
        return f"{module} of Linux {kernel}"
    return ""
