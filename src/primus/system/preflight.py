"""Checks of a machine before a job. Each reads the kernel's files, and names the problem and its remedy."""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from primus.gpus.detect import properties
from primus.system import fabric
from primus.system.host import IMAGE_FILE, Finding, Host, failed, ok, skipped, slow
from primus.yamlfile import read_values

_GIB = 2**30
_AMD, _NVIDIA = "0x1002", "0x10de"
# PCI classes: processing accelerators, and display controllers that only compute.
_COMPUTE = ("0x1200", "0x0302", "0x0380")
_XGMI = "11"
_OF_CONTAINERS = (".dockerenv", "run/.containerenv", IMAGE_FILE.relative_to("/"))
_NO_GPU = "no GPU on this machine"


def present(host: Host) -> Iterator[Finding]:
    """Check that GPUs are present, and that all have a driver."""
    makers = {path: host.text(path / "vendor") for path in host.glob("sys/bus/pci/devices/*")
              if host.text(path / "class")[:6] in _COMPUTE}  # fmt: skip
    devices = [path for path, maker in makers.items() if maker in (_AMD, _NVIDIA)]
    # The driver is also bound for GPUs of the host that this container does not see.
    unbound = [makers[path] for path in devices if not (path / "driver").exists()]
    names, bus = host.gpus.names, len(devices)
    if unbound:
        module = "amdgpu" if _AMD in unbound else "nvidia"
        remedy = f"sudo modprobe {module}; sudo dmesg | grep -i -e amdgpu -e NVRM tells why it failed"
        yield failed("gpus", f"{len(unbound)} of {bus} GPUs on the PCI bus have no driver", remedy)
    elif not names and bus:
        message = f"{bus} GPUs have a driver, and none can be used for computing"
        yield failed("gpus", message, "sudo dmesg | grep -i kfd")
    elif bus > len(names) and not any((host.root / name).exists() for name in _OF_CONTAINERS):
        message = f"{bus} GPUs are on the PCI bus, and {len(names)} can be used"
        yield failed("gpus", message, "sudo dmesg | grep -i kfd tells why; reboot, or reset the GPU")
    elif not names:
        yield skipped("gpus", _NO_GPU)


def one_generation(host: Host) -> Iterator[Finding]:
    """Check that all GPUs are whole, and of one generation in the table."""
    names = host.gpus.names
    if len(set(names)) > 1:
        message = f"the GPUs differ: {host.gpus.sentence()}"
        yield failed("one generation", message, "choose equal ones with HIP_VISIBLE_DEVICES")
    elif any(name.startswith("part of") for name in names):
        yield slow("one generation", names[0], "sudo amd-smi set --compute-partition SPX makes each GPU whole")
    elif names and not host.gpus.generation:
        yield skipped("one generation", f"{names[0]}: no table knows it, and no limit is known for it")
    elif names:
        yield ok("one generation", host.gpus.sentence())


def rights(host: Host) -> Iterator[Finding]:
    """Check that the user may open the GPUs' devices."""
    gpus, option = host.gpus, "--gpus all"
    if gpus.vendor == "amd":
        option = "--device /dev/kfd --device /dev/dri"
        needed = [host.root / "dev/kfd", *host.glob("dev/dri/renderD*")]
        if len(needed) - 1 < len(gpus.names):
            message = f"{len(needed) - 1} of {len(gpus.names)} GPUs have a /dev/dri/renderD device"
            yield failed("device rights", message, f"start the container with {option}")
    else:
        needed = [host.root / name for name in ("dev/nvidiactl", "dev/nvidia-uvm")]
    path = next((path for path in needed if not os.access(path, os.R_OK | os.W_OK)), None)
    if path is None:
        yield ok("device rights", f"{len(needed)} devices can be opened")
    elif not path.exists():
        yield failed("device rights", f"{host.shown(path)} is missing", f"start the container with {option}")
    else:
        group = path.stat().st_gid
        remedy = f"add the user to group {group}: sudo usermod -aG render,video USER, or --group-add {group}"
        yield failed("device rights", f"{host.shown(path)} cannot be opened by user {os.geteuid()}", remedy)


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
            what = f"GPU {wrong[0]}, and there are {len(host.gpus.names)}" if wrong else "no GPU"
            yield failed("visible GPUs", f"{name}={text} names {what}", f"unset {name}, or name GPUs from 0")
    if len({tuple(words) for words in chosen.values()}) > 1:
        pairs = ", ".join(f"{name}={','.join(words)}" for name, words in chosen.items())
        yield slow("visible GPUs", f"several variables choose GPUs, each among those of the other: {pairs}", "keep one")


def amdgpu_drivers(rocm: str) -> list[str]:
    """Return the versions of the kernel driver that support this ROCm, of those in the table."""
    release = ".".join(rocm.split(".")[:2])
    return [version for version, row in _table("drivers.yaml")["amdgpu"].items() if release in row["supports"]]


def _table(name: str) -> dict[str, Any]:
    return cast(dict[str, Any], read_values(Path(__file__).with_name(name)).data)


def driver(host: Host) -> Iterator[Finding]:
    """Check that the kernel's driver supports the ROCm in use."""
    if host.gpus.vendor != "amd":
        yield skipped("driver", f"{host.gpus.vendor}: the table has AMD's drivers only")
        return
    table, version = _table("drivers.yaml"), host.text("sys/module/amdgpu/version")
    rocm = host.text("opt/rocm/.info/version") or host.components().get("rocm", "")
    row, supporting = table["amdgpu"].get(version), amdgpu_drivers(rocm)
    if row is None or not supporting:
        what = f"amdgpu {version or 'of the kernel'}" if row is None else f"ROCm {rocm or 'of unknown version'}"
        yield skipped("driver", f"the table has no row for {what}")
    elif version not in supporting:
        message = f"amdgpu {version} is of ROCm {row['rocm']} ({row['source']}); it does not support ROCm {rocm}"
        remedy = "install the driver of a nearer release, or use another image"
        yield failed("driver", f"{message} ({table['source']})", remedy)
    else:
        yield ok("driver", f"amdgpu {version} supports ROCm {rocm} ({table['source']})")


def settings(host: Host) -> Iterator[Finding]:
    """Check the settings of the kernel and its drivers in ``settings.yaml``."""
    for row in _table("settings.yaml")["settings"]:
        wrong = {host.text(path) for path in host.glob(row["file"])} - {""}
        wrong = {text for text in wrong if re.search(row["wrong"], text)}
        if wrong and ("with" not in row or host.glob(row["with"])):
            yield slow(row["check"], row["message"].format(", ".join(sorted(wrong))), row["remedy"])
    yield ok("host settings", "the kernel's settings suit GPUs")


def limits(host: Host) -> Iterator[Finding]:
    """Check the limits for open files, locked memory and processes."""
    soft: dict[str, float] = {}
    for line in host.text("proc/self/limits").splitlines():
        if match := re.match(r"Max (open files|locked memory|processes)\s+(\S+)", line):
            soft[match[1]] = float("inf") if match[2] == "unlimited" else float(match[2])
    if soft.get("open files", 65536) < (65536 if host.gpus.names else 1024):
        allowed = f"only {soft['open files']:.0f} open files are allowed"
        yield slow("ulimits", allowed, "ulimit -n 65536, or --ulimit nofile=65536")
    if soft.get("locked memory", float("inf")) < 64 * _GIB and fabric.devices(host):
        locked = f"only {soft['locked memory'] / 2**20:,.0f} MiB can be locked, and RDMA locks its buffers"
        yield failed("locked memory", locked, "ulimit -l unlimited, or --ulimit memlock=-1")
    if soft.get("processes", 4096) < 4096:
        yield failed("ulimits", f"only {soft['processes']:.0f} processes are allowed", "ulimit -u 65536")
    if soft:
        yield ok("ulimits", "open files, locked memory and processes suffice")


def shared_memory(host: Host) -> Iterator[Finding]:
    """Check that /dev/shm is large enough for the ranks."""
    path, gpus = host.root / "dev/shm", len(host.gpus.names)
    # NCCL's ring buffers need the first size; the second one leaves room for data loaders.
    least, good = gpus * _GIB // 8 if gpus > 1 else _GIB // 32, 8 * _GIB if gpus else _GIB // 32
    remedy = "--shm-size 16g, or sudo mount -o remount,size=64g /dev/shm"
    if not path.is_dir():
        yield failed("/dev/shm", "it is missing", "mount a tmpfs on it, or --shm-size 16g")
        return
    total, free = host.bytes_of(path)
    if total < least:
        message = f"it has {total / _GIB:.2f} GiB, and {gpus or 1} ranks need {least / _GIB:.2g}"
        yield failed("/dev/shm", message, remedy)
    elif free < least:
        yield failed("/dev/shm", f"only {free / _GIB:.2f} of {total / _GIB:.2f} GiB are free", "delete old files in it")
    elif total < good:
        yield slow("/dev/shm", f"it has {total / _GIB:.2f} GiB, and 8 are advised", remedy)
    else:
        yield ok("/dev/shm", f"{free / _GIB:.1f} GiB free")


def disk(host: Host) -> Iterator[Finding]:
    """Check the free space of the output folder."""
    _, free = host.bytes_of(host.output)
    if free < _GIB:
        message = f"{host.output} has {free / _GIB:.2f} GiB free"
        yield failed("disk", message, "free some space, or choose another folder")
    elif free < 20 * _GIB and host.gpus.names:
        message = f"{host.output} has {free / _GIB:.1f} GiB free, less than a checkpoint may take"
        yield slow("disk", message, "free some space")
    else:
        yield ok("disk", f"{free / _GIB:,.0f} GiB free in {host.output}")


def container(host: Host) -> Iterator[Finding]:
    """Check the memory, CPU and process limits of the control group."""
    gpus = len(host.gpus.names)
    memory = host.number("sys/fs/cgroup/memory.max") or host.number("sys/fs/cgroup/memory/memory.limit_in_bytes")
    ranks = max(1, gpus)
    if memory is not None and memory < (32 if gpus else 1) * ranks * _GIB:
        report = failed if memory < ranks * _GIB else slow
        limit = f"memory is limited to {memory / _GIB:.1f} GiB for {ranks} ranks"
        yield report("container limits", limit, f"raise --memory to {32 * ranks}g")
    quota = host.text("sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[0]) / int(quota[1]) < max(1, 2 * gpus):
        time_limit = f"CPU time is limited to {int(quota[0]) / int(quota[1]):.1f} CPUs"
        yield slow("container limits", time_limit, "raise --cpus")
    pids = host.number("sys/fs/cgroup/pids.max")
    if pids is not None and pids < 4096:
        yield failed("container limits", f"only {pids} processes are allowed", "raise --pids-limit")
    yield ok("container limits", "none that matters")


def health(host: Host) -> Iterator[Finding]:
    """Check AMD's GPUs for ECC errors, retired pages, PCIe links, memory in use and XGMI links."""
    devices = [path for path in host.glob("sys/class/drm/renderD*/device") if host.text(path / "vendor") in ("", _AMD)]
    if host.gpus.vendor != "amd" or not devices:
        yield skipped("GPU health", f"{host.gpus.vendor}: the driver names no such file")
        return
    for number, card in enumerate(devices):
        yield from _card(host, card, f"GPU {number}")
    yield from _links(host)
    yield ok("GPU health", f"{len(devices)} GPUs: no uncorrected errors, links are full")


def _links(host: Host) -> Iterator[Finding]:
    nodes = host.glob("sys/class/kfd/kfd/topology/nodes/*")
    gpus = [node for node in nodes if int(properties(node / "properties").get("simd_count", "0")) > 0]
    links = [[properties(link / "properties") for link in gpu.glob("io_links/*")] for gpu in gpus]
    counts = [sum(link.get("type") == _XGMI and link.get("weight") != "0" for link in each) for each in links]
    if any(counts) and min(counts) < len(counts) - 1:
        message = f"GPU {counts.index(min(counts))} has {min(counts)} of {len(counts) - 1} links to other GPUs"
        yield failed("XGMI", message, "reboot; if it stays so, the board needs service")


def _card(host: Host, card: Path, name: str) -> Iterator[Finding]:
    for block in sorted((card / "ras").glob("*_err_count")):
        errors = dict(re.findall(r"(ue|ce):\s*(\d+)", host.text(block)))
        if int(errors.get("ue", 0)):
            message = f"{name}: {errors['ue']} uncorrected errors ({block.name})"
            yield failed("ECC", message, "take the GPU out of use and reset it")
        elif int(errors.get("ce", 0)) > 1000:
            message = f"{name}: {errors['ce']} corrected errors ({block.name})"
            yield slow("ECC", message, "watch it; many point to failing memory")
    if pages := host.text(card / "ras/gpu_vram_bad_pages").splitlines():
        message = f"{name}: {len(pages)} memory pages are retired"
        yield failed("ECC", message, "reboot the machine; if they grow, replace the GPU")
    for what in ("speed", "width"):
        now, most = host.text(card / f"current_link_{what}"), host.text(card / f"max_link_{what}")
        if now and most and _leading(now) < _leading(most):
            yield slow("PCIe link", f"{name}: {what} {now}, of {most}", "reseat the board, or check the BIOS")
    used, total = host.text(card / "mem_info_vram_used"), host.text(card / "mem_info_vram_total")
    if used.isdigit() and total.isdigit() and int(used) > 0.05 * int(total):
        report = failed if int(used) > 0.5 * int(total) else slow
        message = f"{name}: {int(used) / _GIB:.1f} of {int(total) / _GIB:.1f} GiB are in use already"
        yield report("GPU memory", message, "amd-smi process shows by what; end it")


def _leading(text: str) -> float:
    match = re.match(r"[\d.]+", text)
    return float(match[0]) if match else 0.0


def known_issues(host: Host) -> Iterator[Finding]:
    """Name what is known to be wrong with this image's versions on this GPU."""
    for issue in host.issues(host.gpus.generation):
        if issue.severity == "refuse":
            yield failed("known issues", str(issue), "use another image")
        else:
            yield skipped("known issues", str(issue))


# Checks that do not apply to a job on one machine.
OF_SEVERAL_NODES = ("RDMA", "RDMA rights", "RDMA firmware", "RDMA libraries", "network", "locked memory")
# Checks of GPUs, which are skipped without any.
_OF_GPUS = {rights: "device rights", driver: "driver", health: "GPU health", settings: "host settings"}
# In the order of the report: problems that stop a job come first.
CHECKS: tuple[Callable[[Host], Iterable[Finding]], ...] = (
    present, one_generation, rights, visible, driver, shared_memory, disk, limits, container, health, settings,
    fabric.rdma, fabric.libraries, fabric.interface, known_issues,
)  # fmt: skip


def preflight(host: Host) -> list[Finding]:
    """Run every check on ``host``, in order. Reads files only, in well under a second."""
    findings: list[Finding] = []
    for check in CHECKS:
        if check in _OF_GPUS and not host.gpus.names:
            findings.append(skipped(_OF_GPUS[check], _NO_GPU))
            continue
        try:
            results = [*check(host)]
        except (OSError, ValueError) as error:
            # A file of the kernel may vanish while it is read, or hold what no other driver writes.
            why = getattr(error, "strerror", None) or error
            results = [skipped(check.__name__.replace("_", " "), f"this machine's files cannot be read: {why}")]
        # A check that finds no problem ends with a sentence that says so.
        bad = any(finding.problem for finding in results)
        findings += [finding for finding in results if not bad or finding.level != "ok"]
    return findings


def expected(host: Host, gpus: int | None, gpu: str | None, nics: int | None) -> Iterator[Finding]:
    """Check the numbers of GPUs and RDMA devices, and the generation of the GPUs, if they are not None.

    A machine without a GPU is a problem unless ``gpus`` is 0: nothing shows that a job on GPUs would run.
    """
    there, cards = host.gpus.names, fabric.devices(host)
    if not there and gpus is None:
        remedy = "start the container with the GPUs' devices; --expect 0 is for a machine that has none"
        yield failed("gpus", f"{_NO_GPU}, or its driver does not run", remedy)
    if gpus is not None and len(there) != gpus:
        remedy = "sudo dmesg | grep -i -e amdgpu -e NVRM; lspci shows the GPUs on the bus"
        yield failed("expected GPUs", f"{len(there)} of {gpus} can be used", remedy)
    if gpu is not None and there and host.gpus.generation != gpu:
        yield failed("expected GPUs", f"{host.gpus.sentence()}, not {gpu}", "leave the node out, or correct --gpu")
    if nics is not None and len(cards) != nics:
        names = ", ".join(card.name for card in cards) or "none"
        remedy = "sudo dmesg | grep -i -e mlx5 -e bnxt -e ionic; lspci shows the devices on the bus"
        yield failed("expected RDMA", f"{len(cards)} of {nics} devices have a driver: {names}", remedy)


def disk_speed(folder: Path, megabytes: int = 256) -> Finding:
    """Measure the speed of writing and syncing a file in ``folder``, which is the speed of a checkpoint."""
    started, size = time.monotonic(), 0.0
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            while size < megabytes and time.monotonic() - started < 10:
                size += file.write(bytes(2**20)) / 2**20
            os.fsync(file.fileno())
        rate = size / max(time.monotonic() - started, 1e-6)
    except OSError as error:
        return failed("disk speed", f"{folder}: {(error.strerror or '').lower()}", "choose another folder")
    if rate < 100:
        return slow("disk speed", f"{folder} takes {rate:.0f} MB/s", "write checkpoints to a faster file system")
    return ok("disk speed", f"{folder} takes {rate:,.0f} MB/s")
