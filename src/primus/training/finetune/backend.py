"""The rules of fine-tuning: the initial weights must be those of the recipe's model."""

from __future__ import annotations

from primus.recipes.recipe import Recipe
from primus.training.backend import Rules
from primus.training.finetune import hub


class _Finetune(Rules):
    def check_weights(self, recipe: Recipe) -> None:
        if recipe.weights is not None:
            where = recipe.settings["finetune.weights"].origin
            hub.check(recipe.weights, recipe.architecture, recipe.seq_len, where)


RULES = _Finetune()
