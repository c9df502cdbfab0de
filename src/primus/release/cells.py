"""What one validation of an image consists of: recipes, and for each the ways to train it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from primus.errors import InputError
from primus.recipes import load
from primus.recipes.choose import CPU, PROXY_PRECISION, computes, supported
from primus.recipes.setting import Asked

__all__ = ["Cell", "cells_of"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One recipe trained one way; ``asked`` names everything that is not the recipe's default."""

    recipe: str
    asked: Asked
    folder: str

    def __str__(self) -> str:
        chosen = (self.asked.backend, self.asked.mode, self.asked.precision)
        return " ".join([self.recipe, *(word for word in chosen if word)])


def cells_of(
    recipes: Iterable[str],
    *,
    every: bool,
    gpu: str = CPU,
    precisions: Sequence[str] = (),
    among: Path | None = None,
) -> tuple[Cell, ...]:
    """The cells of ``recipes``: their proxies, as they are trained on ``gpu``, a generation or ``cpu``.
    ``among`` is the folder of recipes.

    With ``every``, each backend and mode that a recipe supports, else its default alone; with ``precisions``, each of
    those that the backend computes there for this recipe, else the proxy's own. InputError for an unknown recipe,
    or one that supports nothing.
    """
    here = Asked(gpu=gpu, proxy=True)
    cells: list[Cell] = []
    for name in recipes:
        short = name.rpartition("/")[2].removesuffix(".yaml")
        if not every:
            cells.append(Cell(recipe=name, asked=here, folder=short))
            continue
        ways = supported(load.read(load.find(name, among)).settings)
        if not ways:
            raise InputError(f"recipe {name} supports nothing", where=str(load.find(name, among)))
        for (backend, mode), offered in ways.items():
            way = Cell(
                recipe=name, asked=replace(here, backend=backend, mode=mode), folder=f"{short}-{backend}-{mode}"
            )  # fmt: skip
            fits = [p for p in precisions if p in {PROXY_PRECISION, *offered} and computes(gpu, p, backend)]
            cells += [_in_precision(way, precision) for precision in fits] if precisions else [way]
    return tuple(cells)


def _in_precision(cell: Cell, precision: str) -> Cell:
    return replace(cell, asked=replace(cell.asked, precision=precision), folder=f"{cell.folder}-{precision}")
