"""Options that several verbs of the image share."""

import argparse
import re

from primus.cli.verb import Option, count, flag, matching, option
from primus.recipes.choose import PRECISIONS, values_of
from primus.recipes.load import names
from primus.recipes.recipe import Recipe
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.turbo.optimizations import chosen, optimizations


def _intermixed(parser: argparse.ArgumentParser) -> None:
    # Without intermixed parsing, argparse refuses a key=value argument that follows an option.
    parser.parse_args = parser.parse_intermixed_args  # type: ignore[method-assign]


complete_recipe = matching(names)
OVERRIDES = (
    _intermixed,
    # Without a default, argparse names it among the arguments that are required.
    option("overrides", metavar="key=value", nargs="*", default=[], help="settings that override the recipe's"),
)
RECIPE = (
    option("recipe", metavar="RECIPE", help="name of a recipe, or path of its file", complete=complete_recipe),
    *OVERRIDES,
)


def short_origin(origin: str, recipe: Recipe) -> str:
    """Return ``origin`` with paths relative to the recipe's folder."""
    return origin.replace(f"{recipe.path.parent}/", "")


def choice(name: str, meaning: str) -> Option:
    """Return the option of one choice, with tab completion of its values."""
    return option(f"--{name}", metavar="NAME", help=meaning, complete=lambda **_: values_of(name))


def duration(text: str) -> float:
    """Parse a time with its unit, such as ``90m``, into seconds."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?)([smhd])", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"must be a duration such as 90m, 12h or 2d, not {text[:40]!r}")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def choices(gpu: str = "generation to resolve for (default: the machine's)") -> tuple[Option, ...]:
    """Return the options that select a recipe's cases, and those for settings that every backend has.

    ``gpu`` is the help of ``--gpu``.
    """
    return (
        choice("backend", "torchtitan, megatron, finetune, flux or fsdp"),
        choice("mode", "pretrain, full or lora"),
        choice("precision", ", ".join(PRECISIONS)),
        choice("gpu", gpu),
        count("--nodes", "number of machines (default: 1)", least=None),
        flag("--proxy", "train a small model with the same code", default=None),
        count("--ranks", "processes per machine", least=None),
        count("--steps", "number of optimizer steps", least=None),
        count("--seed", "random seed for weights and data", least=None),
        option(
            "--turbo",
            metavar="auto|require|off|NAME,…",
            help="optimizations to use (default: auto, all that pass their self-test; see `primus show RECIPE`)",
            complete=lambda **_: ("auto", "require", "off", *optimizations()),
        ),
    )


def resolved(options: argparse.Namespace, *, here: bool = True, memory: float | None = None) -> Recipe:
    """Resolve the recipe that the options ask for. Raises InputError. ``here`` and ``memory``: as for ``resolve``."""
    named = ("backend", "mode", "precision", "gpu", "nodes", "proxy")
    choices = Choices(**{name: getattr(options, name) for name in named})
    single = ("ranks", "steps", "seed", "turbo")
    words = [f"{option}={value}" for option in single if (value := getattr(options, option)) is not None]
    recipe = resolve(options.recipe, [*options.overrides, *words], choices, here=here, memory=memory)
    chosen(recipe)  # refuses names that are none
    return recipe
