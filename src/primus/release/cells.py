"""What a validation trains, and on what: cells of recipes, and the GPUs that their jobs get."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from primus.errors import HostError, InputError
from primus.gpus.detect import detect
from primus.gpus.table import Generation, by_product_name
from primus.recipes import load
from primus.recipes.choose import CPU, PROXY_PRECISION, computes, supported
from primus.recipes.setting import Choices
from primus.sandbox.container import Devices, gpus
from primus.training.checks import Verdict
from primus.training.outcome import Outcome

NO_GPU = "none"


class Cell(NamedTuple):
    """One recipe with one set of choices. ``choices`` contains the choices that differ from the recipe's defaults."""

    recipe: str
    choices: Choices
    folder: str

    def __str__(self) -> str:
        chosen = (self.choices.backend, self.choices.mode, self.choices.precision)
        return " ".join([self.recipe, *(word for word in chosen if word)])


def cells_of(
    recipes: Iterable[str], *, every: bool, gpu: str = CPU, precisions: Sequence[str] = (), among: Path | None = None
) -> tuple[Cell, ...]:
    """Return the cells of ``recipes``, which train their proxies on ``gpu`` (a generation or ``cpu``).

    ``among`` is the folder of recipes. With ``every``, there is a cell for each backend and mode that a recipe
    supports, otherwise only for its defaults. With ``precisions``, there is a cell for each of them that the backend
    supports for this recipe on ``gpu``, otherwise only for the proxy's own. Raises InputError for an unknown recipe, or
    one without a cell.
    """
    proxy = Choices(gpu=gpu, proxy=True)
    cells: list[Cell] = []
    for name in recipes:
        short = name.rpartition("/")[2].removesuffix(".yaml")
        if not every:
            cells.append(Cell(recipe=name, choices=proxy, folder=short))
            continue
        path = load.find(name, among)
        of_recipe = [
            Cell(
                recipe=name,
                choices=replace(proxy, backend=backend, mode=mode, precision=precision),
                folder="-".join(filter(None, (short, backend, mode, precision))),
            )
            for (backend, mode), offered in supported(load.read(path).settings).items()
            for precision in precisions or (None,)
            if precision is None or (precision in {PROXY_PRECISION, *offered} and computes(gpu, precision, backend))
        ]
        if not of_recipe:
            raise InputError(
                f"recipe {name} is trained in none of {', '.join(precisions)} on {gpu}",
                where=str(path),
                hint="add a precision that it supports to `trained_in` of the target",
            )
        cells += of_recipe
    return tuple(cells)


class Hardware(NamedTuple):
    """The GPUs that the jobs get.

    ``gpu`` is the name of the generation, or "none" for the CPU. ``names`` has one entry per GPU, as the driver reports
    it. ``driver`` and ``firmware`` are versions. ``why`` is the reason for using the CPU although the target is for a
    GPU.
    """

    gpu: str = NO_GPU
    names: tuple[str, ...] = ()
    driver: str = ""
    firmware: str = ""
    devices: Devices = Devices()
    why: str = ""


def choose(count: str | None, target_gpu: Generation | None) -> Hardware:
    """Return the GPUs for ``count``: ``all``, a number, or ``none``.

    None means all if the machine has the GPU that the target is for (``target_gpu``), otherwise none. Raises HostError
    if the machine lacks these GPUs, or if their product cannot be identified, because a record must name it.
    """
    machine = detect()
    if count is None:
        if target_gpu is None:
            return Hardware()
        if machine.generation != target_gpu.name:
            return Hardware(why=f"the target is for {target_gpu.title}; this machine: {machine.sentence()}")
        count = "all"
    if count == NO_GPU:
        return Hardware(why="--gpus none" if target_gpu else "")
    devices = gpus(count)
    if not machine.generation:
        raise HostError(
            f"--gpus {count}: the record must name the GPU, but this machine's cannot be identified: "
            f"{machine.sentence() if machine.names else 'its driver reports none'}",
            hint="--gpus none validates on the CPU",
        )
    names = machine.names if count == "all" else machine.names[: int(count)]
    return Hardware(
        gpu=machine.generation, names=names, driver=machine.driver, firmware=machine.firmware, devices=devices
    )


def ran_on(gpu: str, outcomes: Mapping[str, Outcome]) -> Verdict:
    """Check that every job reports, from its own process, a GPU of generation ``gpu``."""
    elsewhere = []
    for name, outcome in outcomes.items():
        device = outcome.facts.get("device", "unknown")
        product = outcome.facts.get("gpu") if device == "cuda" else device
        generation = by_product_name(str(product))
        if generation is None or generation.name != gpu:
            elsewhere.append(f"{name} ran on {product}")
    reason = "; ".join(elsewhere) or f"every job ran on {gpu}"
    return Verdict(name="on the GPU", passed=bool(outcomes) and not elsewhere, reason=reason)


def cpu_model() -> str:
    """Return the model of this machine's CPU from the kernel. Virtual machines often report only a general name."""
    first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    entries = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    numbers = [f"{key} {entries[key]}" for key in ("cpu family", "model", "stepping") if key in entries]
    return ", ".join([entries.get("model name", "unknown"), *numbers])
