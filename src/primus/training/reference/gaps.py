"""Relative errors of gradients, by kind of tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from primus.training.reference.names import Tensors, kind_of


def scales_of(gradients: Tensors) -> dict[str, float]:
    """Return the scale of each tensor's error: its own length, or a thousandth of the length of all gradients."""
    lengths = {name: float(gradient.norm()) for name, gradient in gradients.items()}
    least = 1e-3 * math.sqrt(sum(length**2 for length in lengths.values()))
    return {name: max(length, least) or 1.0 for name, length in lengths.items()}


def gaps_of(run: Mapping[str, torch.Tensor], own: Tensors, scales: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Return the largest relative error of a gradient, with its tensor's name, for each kind (a name without
    numbers).

    Tensors of a kind are similar in all layers and experts, so the noise of some predicts that of the others.
    """
    worst: dict[str, tuple[float, str]] = {}
    for name, wanted in own.items():
        if name in run:
            kind, gap = kind_of(name), float((run[name].to(wanted.dtype) - wanted).norm()) / scales[name]
            worst[kind] = max(worst.get(kind, (0.0, "")), (gap if math.isfinite(gap) else 1e9, name))
    return worst


def typical(gaps: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the root mean square of the gaps under several roundings, and the tensor with the largest one."""
    return math.sqrt(sum(gap**2 for gap, _ in gaps) / len(gaps)), max(gaps)[1]
