"""Fine-tune a model on your own data, without a recipe to pick."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from pathlib import Path

from primus.cli.image.common import OVERRIDES, resolved
from primus.cli.image.train import RUN, train
from primus.cli.verb import option, verb
from primus.errors import InputError
from primus.gpus.detect import detect
from primus.recipes.recipe import Recipe
from primus.recipes.rules import USABLE, gpu_bytes, largest_batch, rules_of
from primus.recipes.weights import FILES, HUB, downloaded, nearest_recipe
from primus.training import machine

# A larger micro batch is hardly faster, and a step would train on more samples than fine-tuning wants.
_LARGEST = 8


@verb(
    option("weights", metavar="WEIGHTS", help="folder of weights, or hf:OWNER/NAME"),
    option("data", metavar="DATA", help="file or folder of text or chats, or hf:OWNER/NAME"),
    *OVERRIDES,
    *RUN,
    example="primus finetune /models/llama-3.1-8b chats.jsonl --mode lora lr=1e-4",
)
def finetune(options: argparse.Namespace) -> int:
    """Fine-tune a model on your data: the weights' folder decides the model, the tokenizer and the template.

    WEIGHTS is a folder of Hugging Face weights or hf:OWNER/NAME. DATA is a file or a folder of text or chats, or
    hf:OWNER/NAME. The settings are those of the recipe of the same family whose size is nearest; key=value arguments
    override them. All weights are trained if that fits the GPU's memory, otherwise LoRA adapters. The run exports what
    it trained to the folder `weights`. Exit codes are those of `primus train`.
    """
    name: str = options.weights
    folder = downloaded(name, *FILES) if name.startswith(HUB) else Path(name)
    for choice in ("backend", "mode"):  # they may be written like settings
        words = [word for word in options.overrides if word.startswith(f"{choice}=")]
        if words and getattr(options, choice) is None:
            setattr(options, choice, words[0].partition("=")[2])
            options.overrides = [word for word in options.overrides if word != words[0]]
    nearest = nearest_recipe(folder, options.mode)
    if options.backend not in (None, nearest.backend):
        raise InputError(f"--backend {options.backend} does not fine-tune", hint="`primus train` has all backends")
    options.backend, options.recipe = nearest.backend, nearest.recipe
    given = {word.partition("=")[0].removeprefix(f"{nearest.backend}.") for word in options.overrides}
    if "assets.tokenizer" not in given and not any(map(list, map(folder.glob, ("tokenizer*", "vocab*", "*.model")))):
        raise InputError(
            f"{folder} has no tokenizer", hint="copy it from the weights' source, or assets.tokenizer=FOLDER"
        )
    usual = {"weights": folder, "assets.corpus": options.data, "assets.tokenizer": folder, "save_weights": "true"}
    options.overrides = [*options.overrides, *(f"{key}={value}" for key, value in usual.items() if key not in given)]
    if options.ranks is None and "ranks" not in given and (names := detect().names):
        options.ranks = len(names)
    recipe, batch = _fitting(options)
    if batch and not given & {"local_batch", "training.micro_batch_size"}:
        options.overrides = [*options.overrides, f"local_batch={batch}"]
    if not options.json:
        same = shlex.join(["primus", "train", recipe.name, *recipe.choices.words(), *options.overrides])
        print(f"primus: the recipe is {recipe.name}, mode {recipe.mode}; the same run: {same}", file=sys.stderr)
    return train(options)


def _fitting(options: argparse.Namespace) -> tuple[Recipe, int]:
    """Return the first of the modes full and LoRA that fits, unless one is given, and its micro batch; 0: none fits."""
    if options.mode is None:
        options.mode = "full"
        with contextlib.suppress(InputError):  # some recipes have LoRA only
            recipe = resolved(options)
            if batch := _batch(recipe):
                return recipe, batch
        options.mode = "lora"
    recipe = resolved(options)
    return recipe, _batch(recipe)


def _batch(recipe: Recipe) -> int:
    if (memory := gpu_bytes(recipe.gpu)) is not None:
        return min(largest_batch(recipe, USABLE * memory), _LARGEST)
    there = machine.host_bytes()
    needed = rules_of(recipe).states(recipe, offload=False) * recipe.get("ranks", int)
    return recipe.local_batch if not there or needed <= there else 0
