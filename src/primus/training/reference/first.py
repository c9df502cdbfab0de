"""The values that a model's weights must begin with, from each backend's documented rule."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from primus.recipes.architecture import Architecture

# The mean and the standard deviation of random numbers stay within so many standard errors of theirs.
_ERRORS = 6.0
# Standard deviation of N(0, 1) without what lies beyond ±3.
_CUT_AT_3 = 0.98658
_BIAS = ".e_score_correction_bias"
# Names of matrices whose products are added to the residual stream.
_INTO_STREAM = re.compile(r"\.(o_proj|down_proj)\.weight$")


def strange(job: Mapping[str, Any], sizes: Architecture, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Which of the first ``weights``, by canonical names, are not as the backend's rule draws them."""
    if job["config"].get("weights", "random") != "random" or job["resume_from"] or job["first_step"] != 1:
        return []
    # On a CPU, every rank of torchtitan draws the same numbers for its shard.
    copies = job["world_size"] if job["backend"] == "torchtitan" else 1
    found = []
    for name, tensor in weights.items():
        wide = tensor.double()
        if (value := constant(job, name, tensor)) is not None:
            if bool((wide != value).any()):
                found.append(f"{name} does not begin as {value:g}")
            continue
        std, count = _deviation(job, sizes, name, tensor), tensor.numel() / copies
        seen, mean = float(wide.std()), float(wide.mean())
        if abs(seen / std - 1) > _ERRORS / math.sqrt(2 * count):
            found.append(f"{name} begins with a standard deviation of {seen:.4g}, not {std:.4g}")
        elif abs(mean) > _ERRORS * std / math.sqrt(count):
            found.append(f"{name} begins with a mean of {mean:.4g}, not 0")
    return found


def constant(job: Mapping[str, Any], name: str, tensor: torch.Tensor) -> float | None:
    """The first value of each element of a weight; None where they are random."""
    if ".lora_B." in name or name.endswith(("bias", _BIAS)):
        return 0.0
    if job["backend"] == "flux" and name.startswith("proj_out."):
        return 0.0
    return 1.0 if tensor.ndim == 1 else None


def _deviation(job: Mapping[str, Any], sizes: Architecture, name: str, tensor: torch.Tensor) -> float:
    """The standard deviation of a matrix's first elements."""
    backend, config = job["backend"], job["config"]
    outer = name in ("model.embed_tokens.weight", "lm_head.weight")
    if ".lora_A." in name:
        return 1 / math.sqrt(3 * tensor.shape[-1])
    if backend == "megatron":
        usual = float(config.get("model.init_method_std", 0.02))
        if name == "model.embed_tokens.weight":
            return float(config.get("model.embedding_init_method_std", usual))
        return usual / math.sqrt(2 * sizes.layers) if _INTO_STREAM.search(name) else usual
    if backend == "torchtitan":
        if outer:
            return 1.0 if name.startswith("model.") else _CUT_AT_3 / math.sqrt(tensor.shape[-1])
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        deep = _INTO_STREAM.search(name) or name.endswith((".up_proj.weight", ".mlp.gate.weight"))
        return 0.02 / math.sqrt(2 * (int(layer[1]) + 1)) if layer and deep else 0.02
    return 0.5 / math.sqrt(tensor.shape[-1]) if outer else 0.02
