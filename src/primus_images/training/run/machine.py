"""This machine: whether its GPUs and memory suffice for a job, and the energy that its GPUs use."""

import ctypes
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from primus_images.errors import HostError
from primus_images.files import text_if_readable
from primus_images.gpus.detect import Found, detect, memory_bytes
from primus_images.gpus.table import arch_of, generation
from primus_images.recipes.architecture import readable, size
from primus_images.recipes.choose import CPU
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import gpu_bytes, largest_batch, predict
from primus_images.training.run.logs import Meter

_SHOW = "--dry-run shows the job"
_SMALL = "--proxy trains a small model instead"
# A CPU emulates FP8, with other settings than a GPU.
_ON_CPU = ("fp32", "bf16")


def check(
    recipe: Recipe, root: Path = Path("/"), *, force: bool = False, memory: float | None = None
) -> None:
    """Raise HostError if this machine (files below ``root``) lacks the recipe's GPUs or memory.

    ``force`` skips the check of predicted activations. A proxy for a GPU can also run on the CPU.
    GPUs that are not in the table are taken for the recipe's, with the ``memory`` of
    :func:`unlisted_memory`.
    """
    gpus = detect(root)
    there = memory or gpu_bytes(recipe.gpu)
    on_cpu = recipe.gpu == CPU or not gpus.names
    if recipe.gpu != CPU:
        _check_gpus(recipe, gpus)
    _check_memory(recipe, None if on_cpu else there, root)
    if not on_cpu and not force:
        _check_activations(recipe, there or math.inf)


def check_prediction(recipe: Recipe) -> None:
    """Raise HostError if ``check`` would refuse the predicted memory on the recipe's GPU, whatever
    this machine has.
    """
    there = gpu_bytes(recipe.gpu)
    if there:
        _check_memory(recipe, there, anyway="--force submits it anyway")
        _check_activations(recipe, there)


def unlisted_memory(root: Path = Path("/")) -> float | None:
    """Return the bytes of this machine's smallest GPU if its GPUs are not in the table, otherwise
    None.
    """
    gpus = detect(root)
    if gpus.names and not gpus.generation:
        return memory_bytes(root)
    return None


def _check_gpus(recipe: Recipe, gpus: Found) -> None:
    expected = generation(recipe.gpu)
    if not gpus.names:
        if not recipe.get("proxy", bool):
            raise HostError(
                f"there is no GPU on this machine, and the job is for {expected.title}",
                hint="--proxy trains a small model instead, --dry-run shows the job",
            )
        if recipe.precision not in _ON_CPU:
            raise HostError(
                "there is no GPU on this machine, and a CPU does not compute "
                f"{recipe.precision} as {expected.title} does",
                hint="--gpu cpu resolves the proxy for the CPU",
            )
        return
    if gpus.vendor != arch_of(expected).vendor or (
        gpus.generation and gpus.generation != expected.name
    ):
        if gpus.generation:
            way = f"--gpu {gpus.generation} resolves the recipe for it"
        else:
            way = _SHOW
        raise HostError(
            f"the job is for {expected.title}, and this machine has {gpus.sentence()}", hint=way
        )
    ranks = recipe.get("ranks", int)
    if gpus.generation and ranks > len(gpus.names):
        raise HostError(
            f"the job starts {ranks} ranks on each machine, and this one has "
            f"{gpus.sentence()}: a rank needs one GPU",
            hint=f"ranks={len(gpus.names)}, or a machine with {ranks} GPUs",
        )


def _check_memory(
    recipe: Recipe, gpu_has: float | None, root: Path = Path("/"), anyway: str = _SHOW
) -> None:
    per_rank = predict(recipe).states
    if gpu_has is None:
        needed = per_rank * recipe.get("ranks", int)
        there = host_bytes(root)
        what = "this machine"
    else:
        needed = per_rank
        there = gpu_has
        what = _gpu_with(gpu_has, recipe)
    if there and needed > there:
        proxy = recipe.get("proxy", bool)
        if proxy:
            way = "fewer model.layers, or more nodes; "
        else:
            way = f"more ranks or nodes share them; {_SMALL}, "
        count = readable(size(recipe.architecture).total)
        needed_text = needed / 2**30
        ranks = "on all ranks here"
        if gpu_has is not None:
            ranks = "per rank"
        there_text = there / 2**30
        way_text = way + anyway
        raise HostError(
            f"weights, gradients and optimizer states of {count} parameters need at least "
            f"{needed_text:,.0f} GiB {ranks}, and {what} has {there_text:,.0f} GiB",
            hint=way_text,
        )


def _gpu_with(memory: float, recipe: Recipe) -> str:
    if memory == gpu_bytes(recipe.gpu):
        return generation(recipe.gpu).title
    return "a GPU of this machine"


def _check_activations(recipe: Recipe, there: float) -> None:
    needed = predict(recipe).least
    if needed * (1 - recipe.knows.memory_error) <= there:
        return
    fits = largest_batch(recipe, there)
    batch = recipe.knows.keys["local_batch"]
    needed_text = needed / 2**30
    there_text = there / 2**30
    way = "more nodes, or recomputed activations, need less"
    if fits:
        way = f"{batch}={fits} fits"
    raise HostError(
        f"a micro batch of {recipe.local_batch} needs about {needed_text:,.0f} GiB per "
        f"rank, and {_gpu_with(there, recipe)} has {there_text:,.0f} GiB",
        hint=f"{way}; `primus fit` shows every term; --force starts it anyway",
    )


def host_bytes(root: Path = Path("/")) -> float:
    """Return the bytes of memory of this machine, or a lower limit of this process's control group;
    0 if unknown.
    """
    limits = []
    with suppress(OSError, ValueError, IndexError):
        line = next(
            line
            for line in (root / "proc/meminfo").read_text().splitlines()
            if line.startswith("MemTotal:")
        )
        limits.append(float(line.split()[1]) * 1024)
    for group in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limits.append(float((root / group).read_text()))
    return min(limits, default=0.0)


_AMD = "0x1002"


def energy_meter(
    gpu: str, ranks: int, environment: Mapping[str, str], root: Path = Path("/")
) -> Meter | None:
    """Return a function that reads the joules used since a fixed time: the mean of the job's
    ``ranks`` GPUs.

    Returns None if there is no GPU or no counter, or if it is unknown which GPUs of this machine
    the job uses.
    """
    if gpu == CPU:
        return None
    return _nvidia(ranks, environment) or _amd(ranks, root)


def _nvidia(ranks: int, environment: Mapping[str, str]) -> Meter | None:
    try:  # the library comes with the driver; its counter is in millijoules
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        words = [str(number) for number in range(count.value)]
    else:
        words = visible.split(",")

    def joules(word: str) -> float | None:
        handle = ctypes.c_void_p()
        used = ctypes.c_ulonglong()
        error = (
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(word)), ctypes.byref(handle))
            if word.isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(word.encode(), ctypes.byref(handle))
        ) or nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used))
        if error:
            return None
        return used.value / 1e3

    return _mean([partial(joules, word.strip()) for word in words[:ranks]], ranks)


def _amd(ranks: int, root: Path) -> Meter | None:
    # The kernel's counters are in microjoules. A container sees all cards, so there must be one for
    # each rank.
    files = [
        file
        for card in sorted((root / "sys/class/drm").glob("card[0-9]*"))
        if text_if_readable(card / "device/vendor").strip() == _AMD
        for file in sorted((card / "device/hwmon").glob("*/energy1_input"))
    ]

    def joules(file: Path) -> float | None:
        word = text_if_readable(file).strip()
        if word.isdigit():
            return int(word) / 1e6
        return None

    return _mean([partial(joules, file) for file in files], ranks)


def _mean(counters: Sequence[Meter], ranks: int) -> Meter | None:
    def read() -> float | None:
        values = [value for counter in counters if (value := counter()) is not None]
        if len(values) == ranks:
            return sum(values) / ranks
        return None

    if len(counters) == ranks and read() is not None:
        return read
    return None
