"""Convert a Primus experiment file to a recipe. Keys that no recipe can express are listed with their location."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from primus.cli.arguments import new_file, path, whole
from primus.compat.experiment import least_nodes, read_experiment, recipe_text
from primus.errors import HostError, InputError
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.training.job import Job
from primus.training.ranks import files

EXAMPLE = "primus import-exp my-experiment.yaml --out my-recipe.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "file", type=path("FILE"), metavar="FILE", help="experiment file: modules.pre_trainer with overrides"
    )
    parser.add_argument(
        "--out", type=new_file("--out"), metavar="FILE", help="file to write (default: standard output)"
    )
    parser.add_argument(
        "--nodes", type=whole(least=1), metavar="N",
        help="number of nodes it was written for (default: the minimum for its parallel degrees)",
    )  # fmt: skip
    parser.add_argument("--allow-unmapped", action="store_true", help="leave out keys that no recipe can express")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the recipe")


def run(options: argparse.Namespace) -> int:
    """Convert the file. Returns 0. Raises InputError if it is invalid or a recipe cannot express it."""
    source = read_experiment(options.file, os.environ)
    done = source.translated()
    print(f"what {source.path.name} does not set is as in the recipe {source.recipe}", file=sys.stderr)
    for sentence in done.left_out:
        print(sentence, file=sys.stderr)
    if not options.allow_unmapped:
        done.refuse_unmapped()
    for option, reason in done.unmapped:
        print(f"left out: {option.where}: {option.key}: {reason}", file=sys.stderr)
    nodes = options.nodes or least_nodes(source.backend, done.settings)
    # The recipe is resolved for a fixed GPU, because the importing machine may have none. All keys are checked anyway.
    choices = Choices(
        backend=source.backend, precision=done.precision, gpu="mi355x",
        nodes=nodes if options.nodes or nodes > 1 else None,
    )  # fmt: skip
    try:
        recipe = resolve(source.recipe, done.words(), choices)
        files(Job(name=source.name, recipe=recipe, output=Path("import")))
    except InputError as error:
        raise done.placed(error) from error
    nodes = recipe.get("nodes", int)
    text = recipe_text(source, done, nodes)
    document = {
        "recipe": source.recipe,
        "backend": source.backend,
        "precision": done.precision,
        "nodes": nodes,
        "settings": done.settings,
        "left_out": done.left_out,
        "unmapped": [{**asdict(option), "why": reason} for option, reason in done.unmapped],
        "text": text,
    }
    if options.json:
        print(json.dumps(document, indent=2, ensure_ascii=False))
    elif options.out is None:
        print(text, end="")
    if options.out is not None:
        try:
            options.out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise HostError(f"cannot write {options.out}: {error.strerror}", hint="choose another --out") from error
    return 0
