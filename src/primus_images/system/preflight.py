"""Checks of a machine before a job. Each reads the kernel's files, and names the problem and its
remedy.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from primus_images.gpus.detect import kfd_gpus, properties
from primus_images.system import fabric
from primus_images.system.host import IMAGE_FILE, Finding, Host, Level, finding
from primus_images.yamlfile import read_values

_GIB = 2**30
_AMD = "0x1002"
_NVIDIA = "0x10de"
# PCI classes: processing accelerators, and display controllers that only compute.
_COMPUTE = ("0x1200", "0x0302", "0x0380")
_XGMI = "11"
_OF_CONTAINERS = (".dockerenv", "run/.containerenv", IMAGE_FILE.relative_to("/"))


def present(host: Host) -> Iterator[Finding]:
    """Check that GPUs are present, and that all have a driver."""
    makers = {
        path: host.text(path / "vendor")
        for path in host.glob("sys/bus/pci/devices/*")
        if host.text(path / "class")[:6] in _COMPUTE
    }
    devices = [path for path, maker in makers.items() if maker in (_AMD, _NVIDIA)]
    # The driver is also bound for GPUs of the host that this container does not see.
    unbound = [makers[path] for path in devices if not (path / "driver").exists()]
    names = host.gpus.names
    bus = len(devices)
    if unbound:
        module = "nvidia"
        if _AMD in unbound:
            module = "amdgpu"
        yield finding("unbound", unbound=len(unbound), bus=bus, module=module)
    elif not names and bus:
        yield finding("unusable", bus=bus)
    elif bus > len(names) and not any((host.root / name).exists() for name in _OF_CONTAINERS):
        yield finding("some_usable", bus=bus, usable=len(names))
    elif not names:
        yield finding("no_gpu", check="gpus")


def one_generation(host: Host) -> Iterator[Finding]:
    """Check that all GPUs are whole, and of one generation in the table."""
    names = host.gpus.names
    if len(set(names)) > 1:
        yield finding("several_generations", gpus=host.gpus.sentence())
    elif any(name.startswith("part of") for name in names):
        yield finding("partition", gpu=names[0])
    elif names:
        known = bool(host.gpus.generation)
        yield finding(
            "one_generation" if known else "unlisted", gpus=host.gpus.sentence(), gpu=names[0]
        )


def rights(host: Host) -> Iterator[Finding]:
    """Check that the user may open the GPUs' devices."""
    gpus = host.gpus
    option = "--gpus all"
    if gpus.vendor == "amd":
        option = "--device /dev/kfd --device /dev/dri"
        needed = [host.root / "dev/kfd", *host.glob("dev/dri/renderD*")]
        if len(needed) - 1 < len(gpus.names):
            yield finding(
                "render_devices", there=len(needed) - 1, gpus=len(gpus.names), option=option
            )
    else:
        needed = [host.root / name for name in ("dev/nvidiactl", "dev/nvidia-uvm")]
    path = next((path for path in needed if not os.access(path, os.R_OK | os.W_OK)), None)
    if path is None:
        yield finding("opened", count=len(needed))
    elif not path.exists():
        yield finding("missing_device", path=host.shown(path), option=option)
    else:
        yield finding(
            "closed_device", path=host.shown(path), user=os.geteuid(), group=path.stat().st_gid
        )


def visible(host: Host) -> Iterator[Finding]:
    """Check that the variables that select GPUs agree and name existing ones."""
    chosen = {}
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        text = host.environment.get(name)
        if text is None or not host.gpus.names:
            continue
        words = [word.strip() for word in text.split(",") if word.strip()]
        chosen[name] = words
        wrong = [word for word in words if word.isdecimal() and int(word) >= len(host.gpus.names)]
        if wrong or not words or "-1" in words:
            what = "no GPU"
            if wrong:
                what = f"GPU {wrong[0]}, and there are {len(host.gpus.names)}"
            yield finding("wrong_choice", name=name, text=text, what=what)
    if len({tuple(words) for words in chosen.values()}) > 1:
        yield finding(
            "two_choices",
            pairs=", ".join(f"{name}={','.join(words)}" for name, words in chosen.items()),
        )


def amdgpu_drivers(rocm: str) -> list[str]:
    """Return the versions of the kernel driver that support this ROCm, of those in the table."""
    release = ".".join(rocm.split(".")[:2])
    return [
        version
        for version, row in _table("drivers.yaml")["amdgpu"].items()
        if release in row["supports"]
    ]


def _table(name: str) -> dict[str, Any]:
    return cast(dict[str, Any], read_values(Path(__file__).with_name(name)).data)


def driver(host: Host) -> Iterator[Finding]:
    """Check that the kernel's driver supports the ROCm in use."""
    if host.gpus.vendor != "amd":
        yield finding("driver_of_others", vendor=host.gpus.vendor)
        return
    table = _table("drivers.yaml")
    version = host.text("sys/module/amdgpu/version")
    rocm = host.text("opt/rocm/.info/version") or host.components().get("rocm", "")
    row = table["amdgpu"].get(version)
    supporting = amdgpu_drivers(rocm)
    if row is None or not supporting:
        if row is None:
            what = f"amdgpu {version or 'of the kernel'}"
        else:
            what = f"ROCm {rocm or 'of unknown version'}"
        yield finding("unknown_driver", what=what)
    else:
        name = "other_driver"
        if version in supporting:
            name = "driver"
        yield finding(name, version=version, row=row, rocm=rocm, source=table["source"])


def settings(host: Host) -> Iterator[Finding]:
    """Check the settings of the kernel and its drivers in ``settings.yaml``."""
    for row in _table("settings.yaml")["settings"]:
        wrong = {host.text(path) for path in host.glob(row["file"])} - {""}
        wrong = {text for text in wrong if re.search(row["wrong"], text)}
        if wrong and ("with" not in row or host.glob(row["with"])):
            yield Finding(
                "slow", row["check"], row["message"].format(", ".join(sorted(wrong))), row["remedy"]
            )
    yield finding("settings")


def limits(host: Host) -> Iterator[Finding]:
    """Check the limits for open files, locked memory and processes."""
    soft: dict[str, float] = {}
    for line in host.text("proc/self/limits").splitlines():
        match = re.match(r"Max (open files|locked memory|processes)\s+(\S+)", line)
        if match:
            soft[match[1]] = float("inf") if match[2] == "unlimited" else float(match[2])
    if soft.get("open files", 65536) < (65536 if host.gpus.names else 1024):
        yield finding("few_files", count=soft["open files"])
    if soft.get("locked memory", float("inf")) < 64 * _GIB and fabric.devices(host):
        yield finding("locked_memory", mib=soft["locked memory"] / 2**20)
    if soft.get("processes", 4096) < 4096:
        yield finding("few_processes", count=soft["processes"])
    if soft:
        yield finding("limits")


def shared_memory(host: Host) -> Iterator[Finding]:
    """Check that /dev/shm is large enough for the ranks."""
    path = host.root / "dev/shm"
    gpus = len(host.gpus.names)
    # NCCL's ring buffers need the first size; the second one leaves room for data loaders.
    if gpus > 1:
        least = gpus * _GIB // 8
    else:
        least = _GIB // 32
    if gpus:
        good = 8 * _GIB
    else:
        good = _GIB // 32
    if not path.is_dir():
        yield finding("no_shm")
        return
    total, free = host.bytes_of(path)
    if total < least:
        name = "small_shm"
    elif free < least:
        name = "full_shm"
    else:
        name = "modest_shm" if total < good else "shm"
    yield finding(name, total=total / _GIB, free=free / _GIB, ranks=gpus or 1, least=least / _GIB)


def disk(host: Host) -> Iterator[Finding]:
    """Check the free space of the output folder."""
    _, free = host.bytes_of(host.output)
    if free < _GIB:
        name = "full_disk"
    else:
        name = "disk"
        if free < 20 * _GIB and host.gpus.names:
            name = "small_disk"
    yield finding(name, folder=host.output, free=free / _GIB)


def container(host: Host) -> Iterator[Finding]:
    """Check the memory, CPU and process limits of the control group."""
    gpus = len(host.gpus.names)
    memory = host.number("sys/fs/cgroup/memory.max") or host.number(
        "sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    ranks = max(1, gpus)
    if memory is not None and memory < (32 if gpus else 1) * ranks * _GIB:
        tight: Level = "failed" if memory < ranks * _GIB else "slow"
        yield finding(
            "little_memory", level=tight, gib=memory / _GIB, ranks=ranks, advised=32 * ranks
        )
    quota = host.text("sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[0]) / int(quota[1]) < max(1, 2 * gpus):
        yield finding("few_cpus", count=int(quota[0]) / int(quota[1]))
    pids = host.number("sys/fs/cgroup/pids.max")
    if pids is not None and pids < 4096:
        yield finding("few_pids", count=pids)
    yield finding("container")


def health(host: Host) -> Iterator[Finding]:
    """Check AMD's GPUs for ECC errors, retired pages, PCIe links, memory in use and XGMI links."""
    devices = [
        path
        for path in host.glob("sys/class/drm/renderD*/device")
        if host.text(path / "vendor") in ("", _AMD)
    ]
    if host.gpus.vendor != "amd" or not devices:
        yield finding("no_health", vendor=host.gpus.vendor)
        return
    for number, card in enumerate(devices):
        yield from _card(host, card, f"GPU {number}")
    yield from _links(host)
    yield finding("health", gpus=len(devices))


def _links(host: Host) -> Iterator[Finding]:
    links = [
        [properties(link / "properties") for link in gpu.glob("io_links/*")]
        for gpu in kfd_gpus(host.root)
    ]
    counts = [
        sum(link.get("type") == _XGMI and link.get("weight") != "0" for link in each)
        for each in links
    ]
    if any(counts) and min(counts) < len(counts) - 1:
        yield finding(
            "few_links", gpu=counts.index(min(counts)), links=min(counts), of=len(counts) - 1
        )


def _card(host: Host, card: Path, name: str) -> Iterator[Finding]:
    for block in sorted((card / "ras").glob("*_err_count")):
        errors = dict(re.findall(r"(ue|ce):\s*(\d+)", host.text(block)))
        if int(errors.get("ue", 0)):
            yield finding("uncorrected", gpu=name, count=errors["ue"], block=block.name)
        elif int(errors.get("ce", 0)) > 1000:
            yield finding("corrected", gpu=name, count=errors["ce"], block=block.name)
    pages = host.text(card / "ras/gpu_vram_bad_pages").splitlines()
    if pages:
        yield finding("retired_pages", gpu=name, count=len(pages))
    for what in ("speed", "width"):
        now = host.text(card / f"current_link_{what}")
        most = host.text(card / f"max_link_{what}")
        if now and most and _leading(now) < _leading(most):
            yield finding("pcie_link", gpu=name, what=what, now=now, most=most)
    used = host.text(card / "mem_info_vram_used")
    total = host.text(card / "mem_info_vram_total")
    if used.isdigit() and total.isdigit() and int(used) > 0.05 * int(total):
        full: Level = "failed" if int(used) > 0.5 * int(total) else "slow"
        yield finding(
            "used_memory", level=full, gpu=name, used=int(used) / _GIB, total=int(total) / _GIB
        )


def _leading(text: str) -> float:
    match = re.match(r"[\d.]+", text)
    if match:
        return float(match[0])
    return 0.0


def known_issues(host: Host) -> Iterator[Finding]:
    """Name what is known to be wrong with this image's versions on this GPU."""
    for issue in host.issues(host.gpus.generation):
        yield finding("refused_issue" if issue.severity == "refuse" else "issue", issue=issue)


# Checks that do not apply to a job on one machine.
OF_SEVERAL_NODES = (
    "RDMA",
    "RDMA rights",
    "RDMA firmware",
    "RDMA libraries",
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
    visible,
    driver,
    shared_memory,
    disk,
    limits,
    container,
    health,
    settings,
    fabric.rdma,
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
            continue
        try:
            results = [*check(host)]
        except (OSError, ValueError) as error:
            # A file of the kernel may vanish while it is read, or hold what no other driver writes.
            why = getattr(error, "strerror", None) or error
            results = [finding("unreadable", check=check.__name__.replace("_", " "), why=why)]
        # A check that finds no problem ends with a sentence that says so.
        bad = any(result.problem for result in results)
        findings += [result for result in results if not bad or result.level != "ok"]
    return findings


def expected(host: Host, gpus: int | None, gpu: str | None, nics: int | None) -> Iterator[Finding]:
    """Check the numbers of GPUs and RDMA devices, and the generation of the GPUs, if they are not
    None.

    A machine without a GPU is a problem unless ``gpus`` is 0: nothing shows that a job on GPUs
    would run.
    """
    there = host.gpus.names
    cards = fabric.devices(host)
    if not there and gpus is None:
        yield finding("expected_gpu")
    if gpus is not None and len(there) != gpus:
        yield finding("expected_gpus", there=len(there), gpus=gpus)
    if gpu is not None and there and host.gpus.generation != gpu:
        yield finding("expected_generation", there=host.gpus.sentence(), gpu=gpu)
    if nics is not None and len(cards) != nics:
        names = ", ".join(card.name for card in cards) or "none"
        yield finding("expected_nics", there=len(cards), nics=nics, names=names)


def disk_speed(folder: Path, megabytes: int = 256) -> Finding:
    """Measure the speed of writing and syncing a file in ``folder``, which is the speed of a
    checkpoint.
    """
    started = time.monotonic()
    size = 0.0
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            while size < megabytes and time.monotonic() - started < 10:
                size += file.write(bytes(2**20)) / 2**20
            os.fsync(file.fileno())
        rate = size / max(time.monotonic() - started, 1e-6)
    except OSError as error:
        return finding("unwritable", folder=folder, why=(error.strerror or "").lower())
    return finding("slow_disk" if rate < 100 else "disk_speed", folder=folder, rate=rate)
