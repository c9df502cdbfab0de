"""Frozen linear layers together with LoRA's adapters, forward and backward.

An adapter's products are so thin that they cost their memory traffic. Layers with the same input
therefore share them: the input is multiplied once by the first matrices of all their adapters, and
so is its gradient. The second product is added to the frozen layer's while it is written.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from primus_images.turbo import fp8
from primus_images.turbo.optimizations import CALLS

# The layers of a block that have the same input, in the order in which transformers calls them.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ROWS = 32
_COLUMNS = 128
_RANKS = 64


@triton.jit
def _add_low_rank(
    x,
    y,
    z,
    rows,
    columns,
    out,
    factor,
    tokens,
    width,
    ranks,
    rows_stride,
    columns_stride,
    columns_step,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    r = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, ranks, RANKS):
        k = start + tl.arange(0, RANKS)
        within = (r[:, None] < tokens) & (k[None, :] < ranks)
        left = tl.load(rows + r[:, None] * rows_stride + k[None, :], mask=within, other=0.0)
        within = (c[None, :] < width) & (k[:, None] < ranks)
        right = tl.load(
            columns + c[None, :] * columns_stride + k[:, None] * columns_step,
            mask=within,
            other=0.0,
        )
        product += tl.dot(left, right)
    inside = (r[:, None] < tokens) & (c[None, :] < width)
    at = r[:, None] * width + c[None, :]
    total = factor * product + tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if INPUTS > 1:
        total += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    if INPUTS > 2:
        total += tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("primus::add_low_rank", mutates_args=())
def add_low_rank(
    parts: Sequence[torch.Tensor], rows: torch.Tensor, columns: torch.Tensor, factor: float
) -> torch.Tensor:
    """Return the sum of ``parts`` and of ``factor · rows @ columns.T``, added in float32.

    ``parts`` are one to three tensors [tokens, width], ``rows`` [tokens, ranks], whose columns are
    contiguous, and ``columns`` [width, ranks].
    """
    CALLS["add_low_rank"] += 1
    if not rows.is_cuda:
        total = torch.stack([part.float() for part in parts]).sum(0)
        return (total + factor * (rows @ columns.t()).float()).to(parts[0].dtype)
    used = [part.contiguous() for part in parts]
    out = torch.empty_like(used[0])
    (tokens, width), ranks = out.shape, rows.shape[1]
    x, y, z = (*used, used[0], used[0])[:3]
    _add_low_rank[(triton.cdiv(width, _COLUMNS), triton.cdiv(tokens, _ROWS))](
        x,
        y,
        z,
        rows,
        columns,
        out,
        factor,
        tokens,
        width,
        ranks,
        rows.stride(0),
        *columns.stride(),
        INPUTS=len(used),
        RANKS=min(_RANKS, max(16, triton.next_power_of_2(ranks))),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return out


add_low_rank.register_fake(lambda parts, _rows, _columns, _factor: torch.empty_like(parts[0]))


@torch._dynamo.allow_in_graph
class _Adapted(torch.autograd.Function):
    """``tensors``: the first matrices of all adapters, then the second ones, then the frozen
    weights of all layers: one matrix each, or what :func:`primus_images.turbo.fp8.frozen` returns
    if there is a ``config`` of FP8.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, factor: float, config: Any, count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        flat = x.reshape(-1, x.shape[-1])
        firsts = tensors[:count]
        seconds = tensors[count : 2 * count]
        weights = tensors[2 * count :]
        together = torch.cat(firsts)
        inner = (flat @ together.t()).split([len(first) for first in firsts], dim=1)
        outs = []
        for rows, second, weight in zip(inner, seconds, _of_layers(weights, count), strict=True):
            if config:
                product = fp8.frozen_product(flat, weight, config)
            else:
                product = flat @ weight[0].t()
            outs.append(
                add_low_rank([product], rows, second, factor).view(*x.shape[:-1], len(second))
            )
        ctx.save_for_backward(flat, together, *inner, *seconds, *weights)
        ctx.factor = factor
        ctx.config = config
        ctx.count = count
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flat, together, *rest = ctx.saved_tensors
        count = ctx.count
        factor = ctx.factor
        config = ctx.config
        inner = rest[:count]
        seconds = rest[count : 2 * count]
        weights = rest[2 * count :]
        of_inner = []
        of_seconds = []
        of_x = []
        for grad, rows, second, weight in zip(
            grads, inner, seconds, _of_layers(weights, count), strict=True
        ):
            flat_grad = grad.reshape(-1, grad.shape[-1])
            of_inner.append(flat_grad @ second * factor)
            of_seconds.append(flat_grad.t() @ rows * factor)
            of_x.append(
                fp8.frozen_gradient(flat_grad, weight, config) if config else flat_grad @ weight[0]
            )
        joined = torch.cat(of_inner, dim=1)
        of_firsts = (joined.t() @ flat).split([part.shape[1] for part in of_inner])
        whole = add_low_rank(of_x, joined, together.t(), 1.0).view(
            *grads[0].shape[:-1], flat.shape[1]
        )
        return whole, None, None, None, *of_firsts, *of_seconds, *(None for _ in weights)


def _of_layers(weights: Sequence[torch.Tensor], count: int) -> list[Sequence[torch.Tensor]]:
    size = len(weights) // count
    return [weights[size * layer : size * (layer + 1)] for layer in range(count)]


def adapted(
    x: torch.Tensor,
    adapters: Sequence[tuple[torch.Tensor, torch.Tensor]],
    weights: Sequence[Sequence[torch.Tensor]],
    factor: float,
    config: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Return ``x @ weight.T + factor · x @ first.T @ second.T`` of each layer, with gradients of
    ``x`` and adapters.

    ``x`` is [..., in]; an adapter is ``first`` [rank, in] and ``second`` [out, rank]. A layer's
    weights are one matrix [out, in], or what :func:`primus_images.turbo.fp8.frozen` returns with
    torchao's ``config``.
    """
    firsts, seconds = zip(*adapters, strict=True)
    flat = [tensor for weight in weights for tensor in weight]
    return _Adapted.apply(x, factor, config, len(adapters), *firsts, *seconds, *flat)


class _Group:
    """PEFT's layers with the same input. The first one's call computes the outputs of all."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._outs: tuple[torch.Tensor, ...] = ()

    def first(self, x: torch.Tensor) -> torch.Tensor:
        bases = [layer.base_layer for layer in self._layers]
        config = getattr(bases[0], "config", None)
        pairs = [
            (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
            for layer in self._layers
        ]
        weights = [fp8.frozen_parts(base) if config else (base.weight,) for base in bases]
        outs = adapted(x, pairs, weights, self._layers[0].scaling["default"], config)
        outs = tuple(
            out if base.bias is None else out + base.bias.to(out.dtype)
            for out, base in zip(outs, bases, strict=True)
        )
        self._outs = outs[1:]
        return outs[0]

    def next(self, _: torch.Tensor) -> torch.Tensor:
        out, *others = self._outs
        # Nothing is kept after the last layer, so that a compiled block does not return it.
        self._outs = tuple(others)
        return out


def attach(model: torch.nn.Module) -> None:
    """Let PEFT's linear layers in ``model``, frozen in FP8 or of a 16-bit type, compute as
    :func:`adapted` does.
    """
    for parent in model.modules():
        children = {
            name: child for name, child in parent.named_children() if hasattr(child, "lora_A")
        }
        for names in _groups(list(children)):
            layers = [children[name] for name in names]
            group = _Group(layers)
            for layer in layers:
                if layer is layers[0]:
                    layer.forward = group.first
                else:
                    layer.forward = group.next


def _groups(names: Sequence[str]) -> list[Sequence[str]]:
    together = [group for group in _TOGETHER if all(name in names for name in group)]
    return [*together, *([name] for name in names if not any(name in group for group in together))]
