"""This machine: whether its GPUs and memory suffice for a job, and the energy that its GPUs use."""

import ctypes
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from primus_images.files import text_if_readable
from primus_images.gpus.detect import Found, detect, memory_bytes
from primus_images.gpus.table import arch_of, generation
from primus_images.recipes.architecture import readable, size
from primus_images.recipes.choose import CPU
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import gpu_bytes, largest_batch, predict
from primus_images.refusals import refusal
from primus_images.training.run.logs import Meter

_SHOW = "--dry-run shows the job"
_SMALL = "--proxy trains a small model instead"
# A CPU emulates FP8, with other settings than a GPU.
_ON_CPU = ("fp32", "bf16")


def check(
    recipe: Recipe, root: Path = Path("/"), *, force: bool = False, memory: float | None = None
) -> None:
    """Raise HostError if this machine (files below ``root``) lacks the recipe's GPUs or memory.

    ``force`` skips the check of predicted activations. A proxy for a GPU can also run on the CPU. GPUs that are not in
    the table are taken for the recipe's, with the ``memory`` of :func:`unlisted_memory`.
    """
    gpus, there = detect(root), memory or gpu_bytes(recipe.gpu)
    on_cpu = recipe.gpu == CPU or not gpus.names
    if recipe.gpu != CPU:
        _check_gpus(recipe, gpus)
    _check_memory(recipe, None if on_cpu else there, root)
    if not on_cpu and not force:
        _check_activations(recipe, there or math.inf)


def check_prediction(recipe: Recipe) -> None:
    """Raise HostError if ``check`` would refuse the predicted memory on the recipe's GPU, whatever this machine has."""
    if there := gpu_bytes(recipe.gpu):
        _check_memory(recipe, there, anyway="--force submits it anyway")
        _check_activations(recipe, there)


def unlisted_memory(root: Path = Path("/")) -> float | None:
    """Return the bytes of this machine's smallest GPU if its GPUs are not in the table, otherwise None."""
    gpus = detect(root)
    return memory_bytes(root) if gpus.names and not gpus.generation else None


def _check_gpus(recipe: Recipe, gpus: Found) -> None:
    expected = generation(recipe.gpu)
    if not gpus.names:
        if not recipe.get("proxy", bool):
            raise refusal("no_gpu", title=expected.title)
        if recipe.precision not in _ON_CPU:
            raise refusal("no_gpu_for_precision", precision=recipe.precision, title=expected.title)
        return
    if gpus.vendor != arch_of(expected).vendor or (
        gpus.generation and gpus.generation != expected.name
    ):
        way = f"--gpu {gpus.generation} resolves the recipe for it" if gpus.generation else _SHOW
        raise refusal("another_gpu", title=expected.title, gpus=gpus.sentence(), way=way)
    ranks = recipe.get("ranks", int)
    if gpus.generation and ranks > len(gpus.names):
        raise refusal("few_gpus", ranks=ranks, gpus=gpus.sentence(), count=len(gpus.names))


def _check_memory(
    recipe: Recipe, gpu_has: float | None, root: Path = Path("/"), anyway: str = _SHOW
) -> None:
    per_rank = predict(recipe).states
    if gpu_has is None:
        needed, there, what = per_rank * recipe.get("ranks", int), host_bytes(root), "this machine"
    else:
        needed, there, what = per_rank, gpu_has, _gpu_with(gpu_has, recipe)
    if there and needed > there:
        proxy = recipe.get("proxy", bool)
        way = (
            "fewer model.layers, or more nodes; "
            if proxy
            else f"more ranks or nodes share them; {_SMALL}, "
        )
        raise refusal(
            "small_memory",
            count=readable(size(recipe.architecture).total),
            needed=needed / 2**30,
            what=what,
            ranks="per rank" if gpu_has is not None else "on all ranks here",
            there=there / 2**30,
            way=way + anyway,
        )


def _gpu_with(memory: float, recipe: Recipe) -> str:
    return (
        generation(recipe.gpu).title if memory == gpu_bytes(recipe.gpu) else "a GPU of this machine"
    )


def _check_activations(recipe: Recipe, there: float) -> None:
    needed = predict(recipe).least
    if needed * (1 - recipe.knows.memory_error) <= there:
        return
    fits = largest_batch(recipe, there)
    batch = recipe.knows.keys["local_batch"]
    raise refusal(
        "large_batch",
        batch=recipe.local_batch,
        needed=needed / 2**30,
        what=_gpu_with(there, recipe),
        there=there / 2**30,
        way=f"{batch}={fits} fits" if fits else "more nodes, or recomputed activations, need less",
    )


def host_bytes(root: Path = Path("/")) -> float:
    """Return the bytes of memory of this machine, or a lower limit of this process's control group; 0 if unknown."""
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
    """Return a function that reads the joules used since a fixed time: the mean of the job's ``ranks`` GPUs.

    Returns None if there is no GPU or no counter, or if it is unknown which GPUs of this machine the job uses.
    """
    return None if gpu == CPU else _nvidia(ranks, environment) or _amd(ranks, root)


def _nvidia(ranks: int, environment: Mapping[str, str]) -> Meter | None:
    try:  # the library comes with the driver; its counter is in millijoules
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    words = (
        [str(number) for number in range(count.value)] if visible is None else visible.split(",")
    )

    def joules(word: str) -> float | None:
        handle, used = ctypes.c_void_p(), ctypes.c_ulonglong()
        error = (
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(word)), ctypes.byref(handle))
            if word.isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(word.encode(), ctypes.byref(handle))
        ) or nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used))
        return None if error else used.value / 1e3

    return _mean([partial(joules, word.strip()) for word in words[:ranks]], ranks)


def _amd(ranks: int, root: Path) -> Meter | None:
    # The kernel's counters are in microjoules. A container sees all cards, so there must be one for each rank.
    files = [
        file
        for card in sorted((root / "sys/class/drm").glob("card[0-9]*"))
        if text_if_readable(card / "device/vendor").strip() == _AMD
        for file in sorted((card / "device/hwmon").glob("*/energy1_input"))
    ]

    def joules(file: Path) -> float | None:
        word = text_if_readable(file).strip()
        return int(word) / 1e6 if word.isdigit() else None

    return _mean([partial(joules, file) for file in files], ranks)


def _mean(counters: Sequence[Meter], ranks: int) -> Meter | None:
    def read() -> float | None:
        values = [value for counter in counters if (value := counter()) is not None]
        return sum(values) / ranks if len(values) == ranks else None

    return read if len(counters) == ranks and read() is not None else None
