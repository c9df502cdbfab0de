"""The behaviour of a backend that ``backends.yaml`` cannot express, found by the backend's name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from primus.recipes.memory import Memory
    from primus.recipes.recipe import Recipe
    from primus.training.backend import Rules


class MemoryModel(Protocol):
    """A module that predicts the memory of one rank of a backend, in bytes."""

    def predict(self, recipe: Recipe, batch: int) -> Memory:
        """Predict the peak with micro-batches of ``batch``."""

    def least(self, recipe: Recipe, *, offload: bool) -> float:
        """Return the size of weights, gradients and optimizer states. ``offload``: states on the host do not count."""


def rules_of(recipe: Recipe) -> Rules:
    """Return the rules of the recipe's backend: ``RULES`` of the module ``primus.training.NAME.backend``."""
    return cast("Rules", import_module(f"primus.training.{recipe.backend}.backend").RULES)


def memory_of(recipe: Recipe) -> MemoryModel:
    """Return the memory model that the rules of the recipe's backend name."""
    return cast("MemoryModel", import_module(rules_of(recipe).memory))
