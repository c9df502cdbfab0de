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
        default = cell_of(name, gpu)
        of_recipe = [
            Cell(
                recipe=name,
                choices=replace(default.choices, backend=backend, mode=mode, precision=precision),
                folder="-".join(filter(None, (default.folder, backend, mode, precision))),
            )
            for (backend, mode), offered in supported(load.read(path).settings).items()
            for precision in precisions or (None,)
            if precision is None
            or (precision in {PROXY_PRECISION, *offered} and computes(gpu, precision, backend))
        ]
        if not of_recipe:
            precisions_text = ", ".join(precisions)
            raise InputError(
                f"recipe {name} is trained in none of {precisions_text} on {gpu}",
                where=path,
                hint="add a precision that it supports to `trained_in` of the target",
            )
        yield from of_recipe
