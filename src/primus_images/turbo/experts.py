"""Send tokens to the experts that the router chose, multiply by their weights and add up the
results.

torchtitan copies each row four times on its way to the experts, and PyTorch's gradient of such a
copy sorts the indices again. Here one kernel gathers rows and another adds them up. Each kernel
computes the gradient of the other.

Products are QuACK's (quack-kernels, a requirement of Flash Attention 4). PyTorch's grouped product
assigns tiles to all SMs before it starts, so it takes twice as long while NCCL holds a few of them,
as FSDP's collectives do in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from primus_images.turbo.optimizations import CALLS

ALIGNMENT = 8
"""The rows of each expert start at a multiple of this: PyTorch's grouped products need 16 bytes."""


class Routes(NamedTuple):
    """Which row of the experts' input holds each choice of a token.

    ``rows`` [tokens, choices] int32: the row of each choice. ``choices`` [all rows] int32: the
    choice in each row, as token × choices per token + index of the choice; -1 in padding.
    ``counts`` [experts] int32: the rows of each expert, padding included, a multiple of
    :data:`ALIGNMENT` and never 0.
    """

    rows: Tensor
    choices: Tensor
    counts: Tensor


@torch.no_grad()
def routes(selected: Tensor, counts: Tensor) -> Routes:
    """Return the routes for ``selected`` [tokens, choices], the index of each chosen expert.

    ``counts`` [experts]: how many choices each expert has.
    """
    flat = selected.reshape(-1).to(torch.int32)
    counts = counts.to(torch.int64)
    padded = (counts.clamp(min=1) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    padded_starts = padded.cumsum(0) - padded
    starts = counts.cumsum(0) - counts
    shift = padded_starts - starts
    experts, order = torch.sort(flat, stable=True)
    places = torch.arange(len(flat), device=flat.device) + shift[experts]
    rows = torch.empty_like(flat)
    rows[order] = places.to(torch.int32)
    most = len(flat) + len(counts) * ALIGNMENT
    choices = torch.full((most,), -1, dtype=torch.int32, device=flat.device)
    choices[places] = order.to(torch.int32)
    return Routes(rows.view_as(selected), choices, padded.to(torch.int32))


@triton.jit
def _spread(
    x,
    choices,
    weights,
    experts,
    out,
    gradient,
    width,
    PER_TOKEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(choices + row).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    used = (offsets < width) & (choice >= 0)
    token = tl.maximum(choice, 0) // PER_TOKEN
    values = tl.load(x + token * width + offsets, mask=used, other=0.0)
    if WEIGHTED:
        wide = values.to(tl.float32)
        of_expert = tl.load(experts + row * width + offsets, mask=used, other=0.0).to(tl.float32)
        weight = tl.load(weights + tl.maximum(choice, 0))
        if choice >= 0:
            tl.store(gradient + choice, tl.sum(wide * of_expert, axis=0))
        values = (wide * weight).to(out.dtype.element_ty)
    tl.store(out + row * width + offsets, values, mask=offsets < width)


@triton.jit
def _add_up(
    experts,
    rows,
    weights,
    base,
    out,
    width,
    PER_TOKEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    total = tl.zeros([BLOCK], tl.float32)
    for which in tl.static_range(PER_TOKEN):
        row = tl.load(rows + token * PER_TOKEN + which).to(tl.int64)
        values = tl.load(experts + row * width + offsets, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + token * PER_TOKEN + which)
        total += values
    if BASED:
        total += tl.load(base + token * width + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + offsets, total.to(out.dtype.element_ty), mask=inside)


def _gathered(x: Tensor, routing: Routes) -> Tensor:
    """Return the token of each row, and zeros in rows of padding."""
    width = x.shape[1]
    per_token = routing.rows.shape[1]
    if not x.is_cuda:
        padding = x.new_zeros(1, width)
        tokens = torch.where(routing.choices >= 0, routing.choices // per_token, len(x))
        return torch.cat((x, padding))[tokens.long()]
    out = x.new_empty(len(routing.choices), width)
    block = triton.next_power_of_2(width)
    _spread[(len(out),)](
        x,
        routing.choices,
        x,
        x,
        out,
        x,
        width,
        PER_TOKEN=per_token,
        WEIGHTED=False,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out


def _summed(
    experts: Tensor, routing: Routes, weights: Tensor | None, base: Tensor | None
) -> Tensor:
    """Return the weighted sum of each token's rows, and ``base``, added in float32."""
    width = experts.shape[1]
    tokens, per_token = routing.rows.shape
    if not experts.is_cuda:
        values = experts[routing.rows.long()].float()
        if weights is not None:
            values = values * weights[:, :, None]
        total = values.sum(1)
        if base is not None:
            total = total + base.float()
        return total.to(experts.dtype)
    out = experts.new_empty(tokens, width)
    block = triton.next_power_of_2(width)
    _add_up[(tokens,)](
        experts,
        routing.rows,
        experts if weights is None else weights,
        experts if base is None else base,
        out,
        width,
        PER_TOKEN=per_token,
        WEIGHTED=weights is not None,
        BASED=base is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out


def _weighted_back(
    gradient: Tensor, experts: Tensor, weights: Tensor, routing: Routes
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the experts' rows and of the weights."""
    width = experts.shape[1]
    per_token = routing.rows.shape[1]
    if not experts.is_cuda:
        spread = _gathered(gradient, routing).float()
        no_weight = weights.new_zeros(1)
        factors = torch.cat((weights.reshape(-1), no_weight))[routing.choices.long()]
        dots = (spread * experts.float()).sum(1)
        of_experts = (spread * factors[:, None]).to(experts.dtype)
        return of_experts, dots[routing.rows.long()].to(weights.dtype)
    out = torch.empty_like(experts)
    dots = torch.empty_like(weights)
    block = triton.next_power_of_2(width)
    _spread[(len(out),)](
        gradient,
        routing.choices,
        weights,
        experts,
        out,
        dots,
        width,
        PER_TOKEN=per_token,
        WEIGHTED=True,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out, dots


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *routing: Tensor) -> Tensor:
        ctx.save_for_backward(*routing)
        return _gathered(x.contiguous(), Routes(*routing))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        routing = Routes(*ctx.saved_tensors)
        of_x = _summed(grads[0].contiguous(), routing, None, None)
        return of_x, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, experts: Tensor, weights: Tensor, base: Tensor | None, *routing: Tensor
    ) -> Tensor:
        experts = experts.contiguous()
        weights = weights.contiguous()
        ctx.save_for_backward(experts, weights, *routing)
        ctx.based = base is not None
        if base is not None:
            base = base.contiguous()
        return _summed(experts, Routes(*routing), weights, base)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        experts, weights, *routing = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_experts, of_weights = _weighted_back(grad, experts, weights, Routes(*routing))
        of_base = None
        if ctx.based:
            of_base = grad
        return of_experts, of_weights, of_base, None, None, None


def dispatch(x: Tensor, routing: Routes) -> Tensor:
    """Return the experts' input: the token of ``x`` [tokens, width] for each row of ``routing``.
    Padding is zero.
    """
    CALLS["moe_dispatch"] += 1
    return _Dispatch.apply(x, *routing)


def combine(experts: Tensor, weights: Tensor, routing: Routes, base: Tensor | None) -> Tensor:
    """Return ``base`` [tokens, width] plus the weighted sum of each token's rows of ``experts``.

    ``weights`` [tokens, choices] are float32. The sum is computed in float32, in the order of the
    choices, and rounded once.
    """
    CALLS["moe_combine"] += 1
    return _Combine.apply(experts, weights, base, *routing)


def _multiply(a: Tensor, b: Tensor, out: Tensor, **groups: Tensor) -> None:
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_tuned

    # An SM takes its next tile when it is free, whoever held it before.
    config = GemmConfig(
        tile_m=128,
        tile_n=256,
        pingpong=False,
        cluster_m=2,
        cluster_n=1,
        swap_ab=False,
        device_capacity=9,
        is_dynamic_persistent=True,
        use_tma_gather=False,
    )
    gemm_tuned.fn(a, b, out, config=config, **groups)


@torch.library.custom_op("primus::expert_rows", mutates_args=())
def _expert_rows(x: Tensor, weights: Tensor, starts: Tensor, transposed: bool) -> Tensor:
    CALLS["expert_rows"] += 1
    if transposed:
        weights = weights.mT
    width = weights.shape[-1]
    if not x.is_cuda:
        parts = [
            x[start:end] @ weight
            for weight, (start, end) in zip(weights, pairwise(starts.tolist()), strict=True)
        ]
        padding = x.new_zeros(len(x) - int(starts[-1]), width)
        return torch.cat([*parts, padding])
    out = x.new_empty(len(x), width)
    _multiply(x, weights, out, cu_seqlens_m=starts)
    return out


@_expert_rows.register_fake
def _(x: Any, weights: Any, _starts: Any, transposed: bool) -> Any:
    if transposed:
        weights = weights.mT
    return x.new_empty(x.shape[0], weights.shape[2])


@torch.library.custom_op("primus::expert_weights", mutates_args=())
def _expert_weights(a: Tensor, b: Tensor, starts: Tensor) -> Tensor:
    CALLS["expert_weights"] += 1
    if not a.is_cuda:
        parts = [a[start:end].t() @ b[start:end] for start, end in pairwise(starts.tolist())]
        return torch.stack(parts)
    out = a.new_empty(len(starts) - 1, a.shape[1], b.shape[1])
    _multiply(a.t(), b, out, cu_seqlens_k=starts)
    return out


@_expert_weights.register_fake
def _(a: Any, b: Any, starts: Any) -> Any:
    return a.new_empty(starts.shape[0] - 1, a.shape[1], b.shape[1])


def _save(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001 - PyTorch passes it by name
    *tensors, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> Any:
    x, weights, starts = ctx.saved_tensors
    grad = grad.contiguous()
    if ctx.transposed:
        of_weights = _expert_weights(grad, x, starts)
    else:
        of_weights = _expert_weights(x, grad, starts)
    of_x = _expert_rows(grad, weights, starts, not ctx.transposed)
    return of_x, of_weights, None, None


_expert_rows.register_autograd(_gradients, setup_context=_save)


def through_experts(
    product: Callable[[Tensor, Tensor], Tensor],
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    x: Tensor,
) -> Tensor:
    """Return ``x`` [sorted rows, hidden] through SwiGLU experts, in BF16. ``product`` multiplies
    rows by the transposed weights of their experts.
    """
    narrow = x.bfloat16()
    gate = product(narrow, w1.bfloat16())
    up = product(narrow, w3.bfloat16())
    hidden = torch.nn.functional.silu(gate) * up
    return product(hidden, w2.bfloat16()).type_as(x)


def grouped_experts(
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    x: Tensor,
    num_tokens_per_expert: Tensor,
) -> Tensor:
    """Replaces torchtitan's ``_run_experts_grouped_mm``. Rows after the last expert's are
    undefined, as there.
    """
    ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
    starts = torch.nn.functional.pad(ends, (1, 0))

    def product(rows: Tensor, weights: Tensor) -> Tensor:
        return _expert_rows(rows, weights, starts, True)

    return through_experts(product, w1, w2, w3, x)
