"""Options that several verbs of the image share."""

from __future__ import annotations

import argparse

from primus.cli.arguments import whole
from primus.recipes.choose import PRECISIONS, values_of
from primus.recipes.load import names
from primus.recipes.recipe import Recipe
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.turbo.optimizations import chosen, optimizations


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments RECIPE and key=value."""
    # Without intermixed parsing, argparse refuses a key=value argument that follows an option.
    parser.parse_args = parser.parse_intermixed_args  # type: ignore[method-assign]
    recipe = parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or path of its file")
    recipe.completer = complete_recipe  # type: ignore[attr-defined]
    # Without a default, argparse names it among the arguments that are required.
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="settings that override the recipe's"
    )


def complete_recipe(prefix: str, **_: object) -> list[str]:
    """Return the recipes that begin with ``prefix``, for tab completion."""
    return [name for name in names() if name.startswith(prefix)]


def complete_turbo(prefix: str, **_: object) -> list[str]:
    """Return the values of ``--turbo`` whose last name can complete ``prefix``, for tab completion."""
    before, comma, _last = prefix.rpartition(",")
    words = optimizations() if comma else ("auto", "require", "off", *optimizations())
    return [f"{before}{comma}{word}" for word in words]


def short_origin(origin: str, recipe: Recipe) -> str:
    """Return ``origin`` with paths relative to the recipe's folder."""
    return origin.replace(f"{recipe.path.parent}/", "")


def add_named(parser: argparse.ArgumentParser, choice: str, meaning: str) -> None:
    """Declare the option of one choice, with tab completion of its values."""
    action = parser.add_argument(f"--{choice}", metavar="NAME", help=meaning)
    action.completer = lambda **_: values_of(choice)  # type: ignore[attr-defined]


def add_choices(
    parser: argparse.ArgumentParser, gpu: str = "generation to resolve for (default: the machine's)"
) -> None:
    """Declare the options that select a recipe's cases, and those for settings that every backend has.

    ``gpu`` is the help of ``--gpu``.
    """
    add_named(parser, "backend", "torchtitan, megatron, finetune, flux or fsdp")
    add_named(parser, "mode", "pretrain, full or lora")
    add_named(parser, "precision", ", ".join(PRECISIONS))
    add_named(parser, "gpu", gpu)
    parser.add_argument("--nodes", type=whole(), metavar="N", help="number of machines (default: 1)")
    parser.add_argument("--proxy", action="store_true", default=None, help="train a small model with the same code")
    parser.add_argument("--ranks", type=whole(), metavar="N", help="processes per machine")
    parser.add_argument("--steps", type=whole(), metavar="N", help="number of optimizer steps")
    parser.add_argument("--seed", type=whole(), metavar="N", help="random seed for weights and data")
    turbo = parser.add_argument(
        "--turbo",
        metavar="auto|require|off|NAME,…",
        help="optimizations to use (default: auto, all that pass their self-test; see `primus turbo list`)",
    )
    turbo.completer = complete_turbo  # type: ignore[attr-defined]


def resolved(options: argparse.Namespace, *, here: bool = True) -> Recipe:
    """Resolve the recipe that the options ask for. Raises InputError. ``here``: as for ``resolve``."""
    names = ("backend", "mode", "precision", "gpu", "nodes", "proxy")
    choices = Choices(**{name: getattr(options, name) for name in names})
    single = ("ranks", "steps", "seed", "turbo")
    words = [f"{option}={value}" for option in single if (value := getattr(options, option)) is not None]
    recipe = resolve(options.recipe, [*options.overrides, *words], choices, here=here)
    chosen(recipe)  # refuses names that are none
    return recipe
