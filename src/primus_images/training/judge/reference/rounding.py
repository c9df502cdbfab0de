"""Rounding as kernels do it: to the numbers of a narrow type, inside of attention, and in FP8
products.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primus_images.yamlfile import read_values

Rounding = Callable[[Tensor], Tensor]
# What rounding alone may do, by the module that asks.
LIMITS: Mapping[str, Any] = read_values(Path(__file__).with_name("limits.yaml")).data


def exact(tensor: Tensor) -> Tensor:
    """Return the tensor without rounding."""
    return tensor


def bfloat(tensor: Tensor) -> Tensor:
    """Return the tensor rounded to bfloat16; its gradient is rounded as well."""
    return tensor.to(torch.bfloat16).to(tensor.dtype)


# The FP8 format of a product's factors → that of its gradient, with more range and fewer digits.
_OF_GRADIENTS = {
    torch.float8_e4m3fn: torch.float8_e5m2,
    torch.float8_e4m3fnuz: torch.float8_e5m2fnuz,
}


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    *,
    scale: float,
    between: Rounding,
    adding: bool,
) -> Tensor:
    """Return attention's output [samples, length, heads · size], rounded by ``between`` as in fused
    kernels.

    They round the softmax and its gradient before they multiply, and compute the latter from the
    rounded output (FlashAttention-2, arXiv:2307.08691, algorithm 2). With ``adding``, gradients of
    keys and values are added as PyTorch's kernel for CPUs does, one block of queries and one head
    of a group after the other. ``hidden`` pairs do not attend.
    """
    out: Tensor = _Attended.apply(query, key, value, hidden, scale, between, adding)
    return out.transpose(1, 2).flatten(-2)


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden: Tensor,
        scale: float,
        between: Rounding,
        adding: bool,
    ) -> Tensor:
        groups = key.shape[1]
        query = query.unflatten(1, (groups, -1))
        scores = scale * query @ key.unsqueeze(2).transpose(-1, -2)
        shares = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        narrow = between(shares)
        out = between(narrow @ value.unsqueeze(2))
        context.save_for_backward(query, key, value, shares, narrow, out)
        context.rest = scale, between, adding
        return out.flatten(1, 2)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, shares, narrow, out = context.saved_tensors
        scale, between, adding = context.rest
        gradient = gradients[0].unflatten(1, (key.shape[1], -1))
        wide = gradient @ value.unsqueeze(2).transpose(-1, -2)
        of_scores = between(shares * (wide - (out * gradient).sum(-1, keepdim=True)) * scale)
        of_query = between(of_scores @ key.unsqueeze(2))
        of_key, of_value = (
            _added(first, second, between, adding)
            for first, second in ((of_scores, query), (narrow, gradient))
        )
        return of_query.flatten(1, 2), of_key, of_value, None, None, None, None


def _added(shares: Tensor, states: Tensor, between: Rounding, adding: bool) -> Tensor:
    """Return shareᵀ × states [samples, groups, keys, size], added over queries and the heads of a
    group.
    """
    length = states.shape[-2]
    size = next(size for size, most in ((32, 192), (64, 768), (256, math.inf)) if length < most)
    if not adding or length % size:
        return between((shares.transpose(-1, -2) @ states).sum(2))
    parts = shares.unflatten(-2, (-1, size)).transpose(-1, -2) @ states.unflatten(-2, (-1, size))
    total = torch.zeros_like(parts[:, :, 0, 0])
    for part in parts.flatten(2, 3).unbind(2):
        total = between(total + part)
    return total


def multiplied(
    states: Tensor, weight: Tensor, eight: torch.dtype, *, one_format: bool, wide: str
) -> Tensor:
    """Return states × weightᵀ with factors rounded to ``eight``, each scaled by its largest value.

    ``one_format`` and ``wide`` are those of :class:`.model.Constants`.
    """
    if one_format:
        back = eight
    else:
        back = _OF_GRADIENTS[eight]
    return _EightBits.apply(states, weight, eight, back, wide)


class _EightBits(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        states: Tensor,
        weight: Tensor,
        eight: torch.dtype,
        back: torch.dtype,
        wide: str,
    ) -> Tensor:
        narrow = _scaled(states, eight), _scaled(weight, eight)
        context.save_for_backward(
            states if wide == "gradients of weights" else narrow[0],
            weight if wide == "gradients of states" else narrow[1],
        )
        context.back = back
        context.wide = wide
        if wide == "outputs":
            return states @ weight.T
        return narrow[0] @ narrow[1].T

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = context.saved_tensors
        narrow = _scaled(gradient, context.back)
        if context.wide == "gradients of states":
            for_states = gradient
        else:
            for_states = narrow
        if context.wide == "gradients of weights":
            for_weight = gradient
        else:
            for_weight = narrow
        return (
            for_states @ weight,
            for_weight.flatten(0, -2).T @ states.flatten(0, -2),
            None,
            None,
            None,
        )


def _scaled(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    scale = torch.finfo(dtype).max / tensor.abs().amax().clamp(min=1e-12)
    return (tensor * scale).to(torch.float32).to(dtype).to(tensor.dtype) / scale
