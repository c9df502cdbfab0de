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

from primus_images.turbo.optimizations import CALLS

ALIGNMENT = 8
"""The rows of each expert start at a multiple of this, because PyTorch's grouped products need 16-byte alignment."""


class Routes(NamedTuple):
    """Which row of the experts' input holds each choice of a token.

    ``rows`` [tokens, choices] int32: the row of each choice. ``choices`` [all rows] int32: the
    choice in each row, as token × choices per token + index of the choice; -1 in padding.
    ``counts`` [experts] int32: the rows of each expert, padding included, a multiple of
    :data:`ALIGNMENT` and never 0.
    """

    rows: torch.Tensor
    choices: torch.Tensor
    counts: torch.Tensor


@torch.no_grad()
def routes(selected: torch.Tensor, counts: torch.Tensor) -> Routes:
    """Return the routes for ``selected`` [tokens, choices], the index of each chosen expert.

    ``counts`` [experts]: how many choices each expert has.
    """
    flat = selected.reshape(-1).to(torch.int32)
    counts = counts.to(torch.int64)
    padded = (counts.clamp(min=1) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    experts, order = torch.sort(flat, stable=True)
    places = torch.arange(len(flat), device=flat.device) + shift[experts]
    rows = torch.empty_like(flat)
    rows[order] = places.to(torch.int32)
    choices = torch.full(
        (len(flat) + len(counts) * ALIGNMENT,), -1, dtype=torch.int32, device=flat.device
    )
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


def _gathered(x: torch.Tensor, routing: Routes) -> torch.Tensor:
    width = x.shape[1]
    per_token = routing.rows.shape[1]
    if not x.is_cuda:
        padded = torch.cat((x, x.new_zeros(1, width)))
        return padded[
            torch.where(routing.choices >= 0, routing.choices // per_token, len(x)).long()
        ]
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
    experts: torch.Tensor, routing: Routes, weights: torch.Tensor | None, base: torch.Tensor | None
) -> torch.Tensor:
    (tokens, per_token), width = routing.rows.shape, experts.shape[1]
    if not experts.is_cuda:
        values = experts[routing.rows.long()].float()
        total = (values if weights is None else values * weights[:, :, None]).sum(1)
        return (total if base is None else total + base.float()).to(experts.dtype)
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
    gradient: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, routing: Routes
) -> tuple[torch.Tensor, torch.Tensor]:
    per_token = routing.rows.shape[1]
    width = experts.shape[1]
    if not experts.is_cuda:
        spread = _gathered(gradient, routing).float()
        factors = torch.cat((weights.reshape(-1), weights.new_zeros(1)))[routing.choices.long()]
        dots = (spread * experts.float()).sum(1)[routing.rows.long()]
        return (spread * factors[:, None]).to(experts.dtype), dots.to(weights.dtype)
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
    def forward(ctx: Any, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*routing)
        return _gathered(x.contiguous(), Routes(*routing))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (
            _summed(grads[0].contiguous(), Routes(*ctx.saved_tensors), None, None),
            None,
            None,
            None,
        )


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        experts: torch.Tensor,
        weights: torch.Tensor,
        base: torch.Tensor | None,
        *routing: torch.Tensor,
    ) -> torch.Tensor:
        experts = experts.contiguous()
        weights = weights.contiguous()
        ctx.save_for_backward(experts, weights, *routing)
        ctx.based = base is not None
        return _summed(
            experts, Routes(*routing), weights, None if base is None else base.contiguous()
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        experts, weights, *routing = ctx.saved_tensors
        grad = grads[0].contiguous()
        out, dots = _weighted_back(grad, experts, weights, Routes(*routing))
        return out, dots, grad if ctx.based else None, None, None, None


def dispatch(x: torch.Tensor, routing: Routes) -> torch.Tensor:
    """Return the experts' input: the token of ``x`` [tokens, width] for each row of ``routing``.
    Padding is zero.
    """
    CALLS["moe_dispatch"] += 1
    return _Dispatch.apply(x, *routing)


def combine(
    experts: torch.Tensor, weights: torch.Tensor, routing: Routes, base: torch.Tensor | None
) -> torch.Tensor:
    """Return ``base`` [tokens, width] plus the weighted sum of each token's rows of ``experts``.

    ``weights`` [tokens, choices] are float32. The sum is computed in float32, in the order of the
    choices, and rounded once.
    """
    CALLS["moe_combine"] += 1
    return _Combine.apply(experts, weights, base, *routing)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **groups: torch.Tensor) -> None:
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
def _expert_rows(
    x: torch.Tensor, weights: torch.Tensor, starts: torch.Tensor, transposed: bool
) -> torch.Tensor:
    CALLS["expert_rows"] += 1
    if transposed:
        weights = weights.mT
    if not x.is_cuda:
        parts = [
            x[first:end] @ w
            for w, (first, end) in zip(weights, pairwise(starts.tolist()), strict=True)
        ]
        return torch.cat([*parts, x.new_zeros(len(x) - int(starts[-1]), weights.shape[-1])])
    out = x.new_empty(len(x), weights.shape[-1])
    _multiply(x, weights, out, cu_seqlens_m=starts)
    return out


_expert_rows.register_fake(
    lambda x, w, _, transposed: x.new_empty(x.shape[0], w.shape[1 if transposed else 2])
)


@torch.library.custom_op("primus::expert_weights", mutates_args=())
def _expert_weights(a: torch.Tensor, b: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    CALLS["expert_weights"] += 1
    if not a.is_cuda:
        return torch.stack(
            [a[first:end].t() @ b[first:end] for first, end in pairwise(starts.tolist())]
        )
    out = a.new_empty(len(starts) - 1, a.shape[1], b.shape[1])
    _multiply(a.t(), b, out, cu_seqlens_k=starts)
    return out


_expert_weights.register_fake(
    lambda a, b, starts: a.new_empty(starts.shape[0] - 1, a.shape[1], b.shape[1])
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: torch.Tensor) -> Any:
    x, weights, starts = ctx.saved_tensors
    grad = grad.contiguous()
    of_weights = _expert_weights(*((grad, x) if ctx.transposed else (x, grad)), starts)
    return _expert_rows(grad, weights, starts, not ctx.transposed), of_weights, None, None


_expert_rows.register_autograd(_gradients, setup_context=_save)


def through_experts(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    x: torch.Tensor,
) -> torch.Tensor:
    """Return ``x`` [sorted rows, hidden] through SwiGLU experts, in BF16. ``product`` multiplies
    rows by the transposed weights of their experts.
    """
    narrow, first, second, third = (tensor.bfloat16() for tensor in (x, w1, w2, w3))
    hidden = torch.nn.functional.silu(product(narrow, first)) * product(narrow, third)
    return product(hidden, second).type_as(x)


def grouped_experts(
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    x: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
) -> torch.Tensor:
    """Replaces torchtitan's ``_run_experts_grouped_mm``. Rows after the last expert's are
    undefined, as there.
    """
    starts = torch.nn.functional.pad(num_tokens_per_expert.cumsum(0, dtype=torch.int32), (1, 0))
    return through_experts(
        lambda rows, weights: _expert_rows(rows, weights, starts, True), w1, w2, w3, x
    )
