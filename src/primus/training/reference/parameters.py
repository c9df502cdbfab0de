"""Which weights a run has, which of them it trains, and which of them moved."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from primus.recipes.architecture import Architecture
from primus.training.reference import diffusion, first
from primus.training.reference.names import BIAS, Tensors
from primus.training.reference.shapes import adapter_shapes, operations, shapes


def describe(job: Mapping[str, Any], sizes: Architecture, weights: Tensors) -> dict[str, Any]:
    """Return which parameters are missing, unexpected or of another shape; and findings about first values."""
    expected = diffusion.shapes(sizes) if sizes.family == "flux" else shapes(sizes)
    if job["mode"] == "lora":
        config = job["config"]
        expected |= adapter_shapes(sizes, int(config.get("lora.rank", 16)), config.get("lora.targets") or ())
    present = {name: tuple(tensor.shape) for name, tensor in without_bias(weights).items()}
    matrices: dict[tuple[int, ...], list[tuple[str, torch.Tensor]]] = {}
    strange = []
    for name, tensor in weights.items():
        if name.endswith(BIAS):
            continue
        if not bool(torch.isfinite(tensor).all()):
            strange.append(f"{name} is not finite")
        elif ".lora_B." in name:
            if job["first_step"] == 1 and bool(tensor.any()):
                strange.append(f"{name} is not zero, so the adapted model is not the given one")
        elif tensor.ndim > 1 and float(tensor.std()) == 0 and first.constant(job, name, tensor) is None:
            strange.append(f"{name} holds one value")
        elif tensor.ndim > 1 and ".lora_" not in name:
            same = [other for other, value in matrices.get(tuple(tensor.shape), []) if torch.equal(value, tensor)]
            strange += [f"{name} equals {other}" for other in same[:1]]
            matrices.setdefault(tuple(tensor.shape), []).append((name, tensor))
    trained = sum(tensor.numel() for name, tensor in weights.items() if is_trained(job, name))
    length = int(job["config"].get("training.seq_len", 2048))
    adapters = trained if job["mode"] == "lora" else None
    return {
        "flops": diffusion.operations(sizes) if sizes.family == "flux" else operations(sizes, length, adapters),
        "missing": sorted(set(expected) - set(present)),
        "besides": sorted(set(present) - set(expected)),
        "shapes": [f"{n}: {list(present[n])}, not {list(s)}" for n, s in expected.items() if present.get(n, s) != s],
        "first_values": strange,
        "count": sum(math.prod(shape) for shape in expected.values()),
        "trained": trained,
    }


def moved(job: Mapping[str, Any], first: Tensors, last: Tensors, moving: Collection[str]) -> dict[str, list[str]]:
    """Return trained weights that no step changed, and frozen ones that changed.

    Weights in bfloat16 may stay the same if every update is lost in rounding; ``moving`` are those that must
    change.
    """
    still = [name for name in first if is_trained(job, name) and torch.equal(first[name], last[name])]
    if kept_dtype(job) == "bfloat16":
        still = [name for name in still if name in moving]
    frozen = [name for name in first if not is_trained(job, name) and not torch.equal(first[name], last[name])]
    return {"still": still, "frozen_moved": [name for name in frozen if not name.endswith(BIAS)]}


def kept_dtype(job: Mapping[str, Any]) -> str:
    """Return the dtype of the stored weights, which may differ from that of the computation."""
    key = "training.dtype" if job["backend"] == "torchtitan" else "training.master_dtype"
    return str(job["config"].get(key, "float32"))


def is_trained(job: Mapping[str, Any], name: str) -> bool:
    """Return whether the job trains the weight ``name``: all, or with LoRA only adapters."""
    return not name.endswith(BIAS) and (job["mode"] != "lora" or ".lora_" in name)


def without_bias(weights: Tensors) -> Tensors:
    """Return ``weights`` without router biases."""
    return {name: tensor for name, tensor in weights.items() if not name.endswith(BIAS)}
