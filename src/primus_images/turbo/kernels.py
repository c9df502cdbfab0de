"""Our own Triton kernels, each for a gap that a profile of a training step shows and no library
fills, and the loss.

Every wrapper counts its calls in :data:`primus_images.turbo.optimizations.CALLS`, with which a run
proves what it used. For tensors that are not on a GPU, the wrappers compute the same in plain
PyTorch, so that CPU proxies use the same code path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from primus_images.turbo.optimizations import CALLS

_IGNORED = -100


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _cut(x, LARGEST: tl.constexpr):
    """``x`` clamped to ±LARGEST. NaN stays NaN, so that it is not hidden by a product."""
    x = tl.maximum(x, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _cross_entropy(
    logits, labels, losses, stride, columns, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    offsets = tl.arange(0, BLOCK)
    # One pass with a running maximum computes the sum; the second pass overwrites the logits with
    # the gradient. A row fits into the L2 cache, so the second pass does not read device memory.
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(
            logits + start + offsets, mask=start + offsets < columns, other=float("-inf")
        ).to(tl.float32)
        higher = tl.maximum(highest, x)
        # Before a lane has seen a value, -inf - -inf would be NaN.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - safe) + tl.exp(x - safe)
        highest = higher
    top = tl.max(highest, axis=0)
    total_sum = tl.sum(total * tl.exp(highest - top), axis=0)
    counted = label != IGNORED
    at_label = tl.load(logits + tl.where(counted, label, 0)).to(tl.float32)
    loss = tl.log(total_sum) + top - at_label
    tl.store(losses + row, tl.where(counted, loss, 0.0))
    # All lanes have read the logit at the label, above, before any of them overwrites it.
    tl.debug_barrier()
    factor = tl.where(counted, 1.0 / total_sum, 0.0)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        x = tl.load(logits + start + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - top) * factor
        gradient = tl.where((start + offsets == label) & counted, gradient - 1.0, gradient)
        tl.store(logits + start + offsets, gradient.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_(logits: Tensor, labels: Tensor, losses: Tensor) -> None:
    """Write each row's cross entropy to ``losses``, and overwrite ``logits`` with the gradient of
    their sum.

    ``logits`` [rows, vocabulary] have any float type and contiguous rows; ``labels`` [rows] are
    int64, -100 for a row that does not count; ``losses`` [rows] are float32. Computed in float32.
    """
    CALLS["cross_entropy_"] += 1
    if not logits.is_cuda:
        counted = labels != _IGNORED
        places = torch.where(counted, labels, 0)[:, None]
        logs = torch.log_softmax(logits.float(), dim=1)
        at_labels = logs.gather(1, places)[:, 0]
        losses.copy_(torch.where(counted, -at_labels, 0.0))
        gradients = logs.exp()
        ones = torch.ones_like(places, dtype=gradients.dtype)
        gradients.scatter_add_(1, places, -ones)
        logits.copy_(gradients * counted[:, None])
        return
    rows, columns = logits.shape
    _cross_entropy[(rows,)](
        logits,
        labels,
        losses,
        logits.stride(0),
        columns,
        IGNORED=_IGNORED,
        BLOCK=8192,
        num_warps=16,
    )


@triton.jit
def _cast_fp8(x, scale, out, count, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    values = tl.load(x + offsets, mask=inside).to(tl.float32) * tl.load(scale)
    tl.store(out + offsets, _cut(values, LARGEST).to(out.dtype.element_ty), mask=inside)


def eight(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x · scale``, clamped to ``dtype``'s range and cast to it, in plain PyTorch."""
    top = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-top, top).to(dtype)


def cast_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x · scale``, clamped to ``dtype``'s range and cast to it: one pass over ``x``
    instead of three.

    ``x`` is contiguous; ``scale`` is one float32. The result has the bits of multiplying, clamping
    and casting in turn.
    """
    CALLS["cast_fp8"] += 1
    if not x.is_cuda:
        return eight(x, scale, dtype)
    out = torch.empty_like(x, dtype=dtype)
    count = x.numel()
    block = 4096
    _cast_fp8[(triton.cdiv(count, block),)](
        x, scale, out, count, LARGEST=torch.finfo(dtype).max, BLOCK=block, num_warps=8
    )
    return out


@triton.jit
def _copy_in(grad, out, share, width, at, BLOCK: tl.constexpr):
    chunk = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < share
    values = tl.load(grad + chunk * share + offsets, mask=inside)
    tl.store(out + chunk * width + at + offsets, values.to(out.dtype.element_ty), mask=inside)


def copy_in(grads: Sequence[Tensor], out: Tensor, ranks: int) -> bool:
    """Copy ``grads`` to the layout for a reduce-scatter over ``ranks``: each first dimension in
    ``ranks`` equal parts.

    ``out`` [ranks, numbers per rank] is contiguous and may have a wider type. If a gradient is not
    contiguous, or its first dimension is not divisible, does nothing and returns False.
    """
    for grad in grads:
        if not grad.is_contiguous() or not grad.dim() or grad.shape[0] % ranks:
            return False
    CALLS["copy_in"] += 1
    out = out.view(ranks, -1)
    at = 0
    for grad in grads:
        share = grad.numel() // ranks
        if grad.is_cuda:
            block = 4096
            _copy_in[(triton.cdiv(share, block), ranks)](
                grad, out, share, out.stride(0), at, BLOCK=block, num_warps=8
            )
        else:
            out[:, at : at + share].copy_(grad.view(ranks, -1))
        at += share
    return True


@triton.jit
def _sum_of_ranks(shares, out, count, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in tl.static_range(RANKS):
        total += tl.load(shares + offsets, mask=inside, other=0.0).to(tl.float32)
        shares += count
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


def sum_of_ranks(shares: Tensor, out: Tensor) -> None:
    """Write the sum of ``shares`` [ranks, count] to ``out`` [count], added in float32 in the order
    of ranks.
    """
    if not shares.is_cuda:
        torch.sum(shares, 0, dtype=torch.float32, out=out)
        return
    ranks, count = shares.shape
    block = 4096
    with torch.cuda.device(out.device):
        _sum_of_ranks[(triton.cdiv(count, block),)](
            shares, out, count, RANKS=ranks, BLOCK=block, num_warps=8
        )


CHUNK = 8192
"""Tokens per chunk: products at full speed, and 2 GB of logits for a vocabulary of 128,256."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        places = labels.reshape(-1)
        losses = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(rows)
        grad_weight: Tensor | None = None
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            logits = rows[part] @ weight.t()
            cross_entropy_(logits, places[part], losses[part])
            torch.mm(logits, weight, out=grad_x[part])
            if not weight.requires_grad:
                continue
            if grad_weight is None:
                grad_weight = logits.t() @ rows[part]
            else:
                grad_weight.addmm_(logits.t(), rows[part])
        ctx.save_for_backward(grad_x.view_as(x), grad_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        # The gradients belong to this function and are used once.
        grad_x.mul_(grads[0])
        if grad_weight is not None:
            grad_weight.mul_(grads[0])
        return grad_x, grad_weight, None, None


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, chunk: int = CHUNK) -> Tensor:
    """Return the sum of the cross entropies of ``x @ weight.T`` against ``labels`` (-100: ignored),
    as float32.

    ``x`` [..., hidden] and ``weight`` [vocabulary, hidden] have one type, and ``labels`` [...] are
    int64. The gradients are computed in the forward pass, so that only the logits of ``chunk``
    tokens exist at any time; ``backward`` works once. A frozen ``weight`` gets no gradient, which
    saves a third of the work.
    """
    return _LinearCrossEntropy.apply(x, weight, labels, chunk)


class LossHead(torch.nn.Linear):
    """An output projection that returns the sum of the losses while ``labels`` is set, and logits
    otherwise.
    """

    labels: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss or the logits."""
        if self.labels is None:
            return super().forward(x)
        labels = self.labels
        self.labels = None
        return linear_cross_entropy(x, self.weight, labels)
