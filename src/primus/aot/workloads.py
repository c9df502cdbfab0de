"""The inputs of the catalogue's entries, and the same computations in plain PyTorch for comparison."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from primus.aot.catalogue import Case

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How to run and verify one entry.

    ``inputs`` creates the tensors of a case on a device. ``fused`` calls the library's entry with them, and
    ``reference`` computes the same; both get ``options`` as keywords. ``largest_error`` is the largest allowed
    difference of output and gradients, relative to the reference's largest value.
    """

    inputs: Callable[[Case, str], Tensors]
    fused: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    options: Callable[[Case], dict[str, Any]] = lambda _: {}
    largest_error: float = 0.02


def call(case: Case, inputs: Tensors) -> torch.Tensor:
    """Call the library for ``case``. Returns its output, ready for ``backward``."""
    module, _, name = case.kernel.entry.partition(":")
    entry = getattr(importlib.import_module(module), name)
    return WORKLOADS[case.kernel.test].fused(entry, *inputs, **WORKLOADS[case.kernel.test].options(case))


def _random(case: Case, device: str, *size: int, scale: float = 1.0) -> torch.Tensor:
    made = torch.randn(size, dtype=getattr(torch, case.dtype), device=device)
    return (made * scale).requires_grad_()


def _norm_inputs(case: Case, device: str) -> Tensors:
    hidden = case.shape.hidden
    return _random(case, device, case.batch, case.sequence, hidden), _random(case, device, hidden)


def _norm(entry: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(entry.apply(x, weight, 1e-5, 0.0, "llama", False))


def _norm_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), 1e-5)


def _rope_inputs(case: Case, device: str) -> Tensors:
    shape = case.shape
    # The memory layout of the projections, with the dimensions in Hugging Face's order.
    q, k = (
        _random(case, device, case.batch, case.sequence, heads, shape.head_dim).detach().transpose(1, 2)
        for heads in (shape.heads, shape.kv_heads)
    )
    places = torch.arange(case.sequence, device=device, dtype=torch.float32)
    rates = 500000.0 ** (-torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim)
    angles = torch.outer(places, rates).repeat(1, 2)[None]
    cos, sin = (made.to(getattr(torch, case.dtype)) for made in (angles.cos(), angles.sin()))
    return q.requires_grad_(), k.requires_grad_(), cos, sin


def _rope(entry: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    # The kernel overwrites its inputs.
    q, k = entry.apply(q.clone(), k.clone(), cos, sin)
    return torch.cat((q, k), dim=1)


def _rope_reference(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x = torch.cat((q, k), dim=1).float()
    left, right = x.chunk(2, dim=-1)
    return x * cos.float()[:, None] + torch.cat((-right, left), dim=-1) * sin.float()[:, None]


def _swiglu_inputs(case: Case, device: str) -> Tensors:
    size = (case.batch, case.sequence, case.shape.ffn)
    return _random(case, device, *size), _random(case, device, *size)


def _swiglu(entry: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(entry.apply(gate, up))


def _swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate.float()) * up.float()


def _loss_inputs(case: Case, device: str) -> Tensors:
    tokens, shape = case.batch * case.sequence, case.shape
    targets = torch.randint(0, shape.vocab, (tokens,), device=device)
    if case.ignored:
        targets[: case.ignored] = -100
    scale = shape.hidden**-0.5
    return (
        _random(case, device, tokens, shape.hidden),
        _random(case, device, shape.vocab, shape.hidden, scale=scale).detach().requires_grad_(),
        targets,
    )


def _loss(entry: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, reduction: str) -> torch.Tensor:
    return torch.as_tensor(entry.apply(x, weight, targets, None, None, -100, 0.0, 0.0, reduction)[0])


def _loss_reference(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, reduction: str) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(x.float() @ weight.float().t(), targets, reduction=reduction)


def _attention_inputs(case: Case, device: str) -> Tensors:
    shape = case.shape
    counts = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (_random(case, device, case.batch, case.sequence, heads, shape.head_dim) for heads in counts)
    return q, k, v


def _attention(entry: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    # Arguments: dropout, scale, causal, window, soft cap, ALiBi, deterministic, return softmax, gradients.
    return torch.as_tensor(entry.apply(q, k, v, 0.0, None, True, (-1, -1), 0.0, None, False, False, True))


def _attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads = [t.float().transpose(1, 2) for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


WORKLOADS = {
    "rms_norm": Workload(inputs=_norm_inputs, fused=_norm, reference=_norm_reference),
    "rope": Workload(inputs=_rope_inputs, fused=_rope, reference=_rope_reference),
    "swiglu": Workload(inputs=_swiglu_inputs, fused=_swiglu, reference=_swiglu_reference),
    "fused_linear_cross_entropy": Workload(
        inputs=_loss_inputs,
        fused=_loss,
        reference=_loss_reference,
        options=lambda case: {"reduction": case.reduction},
        # The library sums the gradient of the weight over chunks in bfloat16.
        largest_error=0.05,
    ),
    "flash_attention": Workload(inputs=_attention_inputs, fused=_attention, reference=_attention_reference),
}
