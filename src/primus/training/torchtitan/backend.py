"""The rules of torchtitan 0.2.2. Its ranks read a TOML file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from primus.recipes.known import CPU
from primus.recipes.mesh import Fault
from primus.recipes.recipe import Recipe
from primus.training.backend import DTYPES, Rules
from primus.training.torchtitan import render

if TYPE_CHECKING:
    from primus.training.job import Job

_FILE = "torchtitan.toml"


_DTYPE = "torchtitan.training.dtype"


class _Torchtitan(Rules):
    memory = "primus.training.torchtitan.memory"
    divides_documents = True

    def precision(self, recipe: Recipe) -> str:
        """Converters replace linear layers, and determine their precision.

        Without a converter, it is ``mixed_precision_param`` (default bfloat16). FSDP2 gathers weights in this dtype,
        and autocast uses it if nothing is sharded. If all ranks share layers and none is left for FSDP, torchtitan
        computes in ``training.dtype`` and logs a warning (``maybe_enable_amp``).
        """
        converters = recipe.section("torchtitan").get("model.converters")
        names = [str(name) for name in converters] if isinstance(converters, list) else []
        if any(name.endswith("linear.mx") for name in names):
            return recipe.find("torchtitan.quantize.linear.mx.recipe_name", "mxfp8").partition("_")[0]
        if any(name.endswith("linear.float8") for name in names):
            return "fp8"
        key, default = ("dtype", "float32") if recipe.unsharded else ("mixed_precision_param", "bfloat16")
        dtype = recipe.find(f"torchtitan.training.{key}", default)
        return DTYPES.get(dtype, dtype)

    def compiled(self, recipe: Recipe) -> bool:
        parts = recipe.section("torchtitan").get("compile.components", ["model", "loss"])
        return recipe.find("torchtitan.compile.enable", False) and isinstance(parts, list) and "model" in parts

    def faults(self, recipe: Recipe) -> Iterable[Fault]:
        """Return layouts in which torchtitan 0.2.2 computes something else, or which its CPU path lacks."""
        replicas, context = (f"torchtitan.{recipe.knows.degrees[kind]}" for kind in ("replicas", "cp"))
        shards = recipe.world_size // math.prod(recipe.degree(kind) for kind in ("tp", "pp", "cp", "replicas"))
        if recipe.degree("replicas") > 1 and shards * recipe.degree("cp") == 1:
            # github.com/pytorch/torchtitan/pull/2323. FSDP does not divide them.
            why = "without FSDP, torchtitan 0.2.2 divides gradients by the number of replicas once too often"
            yield replicas, why, "replicas=1, or more ranks than replicas"
        if recipe.degree("cp") > 1 and recipe.gpu == CPU:
            yield context, "PyTorch's attention on the CPU cannot split sequences over ranks", "cp=1"
        if recipe.unsharded and recipe.precision in ("fp8", "mxfp8") and recipe.find(_DTYPE, "float32") == "float32":
            why = "where ranks share layers and none shards them, all but the FP8 products would be in float32"
            yield "precision", why, "leave ranks to data or context parallelism"
        if recipe.find("torchtitan.optimizer.early_step_in_backward", False):
            why = "torchtitan steps before it can clip gradients or measure their norm"
            yield "torchtitan.optimizer.early_step_in_backward", why, "optimizer.early_step_in_backward=false"
        if recipe.find("torchtitan.training.enable_cpu_offload", False) and recipe.gpu == CPU:
            why = "the weights are on the CPU already"
            yield "torchtitan.training.enable_cpu_offload", why, "training.enable_cpu_offload=false"

    def unjudged(self, recipe: Recipe) -> str | None:
        """Return the reason. The reference reads one rank's weights of one pipeline stage, and scales FP8 by tensor."""
        if recipe.degree("pp") > 1:
            return "the run has pipeline stages"
        kind = recipe.find("torchtitan.quantize.linear.float8.recipe_name", "tensorwise")
        if recipe.precision == "fp8" and kind not in ("", "tensorwise"):
            return f"the reference rounds to FP8 by tensors, not {kind}"
        return None

    def blocks_judged(self, recipe: Recipe) -> bool:
        """Whether it can. Without FSDP, one rank uses autocast, which keeps what blocks pass on in float32."""
        autocast = recipe.world_size == 1 and recipe.precision != "fp32" and recipe.find(_DTYPE, "float32") == "float32"
        return super().blocks_judged(recipe) and not autocast

    def layout(self, recipe: Recipe) -> Mapping[str, Any]:
        """Return the number of data-parallel ranks, because each has its own place in the data."""
        return {"data_parallel": recipe.data_parallel}

    def files(self, job: Job) -> Mapping[str, str]:
        return {_FILE: render.toml(job)}

    def arguments(self, job: Job) -> list[str]:
        return ["--job.config_file", str(job.output / _FILE)]


RULES = _Torchtitan()
