"""Predict the memory that a recipe needs on one GPU, and the largest micro batch that fits.

RECIPE is the name of a recipe or the path of its file; key=value arguments override settings, as for train. Nothing is
started and no GPU is needed: --gpu names the GPU to predict for.
Exit code 0: it fits, or is tight; 1: it does not fit; 2: invalid input.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from primus.cli.image.common import add_choices, add_recipe, resolved
from primus.errors import InputError
from primus.gpus.table import generation
from primus.recipes.architecture import readable, size
from primus.recipes.choose import CPU
from primus.recipes.memory import Memory
from primus.recipes.recipe import Recipe
from primus.recipes.rules import USABLE, fits, gpu_bytes, largest_batch, predict
from primus.terminal import Screen

EXAMPLE = "primus fit llama3.1-70b --gpu mi325x --precision fp8"
_GIB = 2**30
_WHAT = {
    "weights": "the rank's part of the weights",
    "gradients": "the rank's part of the gradients",
    "optimizer": "the rank's part of the optimizer states",
    "unsharded": "layers at work: their whole weights and gradients",
    "activations": "kept from the forward for the backward pass",
    "loss": "logits and their gradients",
    "reused": "gradients' memory that activations and logits use before",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_recipe(parser)
    add_choices(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Print the prediction. Returns 0 if the recipe fits, otherwise 1. Raises InputError."""
    recipe = resolved(options)
    total = gpu_bytes(recipe.gpu)
    if total is None:
        raise InputError(
            f"--gpu {CPU}: memory is predicted for GPUs only", hint="name one, as in --gpu mi300x; proxies need none"
        )
    memory, available = predict(recipe), USABLE * total
    largest = largest_batch(recipe, available)
    if options.json:
        print(json.dumps(_document(recipe, memory, available, largest), indent=2))
    else:
        print("\n".join(_lines(recipe, memory, available, largest, Screen.of())))
    return 0 if fits(memory, available) else 1


def _document(recipe: Recipe, memory: Memory, available: float, largest: int) -> dict[str, object]:
    return {
        "recipe": recipe.name,
        "backend": recipe.backend,
        "mode": recipe.mode,
        "precision": recipe.precision,
        "gpu": recipe.gpu,
        "world_size": recipe.world_size,
        "micro_batch": recipe.local_batch,
        "max_micro_batch": largest,
        "fits": fits(memory, available),
        "tight": memory.peak > available and fits(memory, available),
        "bytes": {name: round(value) for name, value in memory.terms.items()},
        "peak_bytes": round(memory.peak),
        "least_bytes": round(memory.least),
        "available_bytes": round(available),
        "error_band": recipe.knows.memory_error,
    }


def _lines(recipe: Recipe, memory: Memory, available: float, largest: int, screen: Screen) -> Iterator[str]:
    gpu, band = generation(recipe.gpu), recipe.knows.memory_error
    yield (
        f"{recipe.name}: {readable(size(recipe.architecture).total)} parameters, {recipe.backend} {recipe.mode} "
        f"{recipe.precision}, {recipe.world_size} × {gpu.title}, micro batch {recipe.local_batch}"
    )
    rows = [(name, f"{value / _GIB:,.1f} GiB", _WHAT[name]) for name, value in memory.terms.items()]
    yield from screen.table([*rows, ("peak", f"{memory.peak / _GIB:,.1f} GiB", f"± {band:.0%}")], indent="  ")
    there = f"{available / _GIB:,.1f} GiB, {USABLE:.0%} of the GPU's {gpu.memory.gb:,.0f}"
    if memory.peak <= available:
        yield f"fits: {there}"
    elif fits(memory, available):
        yield f"tight: more than {there}; the allocator must give memory back in every step, which costs speed"
    else:
        yield f"does not fit: more than {there}"
    yield f"largest micro batch that fits: {largest}" if largest else "no micro batch fits"
