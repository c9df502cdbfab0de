"""Steps that several verbs of the image share."""

import argparse
from collections.abc import Sequence

from primus.recipes.recipe import Recipe
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.turbo.optimizations import chosen, optimizations


def short_origin(origin: str, recipe: Recipe) -> str:
    """Return ``origin`` with paths relative to the recipe's folder."""
    return origin.replace(f"{recipe.path.parent}/", "")


def turbo_names() -> Sequence[str]:
    """Return the values of ``--turbo``."""
    return ("auto", "require", "off", *optimizations())


def resolved(options: argparse.Namespace, *, here: bool = True, memory: float | None = None) -> Recipe:
    """Resolve the recipe that the options ask for. Raises InputError. ``here`` and ``memory``: as for ``resolve``."""
    named = ("backend", "mode", "precision", "gpu", "nodes", "proxy")
    choices = Choices(**{name: getattr(options, name) for name in named})
    single = ("ranks", "steps", "seed", "turbo")
    words = [f"{option}={value}" for option in single if (value := getattr(options, option)) is not None]
    recipe = resolve(options.recipe, [*options.overrides, *words], choices, here=here, memory=memory)
    chosen(recipe)  # refuses names that are none
    return recipe
