"""Rounding as kernels do it: to a narrow type, inside of attention, and in FP8 products."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A fused kernel of attention, which rounds by ``between``.

    ``hidden`` pairs do not attend. With ``adding``, gradients of keys and values are added as
    PyTorch's kernel for CPUs does, one block of queries and one head of a group after the other.
    """

    hidden: Tensor
    scale: float
    between: Rounding
    adding: bool = False


def attended(query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> Tensor:
    """Return attention's output [samples, length, heads · size], rounded as in fused kernels.

    They round the softmax and its gradient before they multiply, and compute the latter from the
    rounded output (FlashAttention-2, arXiv:2307.08691, algorithm 2).
    """
    out: Tensor = _Attended.apply(query, key, value, kernel)
    return out.transpose(1, 2).flatten(-2)


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> Tensor:
        groups = key.shape[1]
        query = query.unflatten(1, (groups, -1))
        of_group = key.unsqueeze(2)
        scores = kernel.scale * query @ of_group.transpose(-1, -2)
        scores.masked_fill_(kernel.hidden, -torch.inf)
        shares = scores.softmax(-1)
        narrow = kernel.between(shares)
        out = kernel.between(narrow @ value.unsqueeze(2))
        context.save_for_backward(query, key, value, shares, narrow, out)
        context.kernel = kernel
        return out.flatten(1, 2)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, shares, narrow, out = context.saved_tensors
        kernel = context.kernel
        groups = key.shape[1]
        gradient = gradients[0].unflatten(1, (groups, -1))
        value_of_group = value.unsqueeze(2)
        wide = gradient @ value_of_group.transpose(-1, -2)
        along = (out * gradient).sum(-1, keepdim=True)
        of_scores = kernel.between(shares * (wide - along) * kernel.scale)
        key_of_group = key.unsqueeze(2)
        of_query = kernel.between(of_scores @ key_of_group)
        of_key = _added(of_scores, query, kernel)
        of_value = _added(narrow, gradient, kernel)
        return of_query.flatten(1, 2), of_key, of_value, None


def _added(shares: Tensor, states: Tensor, kernel: Kernel) -> Tensor:
    """Return shareᵀ × states [samples, groups, keys, size], the sum over queries and heads."""
    length = states.shape[-2]
    size = _block_size(length)
    if not kernel.adding or length % size:
        products = shares.transpose(-1, -2) @ states
        return kernel.between(products.sum(2))
    blocks = shares.unflatten(-2, (-1, size)).transpose(-1, -2)
    parts = blocks @ states.unflatten(-2, (-1, size))
    total = torch.zeros_like(parts[:, :, 0, 0])
    for part in parts.flatten(2, 3).unbind(2):
        total = kernel.between(total + part)
    return total


def _block_size(length: int) -> int:
    if length < 192:
        return 32
    if length < 768:
        return 64
    return 256


# The FP8 format of a product's factors → that of its gradient, with more range and fewer digits.
_OF_GRADIENTS = {
    torch.float8_e4m3fn: torch.float8_e5m2,
    torch.float8_e4m3fnuz: torch.float8_e5m2fnuz,
}


@dataclass(frozen=True, kw_only=True)
class EightBits:
    """FP8 products, whose factors have the format ``dtype``.

    ``one_format`` and ``wide`` are those of :class:`.model.Constants`.
    """

    dtype: torch.dtype
    one_format: bool = False
    wide: str = ""


def multiplied(states: Tensor, weight: Tensor, eight: EightBits) -> Tensor:
    """Return states × weightᵀ with factors rounded to FP8, each scaled by its largest value."""
    product: Tensor = _Multiplied.apply(states, weight, eight)
    return product


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, states: Tensor, weight: Tensor, eight: EightBits) -> Tensor:
        narrow_states = _scaled(states, eight.dtype)
        narrow_weight = _scaled(weight, eight.dtype)
        context.eight = eight
        if eight.wide == "gradients of states":
            context.save_for_backward(narrow_states, weight)
        else:
            context.save_for_backward(narrow_states, narrow_weight)
        if eight.wide == "outputs":
            return states @ weight.T
        return narrow_states @ narrow_weight.T

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = context.saved_tensors
        eight = context.eight
        dtype = _OF_GRADIENTS[eight.dtype]
        if eight.one_format:
            dtype = eight.dtype
        narrow = _scaled(gradient, dtype)
        of_weight = narrow.flatten(0, -2).T @ states.flatten(0, -2)
        if eight.wide == "gradients of states":
            return gradient @ weight, of_weight, None
        return narrow @ weight, of_weight, None


def _scaled(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    largest = tensor.abs().amax()
    scale = torch.finfo(dtype).max / largest.clamp(min=1e-12)
    scaled = (tensor * scale).to(torch.float32)
    rounded = scaled.to(dtype)
    return rounded.to(tensor.dtype) / scale
