"""What a validation runs on: the GPUs that its jobs get, and the proof that they ran there."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from primus_images.errors import HostError
from primus_images.gpus.detect import detect
from primus_images.gpus.table import Generation, by_product_name
from primus_images.recipes.recipe import Recipe
from primus_images.sandbox.container import Devices, gpus
from primus_images.training.judge.checks import Verdict
from primus_images.training.judge.record import NO_GPU
from primus_images.training.run.outcome import Outcome


class Hardware(NamedTuple):
    """The GPUs that the jobs get.

    ``gpu`` is the name of the generation, or "none" for the CPU. ``names`` has one entry per GPU,
    as the driver reports it. ``driver`` and ``firmware`` are versions. ``why`` is the reason for
    using the CPU although the target is for a GPU.
    """

    gpu: str = NO_GPU
    names: tuple[str, ...] = ()
    driver: str = ""
    firmware: str = ""
    devices: Devices = Devices()
    why: str = ""


def choose_gpus(count: str | None, target_gpu: Generation | None) -> Hardware:
    """Return the GPUs for ``count``: ``all``, a number, or ``none``.

    None means all if the machine has the GPU that the target is for (``target_gpu``), otherwise
    none. Raises HostError if the machine lacks these GPUs, or if their product cannot be
    identified, because a record must name it.
    """
    machine = detect()
    if count is None:
        if target_gpu is None:
            return Hardware()
        if machine.generation != target_gpu.name:
            return Hardware(
                why=f"the target is for {target_gpu.title}; this machine: {machine.sentence()}"
            )
        count = "all"
    if count == NO_GPU:
        return Hardware(why="--gpus none" if target_gpu else "")
    devices = gpus(count)
    if not machine.generation:
        seen = "its driver reports none"
        if machine.names:
            seen = machine.sentence()
        raise HostError(
            f"--gpus {count}: the record must name the GPU, but this machine's cannot be "
            f"identified: {seen}",
            hint="--gpus none validates on the CPU",
        )
    if count == "all":
        names = machine.names
    else:
        names = machine.names[: int(count)]
    return Hardware(
        gpu=machine.generation,
        names=names,
        driver=machine.driver,
        firmware=machine.firmware,
        devices=devices,
    )


def ran_on(gpu: str, outcomes: Mapping[str, Outcome]) -> Verdict:
    """Check that every job reports, from its own process, a GPU of generation ``gpu``."""
    elsewhere = []
    for name, facts in ((name, ended.facts) for name, ended in outcomes.items()):
        device = facts.get("device", "unknown")
        if device == "cuda":
            product = facts.get("gpu")
        else:
            product = device
        generation = by_product_name(str(product))
        if generation is None or generation.name != gpu:
            elsewhere.append(f"{name} ran on {product}")
    reason = "; ".join(elsewhere) or f"every job ran on {gpu}"
    return Verdict(name="on the GPU", passed=bool(outcomes) and not elsewhere, reason=reason)


def cpu_model() -> str:
    """Return the model of this machine's CPU from the kernel. Virtual machines often report only a
    general name.
    """
    first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    entries = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in first.splitlines())
    }
    numbers = [
        f"{key} {entries[key]}" for key in ("cpu family", "model", "stepping") if key in entries
    ]
    return ", ".join([entries.get("model name", "unknown"), *numbers])


def require_gpus(recipe: Recipe, hardware: Hardware) -> None:
    """Raise HostError if the recipe has more ranks than there are GPUs."""
    if hardware.gpu != NO_GPU and recipe.world_size > len(hardware.names):
        raise HostError(
            f"{recipe.name} trains on {recipe.world_size} GPUs, but its job gets "
            f"{len(hardware.names)}",
            hint="--gpus none validates on the CPU",
        )
