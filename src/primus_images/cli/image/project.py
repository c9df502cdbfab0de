"""Predict memory, speed and days of training on many nodes.

The model of speed is the share of the GPU's peak that published and measured runs reach
(``recipes/throughput.yaml``).
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import primus_images.recipes
from primus_images.cli.verb import Options, answer
from primus_images.errors import InputError
from primus_images.gpus.table import generation
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import changed, resolve
from primus_images.recipes.rules import USABLE, fits, gpu_bytes, predict
from primus_images.recipes.setting import Choices
from primus_images.terminal import Screen
from primus_images.training.run.metrics import of_recipe_unit
from primus_images.turbo.optimizations import OFF, requested
from primus_images.yamlfile import read_values

_GIB = 2**30
_MOST_NODES = 4096
_DEGREES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class ProjectOptions(Options):
    """The options of ``project``."""

    recipe: str
    overrides: Sequence[str]
    backend: str | None
    mode: str | None
    precision: str | None
    gpu: str | None
    nodes: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What one number of nodes reaches. ``calibrated``: a run like it is known on this GPU."""

    tokens_per_second: float
    mfu: float
    calibrated: bool
    sources: str


def project(options: ProjectOptions) -> int:
    """Predict memory, tokens per second, MFU and days of training for numbers of nodes, from
    published runs.
    """
    rows = []
    for nodes in _numbers_of_nodes(options.nodes):
        choices = Choices(
            backend=options.backend,
            mode=options.mode,
            precision=options.precision,
            gpu=options.gpu,
            nodes=nodes,
        )
        recipe = resolve(options.recipe, options.overrides, choices)
        total = gpu_bytes(recipe.gpu)
        if total is None or recipe.architecture.of_images or recipe.mode == "lora":
            raise InputError(
                "throughput is projected for language models with all weights trained, on a GPU",
                hint="name a GPU, as in --gpu mi355x, and a recipe that `primus list` shows with "
                "it",
            )
        layout = next(_layouts(recipe, USABLE * total), None)
        rows.append(_row(recipe, layout, options.tokens))
    possible = any(row["layout"] for row in rows)
    return answer(options, rows, _lines(rows, options.tokens), passed=possible)


def projected(recipe: Recipe) -> Projection:
    """Return what ``recipe`` reaches.

    Raises InputError if the GPU's peak in its precision, or any run, is unknown.
    """
    peak = _peak_tflops(recipe)
    shares = _shares_like(recipe)
    if peak is None or not shares:
        raise InputError(
            f"no run in {recipe.precision} is published from which {recipe.gpu} could be projected",
            where=recipe.settings["precision"].origin,
            hint="--precision bf16",
        )
    calibrated = recipe.gpu in shares
    if calibrated:
        shares = {recipe.gpu: shares[recipe.gpu]}
    mfu = median(row["share"] for row in shares.values())
    doublings = math.log2(max(1.0, recipe.world_size / 8))
    mfu *= _throughput()["per_doubling"] ** doublings
    flops = of_recipe_unit(recipe.architecture, recipe.seq_len).causal
    sources = dict.fromkeys(row["from"] for row in shares.values())
    return Projection(
        tokens_per_second=mfu * peak * 1e12 / flops,
        mfu=mfu,
        calibrated=calibrated,
        sources="; ".join(sources),
    )


def _peak_tflops(recipe: Recipe) -> float | None:
    for peak in generation(recipe.gpu).peaks:
        if peak.dtype == recipe.precision:
            return peak.tflops
    return None


def _shares_like(recipe: Recipe) -> dict[str, Mapping[str, Any]]:
    """Return GPU → the share of its peak that runs of the recipe's kind reach."""
    turbo = "auto"
    if requested(recipe) == OFF:
        turbo = OFF
    kind = (recipe.precision, bool(recipe.architecture.moe.experts), turbo)
    shares = {}
    for row in _throughput()["shares"]:
        if (row["precision"], row["experts"], row["turbo"]) == kind:
            shares[row["gpu"]] = row
    return shares


@cache
def _throughput() -> Any:
    return read_values(Path(primus_images.recipes.__file__).with_name("throughput.yaml")).data


def _numbers_of_nodes(word: str) -> list[int]:
    """Return the number that ``word`` names, or the doublings of a range such as 1..512."""
    match = re.fullmatch(r"([1-9]\d{0,3})(?:\.\.([1-9]\d{0,3}))?", word)
    if match:
        first = int(match[1])
        last = int(match[2] or match[1])
    if not match or not first <= last <= _MOST_NODES:
        raise InputError(
            f"no number of nodes: {word!r}",
            where=f"--nodes {word}",
            hint=f"a number from 1 to {_MOST_NODES}, or a range such as 1..512",
        )
    numbers = []
    while first < last:
        numbers.append(first)
        first *= 2
    return [*numbers, last]


def _layouts(recipe: Recipe, available: float) -> Iterator[Recipe]:
    """Yield the layouts of a recipe that fit.

    Its own comes first, then those that share layers among more ranks.
    """
    if fits(predict(recipe), available):
        yield recipe
    kinds = [kind for kind in ("tp", "pp") if kind in recipe.knows.degrees]
    combinations = list(product(_DEGREES, repeat=len(kinds)))
    combinations.sort(key=lambda degrees: (math.prod(degrees), degrees[1:]))
    for degrees in combinations:
        layout = [f"{kind}={degree}" for kind, degree in zip(kinds, degrees, strict=True)]
        try:
            other = changed(recipe, layout)
        except InputError:
            continue  # the ranks, the heads or the batch do not divide
        if fits(predict(other), available):
            yield other


def _row(asked: Recipe, recipe: Recipe | None, tokens: int) -> dict[str, Any]:
    ranks = asked.world_size
    row: dict[str, Any] = {"nodes": asked.get("nodes", int), "gpus": ranks, "layout": ""}
    if recipe is None:
        return row
    reached = projected(recipe)
    return row | {
        "layout": _layout_words(recipe),
        "micro_batch": recipe.local_batch,
        "global_batch": recipe.global_batch,
        "peak_bytes": round(predict(recipe).peak),
        "tokens_per_second_per_gpu": round(reached.tokens_per_second, 1),
        "mfu_causal": round(reached.mfu, 4),
        "days": round(tokens / reached.tokens_per_second / ranks / 86400, 2),
        "calibrated": reached.calibrated,
        "sources": reached.sources,
    }


def _layout_words(recipe: Recipe) -> str:
    words = [f"dp{recipe.data_parallel}"]
    for kind in ("tp", "pp", "cp", "ep"):
        degree = recipe.degree(kind)
        if degree > 1:
            words.append(f"{kind}{degree}")
    return " ".join(words)


def _lines(rows: Sequence[Mapping[str, Any]], tokens: int) -> Iterator[str]:
    head = (
        "NODES",
        "GPUS",
        "LAYOUT",
        "BATCH",
        "MEMORY",
        "TOKENS/S/GPU",
        "MFU",
        f"DAYS FOR {tokens:.3g} TOKENS",
    )
    yield from Screen.of().table([_cells(row) for row in rows], head=head)
    known = next((row for row in rows if row["layout"]), None)
    if known is None:
        return
    gpus = "other GPUs, since no such run on this GPU is known"
    if known["calibrated"]:
        gpus = "this GPU"
    sources = known["sources"]
    yield from Screen.of().wrap(
        f"share of the peak: the median of runs on {gpus} ({sources})", hanging="  "
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    begin = (str(row["nodes"]), str(row["gpus"]))
    if not row["layout"]:
        return (*begin, "no layout fits", "", "", "", "", "")
    return (
        *begin,
        row["layout"],
        str(row["micro_batch"]),
        f"{row['peak_bytes'] / _GIB:.1f} GiB",
        f"{row['tokens_per_second_per_gpu']:,.0f}",
        f"{row['mfu_causal']:.1%}",
        f"{row['days']:,.1f}",
    )
