"""What a backend computes from a recipe, where ``backends.yaml`` is not enough: one module per backend that differs.

Rules need no torch. What starts a run of a backend is in ``primus.training``, which imports this; never the reverse.
"""

from __future__ import annotations

from collections.abc import Mapping

from primus.recipes.recipe import Recipe
from primus.recipes.rules.loop import Rules
from primus.recipes.rules.megatron import Megatron
from primus.recipes.rules.torchtitan import Torchtitan

RULES: Mapping[str, Rules] = {
    "torchtitan": Torchtitan(),
    "megatron": Megatron(),
    "finetune": Rules(),
    "flux": Rules(),
    "fsdp": Rules(),
}


def rules_of(recipe: Recipe) -> Rules:
    """Return the rules of the recipe's backend."""
    return RULES[recipe.backend]
