"""Turn an experiment file of Primus into a recipe. Every key that no recipe can say is named with its place."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from primus.compat.experiment import experiment, recipe_text
from primus.compat.pretrain import ALLOW_UNMAPPED
from primus.compat.translate import refuse
from primus.errors import HostError, InputError
from primus.recipes.model import Asked
from primus.recipes.resolve import resolve

__all__ = ["EXAMPLE", "add_arguments", "run"]

EXAMPLE = "primus import-exp my-experiment.yaml --out my-recipe.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", type=Path, metavar="FILE", help="an experiment: modules.pre_trainer with overrides")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the recipe goes (default: standard output)")
    parser.add_argument("--allow-unmapped", action="store_true", help="leave out what no recipe can say")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the recipe")


def run(options: argparse.Namespace) -> int:
    """Read, translate, write. Returns 0; raises InputError for what cannot be said."""
    source = experiment(options.file, os.environ)
    done = source.translated()
    for sentence in done.left_out:
        print(sentence, file=sys.stderr)
    if not options.allow_unmapped:
        refuse(done.unmapped, ALLOW_UNMAPPED)
    for one in done.unmapped:
        print(f"left out: {one}", file=sys.stderr)
    # A GPU is named, since the machine that imports need not have one; the keys are judged either way.
    asked = Asked(backend=source.backend, precision=done.choices["precision"], gpu="mi355x")
    resolve(source.recipe, done.words(), asked)
    text = recipe_text(source, done)
    if options.json:
        import json

        document = {
            "recipe": source.recipe,
            "backend": source.backend,
            "precision": done.choices["precision"],
            "settings": done.settings,
            "left_out": done.left_out,
            "unmapped": [{"where": one.given.where, "key": one.given.key, "why": one.why} for one in done.unmapped],
            "text": text,
        }
        print(json.dumps(document, indent=2, ensure_ascii=False))
    elif options.out is None:
        print(text, end="")
    if options.out is not None:
        if options.out.exists():
            raise InputError(f"{options.out} is there already", hint="choose another --out, or delete it")
        try:
            options.out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise HostError(f"cannot write {options.out}: {error.strerror}", hint="choose another --out") from error
    return 0
