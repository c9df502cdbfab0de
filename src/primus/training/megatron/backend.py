"""The rules of Megatron (megatron-core 0.16.1), and the keys that its own classes do not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from primus.recipes.mesh import Fault
from primus.recipes.recipe import Recipe
from primus.training.backend import Rules
from primus.training.megatron import render


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Settings that Megatron's own configuration classes do not have.

    ``layers`` selects Transformer Engine's layers or Megatron's own ("local"); "auto" uses Transformer Engine's on
    a GPU if it is installed. ``attention`` selects that of the local layers: torch's fused kernels, or Megatron's
    unfused one, which stores all scores of a sequence. ``torch_fsdp2`` shards weights, gradients and optimizer
    states over the data-parallel ranks, instead of optimizer states alone.
    """

    layers: Literal["auto", "local", "transformer_engine"] = "auto"
    attention: Literal["torch", "unfused"] = "torch"
    torch_fsdp2: bool = False


class _Megatron(Rules):
    memory = "primus.training.megatron.memory"

    def precision(self, recipe: Recipe) -> str:
        """Return the precision. ``model.fp8`` enables FP8 (Transformer Engine), ``model.fp8_recipe`` its MX form."""
        if recipe.section("megatron").get("model.fp8"):
            return "mxfp8" if recipe.find("megatron.model.fp8_recipe", "") == "mxfp8" else "fp8"
        return super().precision(recipe)

    def unjudged(self, recipe: Recipe) -> str | None:
        """Return the reason. The reference has two of Megatron's balancing losses."""
        kind = recipe.section("megatron").get("model.moe_router_load_balancing_type", "none")
        if kind not in ("aux_loss", "seq_aux_loss", "none"):
            return f"the reference does not balance experts by {kind}"
        return None

    def layout(self, recipe: Recipe) -> Mapping[str, Any]:
        """Return the whole layout. A checkpoint has each rank's tensors as in memory, so it fits no other one."""
        sharded = recipe.find("megatron.ddp.use_distributed_optimizer", True)
        return {
            **{f"layout.{kind}": recipe.degree(kind) for kind in ("tp", "pp", "ep")},
            "layout.virtual_pp": recipe.find("megatron.model.virtual_pipeline_model_parallel_size", 1),
            **({"layout.ranks": recipe.world_size} if sharded else {}),
            "layout.dtype": recipe.find("megatron.training.dtype", "bfloat16"),
        }

    def faults(self, recipe: Recipe) -> Iterable[Fault]:
        return render.faults(recipe)


RULES = _Megatron()
