"""Detecting GPUs from the kernel's files, without loading torch or running a tool.

For AMD GPUs, the kernel reports an architecture, which several products share, and a PCI device id,
which identifies the product. ``DetectedGpus.generation`` is known only if the product is identified
and no GPU is a partition.
"""

import os
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from primus_images.files import text_if_readable
from primus_images.gpus.table import by_product_name, load_table

_SIMDS_PER_UNIT = 4
_TOPOLOGY = "sys/class/kfd/kfd/topology/nodes"


@dataclass(frozen=True, kw_only=True)
class DetectedGpus:
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


def detect(root: Path = Path("/")) -> DetectedGpus:
    """Look below ``root`` for AMD GPUs, then for NVIDIA GPUs. Never raises."""
    try:
        return _amd(root) or _nvidia(root) or DetectedGpus()
    except (OSError, ValueError):
        return DetectedGpus()


def memory_bytes(root: Path = Path("/")) -> float | None:
    """Return the memory of the smallest GPU of this machine in bytes, or None if it is not known.

    AMD's is in KFD's topology; NVIDIA's driver tells it to ``nvidia-smi`` only.
    """
    sizes = []
    for path in (root / _TOPOLOGY).glob("*/mem_banks/*/properties"):
        bank = properties(path)
        # Heaps 1 and 2 are a GPU's memory, visible to the CPU and not. Heap 0 is the CPU's.
        if bank.get("heap_type") in ("1", "2"):
            sizes.append(float(bank["size_in_bytes"]))
    return min(sizes or _nvidia_sizes(), default=None)


def _nvidia_sizes() -> list[float]:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(
            command, capture_output=True, errors="replace", timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [float(mib) * 2**20 for mib in result.stdout.split() if mib.isdigit()]


def visible(count: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices that a process may use, as HIP_VISIBLE_DEVICES names them.

    ``count`` are on the machine. ROCR_VISIBLE_DEVICES applies first, and the other variables count
    among the devices that it leaves.
    """
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if name in environment:
            return tuple(_words(environment[name]))
    if "ROCR_VISIBLE_DEVICES" in environment:
        count = len(_words(environment["ROCR_VISIBLE_DEVICES"]))
    return tuple(map(str, range(count)))


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs of this machine that this process may use."""
    gpus = detect()
    return visible(len(gpus.names), os.environ)


def _words(text: str) -> list[str]:
    return [word for word in map(str.strip, text.split(",")) if word not in ("", "-1")]


def properties(path: Path) -> dict[str, str]:
    """Return a file of KFD's topology, with a name and a value a line; empty if not readable."""
    pairs = {}
    for line in text_if_readable(path).splitlines():
        words = line.split(maxsplit=1)
        if len(words) == 2:
            pairs[words[0]] = words[1].strip()
    return pairs


def kfd_gpus(root: Path) -> dict[Path, dict[str, str]]:
    """Return the nodes of AMD GPUs in KFD's topology, with their properties."""
    gpus = {}
    for node in sorted((root / _TOPOLOGY).glob("*"), key=lambda path: path.name.zfill(6)):
        facts = properties(node / "properties")
        # CPUs are nodes without SIMDs.
        if int(facts.get("simd_count", "0")) > 0:
            gpus[node] = facts
    return gpus


def _amd(root: Path) -> DetectedGpus | None:
    names = []
    generations = set()
    for facts in kfd_gpus(root).values():
        name, generation = _product(facts)
        names.append(name)
        generations.add(generation)
    if not names:
        return None
    return DetectedGpus(
        vendor="amd",
        names=tuple(names),
        generation=_only(generations),
        driver=_driver(root, "amdgpu"),
        firmware=_amd_firmware(root),
    )


def _amd_firmware(root: Path) -> str:
    versions = set()
    for device in (root / "sys/class/drm").glob("card*/device"):
        for path in (device / "vbios_version", *device.glob("fw_version/*_fw_version")):
            version = text_if_readable(path).strip()
            if version.strip("0x"):
                name = path.name.removesuffix("_version").removesuffix("_fw")
                versions.add(f"{name} {version}")
    return ", ".join(sorted(versions))


def _product(facts: Mapping[str, str]) -> tuple[str, str]:
    """Return the name of an AMD GPU, and its generation; "" if it is not known."""
    version = int(facts.get("gfx_target_version", "0"))
    device = int(facts.get("device_id", "0"))
    arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    products = [gpu for gpu in load_table().generations if gpu.arch == arch]
    if not device:
        first, *others = [gpu.title for gpu in products] or ["unknown AMD GPU"]
        # "AMD Instinct MI300X or MI325X": the vendor is named once.
        names = " or ".join([first, *(title.rpartition(" ")[2] for title in others)])
        return f"{names} ({arch})", ""
    units = int(facts["simd_count"]) // _SIMDS_PER_UNIT
    for gpu in products:
        if f"0x{device:04x}" not in gpu.device_ids:
            continue
        if units == gpu.compute_units:
            return f"{gpu.title} ({arch})", gpu.name
        # A partition has the name of the whole GPU, but only a part of its peak.
        share = f"{units} of {gpu.compute_units} compute units"
        return f"part of {gpu.title} ({arch}, {share})", ""
    return f"unknown AMD GPU ({arch}, device 0x{device:04x})", ""


def _nvidia(root: Path) -> DetectedGpus | None:
    driver = root / "proc/driver/nvidia"
    gpus = [_information(path) for path in sorted((driver / "gpus").glob("*/information"))]
    if not gpus:
        # Only the devices are there, whose names end in a number.
        gpus = [{} for path in (root / "dev").glob("nvidia*") if path.name[6:].isdigit()]
    if not gpus:
        return None
    names = []
    generations = set()
    versions = set()
    for gpu in gpus:
        name = gpu.get("Model", "unknown NVIDIA GPU")
        product = by_product_name(name)
        names.append(name)
        generations.add(product.name if product else "")
        versions.add(gpu.get("Video BIOS", ""))
    # The model is that of the whole GPU, even if a container sees only an instance (MIG) of it.
    if any((driver / "capabilities").glob("gpu*/mig/gi*")):
        generations = {""}
    return DetectedGpus(
        vendor="nvidia",
        names=tuple(names),
        generation=_only(generations),
        driver=_driver(root, "nvidia"),
        firmware=", ".join(sorted(versions - {""})),
    )


def _information(path: Path) -> dict[str, str]:
    facts = {}
    for line in text_if_readable(path).splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    return facts


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
