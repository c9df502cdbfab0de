"""The rules of each backend, found by its name: ``RULES`` of the module ``primus.training.NAME.backend``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from primus.recipes.recipe import Recipe
    from primus.training.backend import Rules

__all__ = ["rules_of"]


def rules_of(recipe: Recipe) -> Rules:
    """Return the rules of the recipe's backend."""
    return cast("Rules", import_module(f"primus.training.{recipe.backend}.backend").RULES)
