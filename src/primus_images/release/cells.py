"""What a validation trains: cells, each a recipe with one set of choices."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from primus_images.errors import InputError
from primus_images.recipes import load
from primus_images.recipes.choose import CPU, PROXY_PRECISION, computes, supported
from primus_images.recipes.setting import Choices


class Cell(NamedTuple):
    """One recipe with one set of choices. ``choices`` contains the choices that differ from the
    recipe's defaults.
    """

    recipe: str
    choices: Choices
    folder: str

    def __str__(self) -> str:
        chosen = (self.choices.backend, self.choices.mode, self.choices.precision)
        return " ".join([self.recipe, *(word for word in chosen if word)])


def cell_of(recipe: str, gpu: str = CPU) -> Cell:
    """Return the cell of the recipe's defaults, which trains its proxy on ``gpu`` (a generation or
    ``cpu``).
    """
    return Cell(
        recipe=recipe,
        choices=Choices(gpu=gpu, proxy=True),
        folder=Path(recipe).name.removesuffix(".yaml"),
    )


def cells_of(
    recipes: Iterable[str],
    gpu: str = CPU,
    precisions: Sequence[str] = (),
    among: Path | None = None,
) -> Iterator[Cell]:
    """Yield the cells of ``recipes``: those of :func:`cell_of` with each backend and mode that a
    recipe supports.

    ``among`` is the folder of recipes. With ``precisions``, there is a cell for each of them that
    the backend supports for this recipe on ``gpu``, otherwise only for the proxy's own. Raises
    InputError for an unknown recipe, or one without a cell.
    """
    for name in recipes:
        path = load.find(name, among)
        cells = []
        for (backend, mode), offered in supported(load.read(path).settings).items():
            trainable = {PROXY_PRECISION, *offered}
            for precision in precisions:
                if precision in trainable and computes(gpu, precision, backend):
                    cells.append(_cell(name, gpu, backend, mode, precision))
            if not precisions:
                cells.append(_cell(name, gpu, backend, mode))
        if not cells:
            raise InputError(
                f"recipe {name} is trained in none of {', '.join(precisions)} on {gpu}",
                where=path,
                hint="add a precision that it supports to `trained_in` of the target",
            )
        yield from cells


def _cell(recipe: str, gpu: str, backend: str, mode: str, precision: str | None = None) -> Cell:
    default = cell_of(recipe, gpu)
    choices = replace(default.choices, backend=backend, mode=mode, precision=precision)
    words = [default.folder, backend, mode]
    if precision:
        words.append(precision)
    return Cell(recipe=recipe, choices=choices, folder="-".join(words))
