"""The rules of Megatron (megatron-core 0.16.1)."""

from __future__ import annotations

from collections.abc import Iterable

from primus.recipes.mesh import Fault
from primus.recipes.recipe import Recipe
from primus.training.backend import Rules
from primus.training.megatron import render


class _Megatron(Rules):
    memory = "primus.training.megatron.memory"

    def precision(self, recipe: Recipe) -> str:
        """``model.fp8`` enables FP8 (Transformer Engine), and ``model.fp8_recipe`` its MX form."""
        if recipe.section("megatron").get("model.fp8"):
            return "mxfp8" if recipe.find("megatron.model.fp8_recipe", "") == "mxfp8" else "fp8"
        return super().precision(recipe)

    def faults(self, recipe: Recipe) -> Iterable[Fault]:
        return render.faults(recipe)


RULES = _Megatron()
