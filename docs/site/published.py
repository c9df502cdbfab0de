"""What AMD's documents publish, and what the recipes resolve to for the same choices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.schema import build
from primus_images.yamlfile import read

_FILE = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One document."""

    id: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One published configuration: a command, or a row of the table of the document ``source``.

    ``nodes`` are machines of eight GPUs. ``batch`` counts sequences or images per GPU and forward
    pass, and ``global_batch`` those of one step over all GPUs. ``with_`` are overrides, if it is
    not the recipe's default. ``measured`` maps a GPU to its TFLOP/s, counted without a causal mask;
    for FLUX to images per second.
    """

    recipe: str
    backend: str
    mode: str
    precision: str
    gpus: tuple[str, ...]
    nodes: int
    source: str
    seq_len: int | None = None
    batch: int | None = None
    global_batch: int | None = None
    with_: tuple[str, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Published:
    """published.yaml: documents and their figures."""

    sources: tuple[Source, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The recipe resolved for one cell on one GPU. ``differing`` are the published figures that
    differ from it.
    """

    cell: Cell
    gpu: str
    recipe: Recipe
    differing: tuple[int, ...]


@cache
def load_published() -> Published:
    """Read the file that ships with this package."""
    return build(Published, read(_FILE, _FILE.name))


def outcomes(cells: tuple[Cell, ...] | None = None) -> Iterator[Outcome]:
    """Resolve every published cell for each of its GPUs.

    Raises InputError if one does not resolve.
    """
    for cell in load_published().cells if cells is None else cells:
        for gpu in cell.gpus:
            choices = Choices(
                backend=cell.backend,
                mode=cell.mode,
                precision=cell.precision,
                gpu=gpu,
                nodes=cell.nodes,
            )
            recipe = resolve(cell.recipe, cell.with_, choices)
            # Image models have no sequence length to compare.
            figures = (
                recipe.seq_len if cell.seq_len else None,
                recipe.local_batch,
                recipe.global_batch,
            )
            pairs = zip((cell.seq_len, cell.batch, cell.global_batch), figures, strict=True)
            differing = tuple(there for there, here in pairs if there is not None and there != here)
            yield Outcome(cell=cell, gpu=gpu, recipe=recipe, differing=differing)
