"""The rules of FLUX. Its data are latents; its weights are those of diffusers' transformer."""

from __future__ import annotations

from primus.recipes.recipe import Recipe
from primus.training.backend import Rules
from primus.training.flux import cache


class _Flux(Rules):
    def check_data(self, recipe: Recipe) -> None:
        if (folder := recipe.asset("corpus")) is not None:
            cache.check(folder, recipe.architecture.dit)

    def check_weights(self, recipe: Recipe) -> None:
        if recipe.weights is not None:
            cache.check_weights(recipe.weights, recipe.architecture, recipe.settings["flux.weights"].origin)


RULES = _Flux()
