"""This machine: whether its GPUs and memory suffice for a job."""

import re
from collections.abc import Iterator
from pathlib import Path

from primus_images.errors import HostError
from primus_images.files import text_if_readable
from primus_images.gpus.detect import DetectedGpus, detect, memory_bytes
from primus_images.gpus.table import arch_of, generation
from primus_images.recipes.architecture import readable, size
from primus_images.recipes.choose import CPU
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import gpu_bytes, largest_batch, predict

_GIB = 2**30
_SHOW = "--dry-run shows the job"
_SHOW_LARGE = "--dry-run --force shows the job"
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
    if recipe.gpu != CPU:
        _check_gpus(recipe, gpus)
    if recipe.gpu == CPU or not gpus.names:
        _check_memory_of_host(recipe, root)
        return
    there = memory or gpu_bytes(recipe.gpu)
    if there is None:
        return
    _check_memory_of_gpu(recipe, there)
    if not force:
        _check_activations(recipe, there, "--force starts it anyway")


def check_prediction(recipe: Recipe, *, anyway: str = "--force starts it anyway") -> None:
    """Raise HostError if ``check`` would refuse the predicted memory on the recipe's GPU, whatever
    this machine has.

    ``anyway`` is how the caller goes on without this check.
    """
    there = gpu_bytes(recipe.gpu)
    if there:
        _check_memory_of_gpu(recipe, there, anyway)
        _check_activations(recipe, there, anyway)


def unlisted_memory(root: Path = Path("/")) -> float | None:
    """Return the bytes of this machine's smallest GPU if its GPUs are not in the table, otherwise
    None.
    """
    gpus = detect(root)
    if gpus.names and not gpus.generation:
        return memory_bytes(root)
    return None


def _check_gpus(recipe: Recipe, gpus: DetectedGpus) -> None:
    expected = generation(recipe.gpu)
    if not gpus.names:
        _check_without_gpu(recipe, expected.title)
        return
    other = gpus.generation and gpus.generation != expected.name
    if other or gpus.vendor != arch_of(expected).vendor:
        hint = _SHOW
        if gpus.generation:
            hint = f"--gpu {gpus.generation} resolves the recipe for it"
        raise HostError(
            f"the job is for {expected.title}, and this machine has {gpus.sentence()}", hint=hint
        )
    ranks = recipe.get("ranks", int)
    if gpus.generation and ranks > len(gpus.names):
        raise HostError(
            f"the job starts {ranks} ranks on each machine, and this one has "
            f"{gpus.sentence()}: a rank needs one GPU",
            hint=f"ranks={len(gpus.names)}, or a machine with {ranks} GPUs",
        )


def _check_without_gpu(recipe: Recipe, expected: str) -> None:
    if not recipe.get("proxy", bool):
        raise HostError(
            f"there is no GPU on this machine, and the job is for {expected}",
            hint=f"{_SMALL}, {_SHOW}",
        )
    if recipe.precision not in _ON_CPU:
        raise HostError(
            f"there is no GPU on this machine, and a CPU does not compute {recipe.precision} as "
            f"{expected} does",
            hint="--gpu cpu resolves the proxy for the CPU",
        )


def _check_memory_of_host(recipe: Recipe, root: Path) -> None:
    needed = predict(recipe).states * recipe.get("ranks", int)
    there = host_bytes(root)
    if there and needed > there:
        raise HostError(
            f"{_states(recipe, needed)} on all ranks here, and this machine has "
            f"{there / _GIB:,.0f} GiB",
            hint=_way_to_smaller_states(recipe, _SHOW),
        )


def _check_memory_of_gpu(recipe: Recipe, there: float, anyway: str = _SHOW_LARGE) -> None:
    needed = predict(recipe).states
    if needed > there:
        raise HostError(
            f"{_states(recipe, needed)} per rank, and {_gpu_with(there, recipe)} has "
            f"{there / _GIB:,.0f} GiB",
            hint=_way_to_smaller_states(recipe, anyway),
        )


def _states(recipe: Recipe, needed: float) -> str:
    count = readable(size(recipe.architecture).total)
    return (
        f"weights, gradients and optimizer states of {count} parameters need at least "
        f"{needed / _GIB:,.0f} GiB"
    )


def _way_to_smaller_states(recipe: Recipe, anyway: str) -> str:
    if recipe.get("proxy", bool):
        return f"fewer model.layers, or more nodes; {anyway}"
    return f"more ranks or nodes share them; {_SMALL}, {anyway}"


def _gpu_with(memory: float, recipe: Recipe) -> str:
    if memory == gpu_bytes(recipe.gpu):
        return generation(recipe.gpu).title
    return "a GPU of this machine"


def _check_activations(recipe: Recipe, there: float, anyway: str) -> None:
    needed = predict(recipe).least
    if needed * (1 - recipe.knows.memory_error) <= there:
        return
    way = "more nodes, or recomputed activations, need less"
    fits = largest_batch(recipe, there)
    if fits:
        way = f"{recipe.knows.keys['local_batch']}={fits} fits"
    raise HostError(
        f"a micro batch of {recipe.local_batch} needs about {needed / _GIB:,.0f} GiB per "
        f"rank, and {_gpu_with(there, recipe)} has {there / _GIB:,.0f} GiB",
        hint=f"{way}; `primus fit` shows every term; {anyway}",
    )


def host_bytes(root: Path = Path("/")) -> float:
    """Return the bytes of memory that this process may use; 0 if unknown.

    They are those of this machine, or the lowest limit of this process's control groups, such as
    those of a container or of a Slurm job.
    """
    limits = []
    total = re.search(
        r"^MemTotal: *(\d+) kB", text_if_readable(root / "proc/meminfo"), re.MULTILINE
    )
    if total:
        limits.append(float(total[1]) * 1024)
    for file in _limit_files(root):
        limit = text_if_readable(file).strip()
        if limit.isdigit():
            limits.append(float(limit))
    return min(limits, default=0.0)


def _limit_files(root: Path) -> Iterator[Path]:
    """Yield the files that may limit the memory of this process's control groups, and of those
    that these are in.
    """
    groups = root / "sys/fs/cgroup"
    yield groups / "memory.max"
    yield groups / "memory/memory.limit_in_bytes"
    for line in text_if_readable(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        path = Path(name.strip("/"))
        for group in (path, *path.parents):
            if not controllers:
                yield groups / group / "memory.max"
            elif "memory" in controllers.split(","):
                yield groups / "memory" / group / "memory.limit_in_bytes"
