"""Project what a recipe reaches on many nodes: memory, tokens per second, MFU, and the time for a number of tokens.

The model is the share of the GPU's peak that published and measured runs reach (``recipes/throughput.yaml``).
"""

import argparse
import math
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import primus.recipes
from primus.cli.verb import answer
from primus.errors import InputError
from primus.gpus.table import generation
from primus.recipes.recipe import Recipe
from primus.recipes.resolve import resolve
from primus.recipes.rules import USABLE, fits, gpu_bytes, predict
from primus.recipes.setting import Choices
from primus.terminal import Screen
from primus.training.metrics import of_recipe_unit
from primus.turbo.optimizations import OFF, requested
from primus.yamlfile import read_values

_MOST_NODES = 4096
_DEGREES = (1, 2, 4, 8, 16)


class Projection(NamedTuple):
    """What one number of nodes reaches. ``calibrated``: runs on this GPU, in this precision, are known."""

    tokens_per_second: float
    mfu: float
    calibrated: bool
    sources: str


def project(options: argparse.Namespace) -> int:
    """Predict memory, tokens per second, MFU and days of training for numbers of nodes, from published runs.

    Nothing is started and no GPU is needed. If the recipe's own layout does not fit, the first of TP and PP that does
    is taken. Exit code 0: a layout fits on some number of nodes; 1: on none; 2: invalid input.
    """
    rows = []
    for nodes in _nodes(options.nodes):
        choices = Choices(
            backend=options.backend, mode=options.mode, precision=options.precision, gpu=options.gpu, nodes=nodes
        )
        recipe = resolve(options.recipe, options.overrides, choices)
        total = gpu_bytes(recipe.gpu)
        if total is None or recipe.architecture.of_images or recipe.mode == "lora":
            why = "throughput is projected for language models with all weights trained, on a GPU"
            raise InputError(why, hint="name a GPU, as in --gpu mi355x, and a recipe that `primus list` shows with it")
        rows.append(_row(recipe, next(_layouts(recipe, USABLE * total), None), options.tokens))
    return answer(options, rows, _lines(rows, options.tokens), passed=any(row["layout"] for row in rows))


def projected(recipe: Recipe) -> Projection:
    """Return what ``recipe`` reaches. Raises InputError if the GPU's peak in its precision, or any run, is unknown."""
    peak = next((row.tflops for row in generation(recipe.gpu).peaks if row.dtype == recipe.precision), None)
    kind = (recipe.precision, bool(recipe.architecture.moe.experts), OFF if requested(recipe) == OFF else "auto")
    alike = {row["gpu"]: row for row in _table()["shares"] if (row["precision"], row["experts"], row["turbo"]) == kind}
    if peak is None or not alike:
        why = f"no run in {recipe.precision} is published from which {recipe.gpu} could be projected"
        raise InputError(why, where=recipe.settings["precision"].origin, hint="--precision bf16")
    rows = [alike[recipe.gpu]] if recipe.gpu in alike else [*alike.values()]
    share = median(row["share"] for row in rows)
    share *= _table()["per_doubling"] ** math.log2(max(1.0, recipe.world_size / 8))
    flops = of_recipe_unit(recipe.architecture, recipe.seq_len).causal
    sources = "; ".join(dict.fromkeys(row["from"] for row in rows))
    return Projection(share * peak * 1e12 / flops, share, recipe.gpu in alike, sources)


@cache
def _table() -> Any:
    return read_values(Path(primus.recipes.__file__).with_name("throughput.yaml")).data


def _nodes(word: str) -> list[int]:
    match = re.fullmatch(r"([1-9]\d{0,3})(?:\.\.([1-9]\d{0,3}))?", word)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not first <= last <= _MOST_NODES:
        hint = f"a number from 1 to {_MOST_NODES}, or a range such as 1..512"
        raise InputError(f"no number of nodes: {word!r}", where=f"--nodes {word}", hint=hint)
    doubled = [first * 2**power for power in range(13) if first * 2**power < last]
    return [*doubled, last]


def _layouts(recipe: Recipe, available: float) -> Iterator[Recipe]:
    """Yield the recipe with its own layout, then with others that share layers among more ranks, where it fits."""
    if fits(predict(recipe), available):
        yield recipe
    kinds = [kind for kind in ("tp", "pp") if kind in recipe.knows.degrees]
    for degrees in sorted(product(_DEGREES, repeat=len(kinds)), key=lambda each: (math.prod(each), each[1:])):
        layout = [f"{kind}={degree}" for kind, degree in zip(kinds, degrees, strict=True)]
        try:
            other = resolve(str(recipe.path), recipe.overrides, recipe.choices, replacing=layout)
        except InputError:
            continue  # the ranks, the heads or the batch do not divide
        if fits(predict(other), available):
            yield other


def _row(asked: Recipe, recipe: Recipe | None, tokens: int) -> dict[str, Any]:
    nodes, ranks = asked.get("nodes", int), asked.world_size
    if recipe is None:
        return {"nodes": nodes, "gpus": ranks, "layout": ""}
    reached = projected(recipe)
    degrees = {kind: recipe.degree(kind) for kind in ("tp", "pp", "cp", "ep")}
    return {
        "nodes": nodes,
        "gpus": ranks,
        "layout": " ".join([f"dp{recipe.data_parallel}", *(f"{k}{n}" for k, n in degrees.items() if n > 1)]),
        "micro_batch": recipe.local_batch,
        "global_batch": recipe.global_batch,
        "peak_bytes": round(predict(recipe).peak),
        "tokens_per_second_per_gpu": round(reached.tokens_per_second, 1),
        "mfu_causal": round(reached.mfu, 4),
        "days": round(tokens / reached.tokens_per_second / ranks / 86400, 2),
        "calibrated": reached.calibrated,
        "sources": reached.sources,
    }


def _lines(rows: list[dict[str, Any]], tokens: int) -> Iterator[str]:
    head = ("NODES", "GPUS", "LAYOUT", "BATCH", "MEMORY", "TOKENS/S/GPU", "MFU", f"DAYS FOR {tokens:.3g} TOKENS")
    table = []
    for row in rows:
        words = [str(row["nodes"]), str(row["gpus"]), row["layout"] or "no layout fits"]
        if row["layout"]:
            words += [str(row["micro_batch"]), f"{row['peak_bytes'] / 2**30:.1f} GiB"]
            words += [f"{row['tokens_per_second_per_gpu']:,.0f}", f"{row['mfu_causal']:.1%}", f"{row['days']:,.1f}"]
        table.append(tuple(words + [""] * (len(head) - len(words))))
    yield from Screen.of().table(table, head=head)
    if known := next((row for row in rows if row["layout"]), None):
        of = "this GPU" if known["calibrated"] else "other GPUs, since no such run on this GPU is known"
        yield from Screen.of().wrap(f"share of the peak: the median of runs on {of} ({known['sources']})", hanging="  ")
