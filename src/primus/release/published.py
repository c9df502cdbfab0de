"""The figures that source documents publish, compared with those of the recipes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from primus.recipes.recipe import Recipe
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.schema import build, described
from primus.yamlfile import read

_FILE = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One document."""

    id: str = described("Its name in this file.")
    title: str = described("Its title.")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One published configuration: a command, or a row of a table."""

    recipe: str = described("The recipe of that model.")
    backend: str = described("The corresponding backend of primus.")
    mode: str = described("pretrain, full or lora.")
    precision: str = described("The precision that the document names.")
    gpus: tuple[str, ...] = described("GPUs it is published for.")
    nodes: int = described("Machines of eight GPUs.")
    source: str = described("The document's id.")
    seq_len: int | None = described("Tokens of one sequence.", default=None)
    batch: int | None = described("Sequences or images per GPU and forward pass.", default=None)
    global_batch: int | None = described("Sequences or images of one step over all GPUs.", default=None)
    with_: tuple[str, ...] = described("Overrides, if it is not the recipe's default.", default=())
    note: str | None = described("A note for readers.", default=None)


@dataclass(frozen=True, kw_only=True)
class Published:
    """The file: documents and their figures."""

    sources: tuple[Source, ...] = described("The documents.")
    cells: tuple[Cell, ...] = described("The published configurations.")

    def __post_init__(self) -> None:
        unknown = {cell.source for cell in self.cells} - {source.id for source in self.sources}
        if unknown:
            raise ValueError(f"no document is called {', '.join(sorted(unknown))}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The recipe resolved for one cell on one GPU. ``differing`` are the published figures that differ from it."""

    cell: Cell
    gpu: str
    recipe: Recipe
    differing: tuple[int, ...]


@cache
def load_published() -> Published:
    """Read the file that ships with this package."""
    return build(Published, read(_FILE, _FILE.name))


def outcomes(cells: tuple[Cell, ...] | None = None) -> Iterator[Outcome]:
    """Resolve every published cell for each of its GPUs. Raises InputError if one does not resolve."""
    for cell in load_published().cells if cells is None else cells:
        for gpu in cell.gpus:
            choices = Choices(backend=cell.backend, mode=cell.mode, precision=cell.precision, gpu=gpu, nodes=cell.nodes)
            recipe = resolve(cell.recipe, cell.with_, choices)
            # Image models have no sequence length to compare.
            found = (recipe.seq_len if cell.seq_len else None, recipe.local_batch, recipe.global_batch)
            pairs = zip((cell.seq_len, cell.batch, cell.global_batch), found, strict=True)
            differing = tuple(there for there, here in pairs if there is not None and there != here)
            yield Outcome(cell=cell, gpu=gpu, recipe=recipe, differing=differing)
