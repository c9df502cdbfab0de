"""What the source documents publish, and what the recipes make of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from primus.recipes.recipe import Recipe
from primus.recipes.resolve import resolve
from primus.recipes.setting import Asked
from primus.schema import build, described
from primus.yamlfile import read

__all__ = ["Cell", "Outcome", "Published", "Source", "load_published", "outcomes"]

_FILE = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One document."""

    id: str = described("What it is called here.")
    title: str = described("Its title.")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One published way to train: a command, or a row of a table."""

    recipe: str = described("The recipe of that model.")
    backend: str = described("The backend here that stands for the published one.")
    mode: str = described("pretrain, full or lora.")
    precision: str = described("What the document says it computes in.")
    gpus: tuple[str, ...] = described("GPUs it is published for.")
    nodes: int = described("Machines of eight GPUs.")
    source: str = described("Which document.")
    seq_len: int | None = described("Tokens of one sequence.", default=None)
    batch: int | None = described("Sequences or images per GPU and forward pass.", default=None)
    global_batch: int | None = described("Sequences or images of one step over all GPUs.", default=None)
    with_: tuple[str, ...] = described("Words that ask for it, where it is not the recipe's default.", default=())
    note: str | None = described("What a reader must know.", default=None)


@dataclass(frozen=True, kw_only=True)
class Published:
    """The file: documents and what they publish."""

    sources: tuple[Source, ...] = described("The documents.")
    cells: tuple[Cell, ...] = described("What they publish.")

    def __post_init__(self) -> None:
        unknown = {cell.source for cell in self.cells} - {source.id for source in self.sources}
        if unknown:
            raise ValueError(f"no document is called {', '.join(sorted(unknown))}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a recipe resolves to for one cell on one GPU. ``differing``: published figures that it does not have."""

    cell: Cell
    gpu: str
    recipe: Recipe
    differing: tuple[int, ...]

    @property
    def because(self) -> str:
        """The recipe's reason for its batch; empty: none is given."""
        return self.recipe.settings[self.recipe.knows.key("local_batch")].because

    @property
    def explained(self) -> bool:
        """Whether the reason names every published figure that differs."""
        return all(re.search(rf"(?<![\d.]){figure}(?![\d])", self.because) for figure in self.differing)


@cache
def load_published() -> Published:
    """The file that ships with this package."""
    return build(Published, read(_FILE, _FILE.name))


def outcomes(cells: tuple[Cell, ...] | None = None) -> Iterator[Outcome]:
    """Every published cell on every GPU of it, resolved. InputError where one does not resolve."""
    for cell in load_published().cells if cells is None else cells:
        for gpu in cell.gpus:
            asked = Asked(backend=cell.backend, mode=cell.mode, precision=cell.precision, gpu=gpu, nodes=cell.nodes)
            recipe = resolve(cell.recipe, cell.with_, asked)
            # An image has no length.
            found = (recipe.seq_len if cell.seq_len else None, recipe.local_batch, recipe.global_batch)
            pairs = zip((cell.seq_len, cell.batch, cell.global_batch), found, strict=True)
            differing = tuple(there for there, here in pairs if there is not None and there != here)
            yield Outcome(cell=cell, gpu=gpu, recipe=recipe, differing=differing)
