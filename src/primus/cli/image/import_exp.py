"""Convert a Primus experiment file to a recipe. Keys that no recipe can express are listed with their location."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from primus.cli.arguments import new_file, path, whole
from primus.compat.experiment import experiment, recipe_text
from primus.compat.merge import Merged, merge
from primus.compat.pretrain import ALLOW_UNMAPPED
from primus.compat.translate import refuse
from primus.compat.words import spelt
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
    parser.add_argument(
        "--primus", metavar="VERSION",
        help="whose presets complete the file, as in v25.10, or the folder of a checkout of Primus (default: the "
        "checkout that the file is in, or else the newest version that has all of the file's keys)",
    )  # fmt: skip
    parser.add_argument(
        "--effective", action="store_true", help="print Primus's merged configuration instead of a recipe"
    )
    parser.add_argument("--allow-unmapped", action="store_true", help="leave out keys that no recipe can express")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the recipe")


def run(options: argparse.Namespace) -> int:
    """Convert the file. Returns 0. Raises InputError if it is invalid or a recipe cannot express it."""
    merged = merge(options.file, os.environ, version=options.primus)
    if options.effective:
        keys = {key: {"value": one.value, "where": one.where} for key, one in merged.keys.items()}
        return _print_or_write(options, {"primus": merged.source, "keys": keys}, _effective_text(merged))
    source = experiment(merged)
    done = source.translated()
    nodes = options.nodes or source.least_nodes
    for sentence in done.left_out:
        print(sentence, file=sys.stderr)
    if not options.allow_unmapped:
        refuse(done.unmapped, ALLOW_UNMAPPED)
    for one in done.unmapped:
        print(f"left out: {one}", file=sys.stderr)
    # The recipe is resolved for a fixed GPU, because the importing machine may have none. All keys are checked anyway.
    choices = Choices(backend=source.backend, precision=done.choices["precision"], gpu="mi355x", nodes=nodes)
    try:
        recipe = resolve(source.recipe, done.words(), choices)
        files(Job(name=merged.name, recipe=recipe, output=Path("import")))
    except InputError as error:
        raise source.placed(error, done) from error
    text = recipe_text(source, done, nodes)
    document = {
        "primus": merged.source,
        "recipe": source.recipe,
        "backend": source.backend,
        "precision": done.choices["precision"],
        "nodes": nodes,
        "settings": done.settings,
        "left_out": done.left_out,
        "unmapped": [{"where": one.given.where, "key": one.given.key, "why": one.why} for one in done.unmapped],
        "effective": source.effective,
        "text": text,
    }
    return _print_or_write(options, document, text)


def _print_or_write(options: argparse.Namespace, document: Mapping[str, object], text: str) -> int:
    """With --json print ``document``, with --out write ``text``; with neither, print ``text``."""
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


def _effective_text(merged: Merged) -> str:
    """Return the whole configuration as text, each key with the place that sets it."""
    lines = [f"{key}: {spelt(one.value)}  # {one.where}\n" for key, one in sorted(merged.keys.items())]
    return f"# {merged.path.name} with the presets of {merged.source}\n{''.join(lines)}"
