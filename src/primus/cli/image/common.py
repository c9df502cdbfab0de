"""Options that several verbs of the image share."""

from __future__ import annotations

import argparse

from primus.recipes.choose import PRECISIONS
from primus.recipes.load import names
from primus.recipes.model import Asked, Recipe
from primus.recipes.resolve import resolve

__all__ = ["add_choices", "add_recipe", "complete_recipe", "resolved", "short_origin"]


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """The recipe's name and the settings that replace its own."""
    # argparse alone takes positional words in one go: key=value after an option would be refused.
    parser.parse_args = parser.parse_intermixed_args  # type: ignore[method-assign]
    recipe = parser.add_argument("recipe", metavar="RECIPE", help="a recipe's name, or the path of its file")
    recipe.completer = complete_recipe  # type: ignore[attr-defined]
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings that replace the recipe's")


def complete_recipe(prefix: str, **_: object) -> list[str]:
    """Names for tab completion."""
    return [name for name in names() if name.startswith(prefix)]


def short_origin(origin: str, recipe: Recipe) -> str:
    """``origin`` with paths below the recipe's folder."""
    return origin.replace(f"{recipe.path.parent}/", "")


def add_choices(parser: argparse.ArgumentParser) -> None:
    """What decides which of a recipe's cases hold, and the settings that every backend has."""
    parser.add_argument("--backend", metavar="NAME", help="torchtitan, megatron, finetune, flux or fsdp")
    parser.add_argument("--mode", metavar="NAME", help="pretrain, full or lora")
    parser.add_argument("--precision", metavar="NAME", help=", ".join(PRECISIONS))
    parser.add_argument("--gpu", metavar="NAME", help="generation to resolve for (default: the machine's)")
    parser.add_argument("--nodes", type=int, metavar="N", help="machines that take part (default: 1)")
    parser.add_argument("--proxy", action="store_true", default=None, help="the small model of the same code path")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes on each machine")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of weights and data")


def resolved(options: argparse.Namespace) -> Recipe:
    """The recipe that the options ask for. Raises InputError."""
    names = ("backend", "mode", "precision", "gpu", "nodes", "proxy")
    asked = Asked(**{name: getattr(options, name) for name in names})
    flags = {what: value for what in ("ranks", "steps", "seed") if (value := getattr(options, what)) is not None}
    if not flags:
        return resolve(options.recipe, options.overrides, asked)
    # Where a backend keeps its steps and its seed is known once the backend is.
    knows = resolve(options.recipe, options.overrides, asked).knows
    words = [f"{'ranks' if what == 'ranks' else knows.key(what)}={value}" for what, value in flags.items()]
    return resolve(options.recipe, [*options.overrides, *words], asked)
