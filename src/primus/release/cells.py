"""The cells of a validation: each recipe with the backends, modes and precisions to train it in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from primus.errors import InputError
from primus.recipes import load
from primus.recipes.choose import PROXY_PRECISION, computes
from primus.recipes.known import CPU, supported
from primus.recipes.setting import Choices


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One recipe with one set of choices. ``choices`` contains the choices that differ from the recipe's defaults."""

    recipe: str
    choices: Choices
    folder: str

    def __str__(self) -> str:
        chosen = (self.choices.backend, self.choices.mode, self.choices.precision)
        return " ".join([self.recipe, *(word for word in chosen if word)])


def cells_of(
    recipes: Iterable[str],
    *,
    every: bool,
    gpu: str = CPU,
    precisions: Sequence[str] = (),
    among: Path | None = None,
) -> tuple[Cell, ...]:
    """Return the cells of ``recipes``, which train their proxies on ``gpu`` (a generation or ``cpu``).

    ``among`` is the folder of recipes. With ``every``, there is a cell for each backend and mode that a recipe
    supports, otherwise only for its defaults. With ``precisions``, there is a cell for each of them that the backend
    supports for this recipe on ``gpu``, otherwise only for the proxy's own. Raises InputError for an unknown recipe, or
    one without a cell.
    """
    here = Choices(gpu=gpu, proxy=True)
    cells: list[Cell] = []
    for name in recipes:
        short = name.rpartition("/")[2].removesuffix(".yaml")
        if not every:
            cells.append(Cell(recipe=name, choices=here, folder=short))
            continue
        own: list[Cell] = []
        ways = supported(load.read(load.find(name, among)).settings)
        if not ways:
            raise InputError(f"recipe {name} supports no backend", where=str(load.find(name, among)))
        for (backend, mode), offered in ways.items():
            way = Cell(
                recipe=name, choices=replace(here, backend=backend, mode=mode), folder=f"{short}-{backend}-{mode}"
            )  # fmt: skip
            fits = [p for p in precisions if p in {PROXY_PRECISION, *offered} and computes(gpu, p, backend)]
            own += [_in_precision(way, precision) for precision in fits] if precisions else [way]
        if not own:
            raise InputError(
                f"recipe {name} is trained in none of {', '.join(precisions)} on {gpu}",
                where=str(load.find(name, among)),
                hint="add a precision that it supports to `trained_in` of the target",
            )
        cells += own
    return tuple(cells)


def _in_precision(cell: Cell, precision: str) -> Cell:
    return replace(cell, choices=replace(cell.choices, precision=precision), folder=f"{cell.folder}-{precision}")
