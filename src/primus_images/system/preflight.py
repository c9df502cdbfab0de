"""Checks of a machine before a job.

Each reads the kernel's files, and names the problem and its remedy.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from primus_images.gpus.detect import kfd_gpus, properties
from primus_images.system import fabric
from primus_images.system.drivers import amdgpu_drivers, drivers
from primus_images.system.host import IMAGE_FILE, Finding, Host, Level, finding
from primus_images.terminal import counted
from primus_images.yamlfile import read_values

_GIB = 2**30
_AMD = "0x1002"
_NVIDIA = "0x10de"
# PCI classes: processing accelerators, and display controllers that only compute.
_COMPUTE = ("0x1200", "0x0302", "0x0380")
_XGMI = "11"
_MANY_CORRECTED = 1000
_LEAST_PROCESSES = 4096
_LEAST_POWER = 0.95
_OF_CONTAINERS = (".dockerenv", "run/.containerenv", IMAGE_FILE.relative_to("/"))


def present(host: Host) -> Iterator[Finding]:
    """Check that GPUs are present, and that all have a driver."""
    usable = len(host.gpus.names)
    devices = _on_the_bus(host)
    bus = len(devices)
    # The driver is also bound for GPUs of the host that this container does not see.
    unbound = [device for device in devices if not (device / "driver").exists()]
    if unbound:
        module = "nvidia"
        if any(host.text(device / "vendor") == _AMD for device in unbound):
            module = "amdgpu"
        yield finding("unbound", unbound=len(unbound), bus=bus, module=module)
    elif bus and not usable:
        yield finding("unusable", bus=bus)
    elif bus > usable and not _in_container(host):
        yield finding("some_usable", bus=bus, usable=usable)
    elif not usable:
        yield finding("no_gpu", check="gpus")


def _on_the_bus(host: Host) -> list[Path]:
    devices = []
    for device in host.glob("sys/bus/pci/devices/*"):
        maker = host.text(device / "vendor")
        kind = host.text(device / "class")[:6]
        if kind in _COMPUTE and maker in (_AMD, _NVIDIA):
            devices.append(device)
    return devices


def _in_container(host: Host) -> bool:
    return any((host.root / name).exists() for name in _OF_CONTAINERS)


def one_generation(host: Host) -> Iterator[Finding]:
    """Check that all GPUs are whole, and of one generation in the table."""
    names = host.gpus.names
    sentence = host.gpus.sentence()
    if len(set(names)) > 1:
        yield finding("several_generations", gpus=sentence)
    elif any(name.startswith("part of") for name in names):
        yield finding("partition", gpu=names[0])
    elif host.gpus.generation:
        yield finding("one_generation", gpus=sentence)
    elif names:
        yield finding("unlisted", gpu=names[0])


def rights(host: Host) -> Iterator[Finding]:
    """Check that the user may open the GPUs' devices."""
    option = "--gpus all"
    needed = [host.root / "dev/nvidiactl", host.root / "dev/nvidia-uvm"]
    if host.gpus.vendor == "amd":
        option = "--device /dev/kfd --device /dev/dri"
        cards = host.glob("dev/dri/renderD*")
        needed = [host.root / "dev/kfd", *cards]
        gpus = len(host.gpus.names)
        if len(cards) < gpus:
            yield finding("render_devices", there=len(cards), gpus=gpus, option=option)
    closed = [path for path in needed if not os.access(path, os.R_OK | os.W_OK)]
    if not closed:
        yield finding("opened", devices=counted(len(needed), "device"))
        return
    path = closed[0]
    shown = host.shown(path)
    if path.exists():
        group = path.stat().st_gid
        yield finding("closed_device", path=shown, user=os.geteuid(), group=group)
    else:
        yield finding("missing_device", path=shown, option=option)


def driver(host: Host) -> Iterator[Finding]:
    """Check that the kernel's driver supports the ROCm in use."""
    if host.gpus.vendor != "amd":
        yield finding("driver_of_others", vendor=host.gpus.vendor)
        return
    table = drivers()
    version = host.text("sys/module/amdgpu/version")
    rocm = host.text("opt/rocm/.info/version") or host.components().get("rocm", "")
    row = table["amdgpu"].get(version)
    supporting = amdgpu_drivers(rocm)
    if row is None:
        yield finding("unknown_driver", what=f"amdgpu {version or 'of the kernel'}")
    elif not supporting:
        yield finding("unknown_driver", what=f"ROCm {rocm or 'of unknown version'}")
    else:
        name = "other_driver"
        if version in supporting:
            name = "driver"
        yield finding(name, version=version, row=row, rocm=rocm, source=table["source"])


def settings(host: Host) -> Iterator[Finding]:
    """Check the settings of the kernel and its drivers in ``settings.yaml``."""
    rows: Any = read_values(Path(__file__).with_name("settings.yaml")).data["settings"]
    for row in rows:
        if "with" in row and not host.glob(row["with"]):
            continue
        wrong = set()
        for path in host.glob(row["file"]):
            value = host.text(path)
            if value and re.search(row["wrong"], value):
                wrong.add(value)
        if wrong:
            listed = ", ".join(sorted(wrong))
            message = row["message"].format(listed)
            yield Finding("slow", row["check"], message, row["remedy"])
    yield finding("settings")


def limits(host: Host) -> Iterator[Finding]:
    """Check the limits for open files, locked memory and processes."""
    soft: dict[str, float] = {}
    for line in host.text("proc/self/limits").splitlines():
        match = re.match(r"Max (open files|locked memory|processes)\s+(\S+)", line)
        if match:
            limit = match[2].replace("unlimited", "inf")
            soft[match[1]] = float(limit)
    if not soft:
        return
    least = 1024
    if host.gpus.names:
        least = 65536
    files = soft.get("open files", least)
    if files < least:
        yield finding("few_files", count=files)
    locked = soft.get("locked memory", float("inf"))
    if locked < 64 * _GIB and fabric.devices(host):
        yield finding("locked_memory", mib=locked / 2**20)
    count = soft.get("processes", _LEAST_PROCESSES)
    if count < _LEAST_PROCESSES:
        yield finding("few_processes", count=count)
    yield finding("limits")


def shared_memory(host: Host) -> Iterator[Finding]:
    """Check that /dev/shm is large enough for the ranks."""
    path = host.root / "dev/shm"
    ranks = max(1, len(host.gpus.names))
    # What NCCL's ring buffers need, if there are several ranks.
    least = _GIB // 32
    if ranks > 1:
        least = ranks * _GIB // 8
    # On a GPU, data loaders need room, too.
    good = least
    if host.gpus.names:
        good = 8 * _GIB
    if not path.is_dir():
        yield finding("no_shm")
        return
    total, free = host.bytes_of(path)
    name = "shm"
    if total < least:
        name = "small_shm"
    elif free < least:
        name = "full_shm"
    elif total < good:
        name = "modest_shm"
    yield finding(
        name,
        total=total / _GIB,
        free=free / _GIB,
        least=least / _GIB,
        ranks=counted(ranks, "rank"),
    )


def disk(host: Host) -> Iterator[Finding]:
    """Check the free space of the output folder."""
    _, free = host.bytes_of(host.output)
    name = "disk"
    if free < _GIB:
        name = "full_disk"
    elif free < 20 * _GIB and host.gpus.names:
        name = "small_disk"
    yield finding(name, folder=host.output, free=free / _GIB)


def health(host: Host) -> Iterator[Finding]:
    """Check AMD's GPUs: ECC errors, retired pages, PCIe and XGMI links, memory in use, power."""
    cards = []
    for path in host.glob("sys/class/drm/renderD*/device"):
        if host.text(path / "vendor") in ("", _AMD):
            cards.append(path)
    if host.gpus.vendor != "amd" or not cards:
        yield finding("no_health", vendor=host.gpus.vendor)
        return
    for number, card in enumerate(cards):
        name = f"GPU {number}"
        yield from _ecc(host, card, name)
        yield from _pcie(host, card, name)
        yield from _memory(host, card, name)
        yield from _power(host, card, name)
    yield from _xgmi(host)
    yield finding("health", gpus=len(cards))


def _ecc(host: Host, card: Path, name: str) -> Iterator[Finding]:
    for block in sorted((card / "ras").glob("*_err_count")):
        counts = dict(re.findall(r"(ue|ce):\s*(\d+)", host.text(block)))
        uncorrected = int(counts.get("ue", 0))
        corrected = int(counts.get("ce", 0))
        if uncorrected:
            yield finding("uncorrected", gpu=name, count=uncorrected, block=block.name)
        elif corrected > _MANY_CORRECTED:
            yield finding("corrected", gpu=name, count=corrected, block=block.name)
    pages = host.text(card / "ras/gpu_vram_bad_pages").splitlines()
    if pages:
        yield finding("retired_pages", gpu=name, count=len(pages))


def _pcie(host: Host, card: Path, name: str) -> Iterator[Finding]:
    for what in ("speed", "width"):
        now = host.text(card / f"current_link_{what}")
        most = host.text(card / f"max_link_{what}")
        if now and most and _leading(now) < _leading(most):
            yield finding("pcie_link", gpu=name, what=what, now=now, most=most)


def _memory(host: Host, card: Path, name: str) -> Iterator[Finding]:
    used = host.number(card / "mem_info_vram_used")
    total = host.number(card / "mem_info_vram_total")
    if not used or not total or used <= 0.05 * total:
        return
    level: Level = "slow"
    if used > 0.5 * total:
        level = "failed"
    yield finding("used_memory", level=level, gpu=name, used=used / _GIB, total=total / _GIB)


def _power(host: Host, card: Path, name: str) -> Iterator[Finding]:
    sensors = card.relative_to(host.root) / "hwmon/hwmon*"
    for sensor in host.glob(str(sensors)):
        now = host.number(sensor / "power1_cap")
        usual = host.number(sensor / "power1_cap_default")
        if now and usual and now < _LEAST_POWER * usual:
            yield finding("power_limit", gpu=name, now=now / 1e6, usual=usual / 1e6)


def _xgmi(host: Host) -> Iterator[Finding]:
    counts = []
    for gpu in kfd_gpus(host.root):
        count = 0
        for folder in gpu.glob("io_links/*"):
            link = properties(folder / "properties")
            if link.get("type") == _XGMI and link.get("weight") != "0":
                count += 1
        counts.append(count)
    if not any(counts):
        return
    others = len(counts) - 1
    fewest = min(counts)
    if fewest < others:
        yield finding("few_links", gpu=counts.index(fewest), links=fewest, of=others)


def _leading(text: str) -> float:
    match = re.match(r"[\d.]+", text)
    if match:
        return float(match[0])
    return 0.0


def known_issues(host: Host) -> Iterator[Finding]:
    """Name what is known to be wrong with this image's versions on this GPU."""
    for issue in host.issues(host.gpus.generation):
        name = "issue"
        if issue.severity == "refuse":
            name = "refused_issue"
        yield finding(name, issue=issue)


# Checks that do not apply to a job on one machine.
OF_SEVERAL_NODES = (
    "RDMA",
    "RDMA rights",
    "RDMA libraries",
    "RDMA settings",
    "network",
    "locked memory",
)
# Checks of GPUs, which are skipped without any.
_OF_GPUS = {
    rights: "device rights",
    driver: "driver",
    health: "GPU health",
    settings: "host settings",
}
# In the order of the report: problems that stop a job come first.
CHECKS: tuple[Callable[[Host], Iterable[Finding]], ...] = (
    present,
    one_generation,
    rights,
    driver,
    shared_memory,
    disk,
    limits,
    health,
    settings,
    fabric.rdma,
    fabric.faults,
    fabric.libraries,
    fabric.interface,
    known_issues,
)


def preflight(host: Host) -> list[Finding]:
    """Run every check on ``host``, in order. Reads files only, in well under a second."""
    findings: list[Finding] = []
    for check in CHECKS:
        if check in _OF_GPUS and not host.gpus.names:
            findings.append(finding("no_gpu", check=_OF_GPUS[check]))
        else:
            findings += _results(check, host)
    return findings


def _results(check: Callable[[Host], Iterable[Finding]], host: Host) -> list[Finding]:
    try:
        results = list(check(host))
    except (OSError, ValueError) as error:
        # A file of the kernel may vanish while it is read, or hold what no other driver writes.
        name = check.__name__.replace("_", " ")
        why = getattr(error, "strerror", None) or error
        return [finding("unreadable", check=name, why=why)]
    # A check that finds no problem ends with a sentence that says so.
    if any(result.problem for result in results):
        return [result for result in results if result.level != "ok"]
    return results


def expected(host: Host, gpus: int | None, gpu: str | None, nics: int | None) -> Iterator[Finding]:
    """Check the numbers of GPUs and RDMA devices, and the generation of the GPUs, that are named.

    A machine without a GPU is a problem unless ``gpus`` is 0: nothing shows that a job on GPUs
    would run.
    """
    usable = host.gpus.names
    cards = fabric.devices(host)
    if not usable and gpus is None:
        yield finding("expected_gpu")
    if gpus is not None and len(usable) != gpus:
        yield finding("expected_gpus", there=len(usable), gpus=gpus)
    if gpu is not None and usable and host.gpus.generation != gpu:
        yield finding("expected_generation", there=host.gpus.sentence(), gpu=gpu)
    if nics is not None and len(cards) != nics:
        names = ", ".join(card.name for card in cards) or "none"
        yield finding("expected_nics", there=len(cards), nics=nics, names=names)


def disk_speed(folder: Path, megabytes: int = 256) -> Finding:
    """Measure the speed of writing and syncing a file in ``folder``, as for a checkpoint."""
    started = time.monotonic()
    block = bytes(2**20)
    size = 0.0
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            while size < megabytes and time.monotonic() - started < 10:
                size += file.write(block) / 2**20
            os.fsync(file.fileno())
    except OSError as error:
        why = error.strerror or ""
        return finding("unwritable", folder=folder, why=why.lower())
    seconds = max(time.monotonic() - started, 1e-6)
    rate = size / seconds
    if rate < 100:
        return finding("slow_disk", folder=folder, rate=rate)
    return finding("disk_speed", folder=folder, rate=rate)
