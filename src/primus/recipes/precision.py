"""Deriving the precision of a recipe from its settings, not from a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from primus.recipes.recipe import Recipe

__all__ = ["derived_precision", "unsharded"]

_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def derived_precision(recipe: Recipe) -> str:
    """Return the precision of the linear layers' matrix products, derived from the backend's own settings."""
    return _RULES[recipe.backend](recipe)


def _torchtitan(recipe: Recipe) -> str:
    """Return the precision of torchtitan 0.2.2.

    ``mixed_precision_param`` (default bfloat16) is the dtype in which FSDP2 gathers weights, or that of autocast if
    nothing is sharded. Converters then replace linear layers. If all ranks share layers and none is left for FSDP,
    torchtitan computes in ``training.dtype`` and logs a warning (``maybe_enable_amp``).
    """
    converters = recipe.section("torchtitan").get("model.converters")
    names = [str(name) for name in converters] if isinstance(converters, list) else []
    if any(name.endswith("linear.mx") for name in names):
        return str(recipe.find("torchtitan.quantize.linear.mx.recipe_name", "mxfp8")).partition("_")[0]
    if any(name.endswith("linear.float8") for name in names):
        return "fp8"
    key, default = ("dtype", "float32") if unsharded(recipe) else ("mixed_precision_param", "bfloat16")
    dtype = recipe.find(f"torchtitan.training.{key}", default)
    return _DTYPES.get(dtype, dtype)


def unsharded(recipe: Recipe) -> bool:
    """Whether ranks share layers (TP, PP) and none is left to shard weights over by data or context parallelism."""
    shards = recipe.data_parallel // recipe.degree("replicas") * recipe.degree("cp")
    return shards == 1 and recipe.degree("tp") * recipe.degree("pp") > 1


def _loop(recipe: Recipe) -> str:
    if recipe.find(f"{recipe.backend}.training.fp8", "none") != "none":
        return "fp8"
    dtype = recipe.find(f"{recipe.backend}.training.dtype", "bfloat16")
    return _DTYPES.get(dtype, dtype)


def _megatron(recipe: Recipe) -> str:
    """Return Megatron's precision: ``model.fp8`` enables FP8 (Transformer Engine), ``model.fp8_recipe`` its MX form."""
    if recipe.section("megatron").get("model.fp8"):
        return "mxfp8" if recipe.find("megatron.model.fp8_recipe", "") == "mxfp8" else "fp8"
    return _loop(recipe)


_RULES: Mapping[str, Callable[[Recipe], str]] = {
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "finetune": _loop,
    "flux": _loop,
    "fsdp": _loop,
}
