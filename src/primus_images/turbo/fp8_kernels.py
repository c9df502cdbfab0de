"""Triton kernels that quantize to FP8, and operators that call them.

Each writes a tensor and its transpose in one pass. Every operator counts its calls in
:data:`primus_images.turbo.optimizations.CALLS`. For tensors that are not on a GPU, the operators
compute the same in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from primus_images.turbo.kernels import _cut, _larger, eight
from primus_images.turbo.optimizations import CALLS

TILES = {
    "cast_both": (128, 128, 8),
    "flip": (64, 128, 4),
    "swiglu_cast": (1, 2048, 8),
    "swiglu_backward": (64, 64, 8),
}
"""Rows, columns and warps of one program of each kernel."""

_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e4m3fnuz: tl.float8e4b8}
_LARGEST_BLOCK = 4096
_LARGEST_BLOCKS = 4


@triton.jit
def _bytes(value, KIND: tl.constexpr, ALONE: tl.constexpr):
    """``value`` as bytes of the FP8 type ``KIND``."""
    if ALONE:
        # ptxas 12.8 for sm_90 reads an uninitialized register if the upper byte of a pair of e5m2
        # values is used alone, so each value is converted separately.
        pair = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e5m2x2.f32 $0, 0f00000000, $1;",
            "=h,f",
            [value],
            dtype=tl.int16,
            is_pure=True,
            pack=1,
        )
        return pair.to(tl.uint8)
    return value.to(KIND).to(tl.uint8, bitcast=True)


@triton.jit
def _store_both(value, rows_out, columns_out, at, to, inside, flipped, ALONE: tl.constexpr):
    """Store ``value`` as FP8, and transposed as bytes."""
    KIND: tl.constexpr = rows_out.dtype.element_ty
    tl.store(rows_out + at, value.to(KIND), mask=inside)
    tl.store(columns_out + to, tl.trans(_bytes(value, KIND, ALONE)), mask=flipped)


@triton.jit
def _cast_both(
    x,
    scale,
    rows_out,
    columns_out,
    rows,
    columns,
    stride,
    LARGEST: tl.constexpr,
    ALONE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    r = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    at = r[:, None] * columns + c[None, :]
    value = _cut(tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale), LARGEST)
    at = r[:, None] * stride + c[None, :]
    flipped = (c[:, None] < columns) & (r[None, :] < rows)
    _store_both(
        value, rows_out, columns_out, at, c[:, None] * rows + r[None, :], inside, flipped, ALONE
    )


@triton.jit
def _flip(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    value = tl.load(x + r[:, None] * columns + c[None, :], mask=inside, other=0)
    flipped = (c[:, None] < columns) & (r[None, :] < rows)
    tl.store(out + c[:, None] * rows + r[None, :], tl.trans(value), mask=flipped)


@triton.jit
def _swiglu_cast(gate, up, scale, out, count, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    value = _cut(a * tl.sigmoid(a) * b * tl.load(scale), LARGEST)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_gradients(a, b, d):
    """Gradients of gate and up, and the product itself, in float32."""
    sigmoid = tl.sigmoid(a)
    silu = a * sigmoid
    return d * b * (sigmoid + silu * (1.0 - sigmoid)), d * silu, silu * b


@triton.jit
def _largest(
    gate, up, grad, largest, count, INPUTS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """The largest absolute values of one input, of the product of two, or with ``grad`` of the
    gradients of both.
    """
    top = tl.zeros([BLOCK], tl.float32)
    top_up = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    for block in tl.static_range(BLOCKS):
        at = first + block * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        value = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        if INPUTS > 1:
            b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
            if INPUTS == 2:
                value = value * tl.sigmoid(value) * b
            else:
                d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
                value, of_up, _ = _swiglu_gradients(value, b, d)
                top_up = _larger(top_up, tl.abs(of_up))
        top = _larger(top, tl.abs(value))
    tl.atomic_max(largest, tl.reduce(top, 0, _larger), sem="relaxed")
    if INPUTS == 3:
        tl.atomic_max(largest + 1, tl.reduce(top_up, 0, _larger), sem="relaxed")


@triton.jit
def _swiglu_backward(
    gate,
    up,
    grad,
    gate_scale,
    up_scale,
    made_scale,
    gate_rows,
    gate_columns,
    up_rows,
    up_columns,
    made_columns,
    rows,
    columns,
    LARGEST: tl.constexpr,
    LARGEST_MADE: tl.constexpr,
    MADE: tl.constexpr,
    ALONE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    r = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    at = r[:, None] * columns + c[None, :]
    flipped = (c[:, None] < columns) & (r[None, :] < rows)
    to = c[:, None] * rows + r[None, :]
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    of_gate, of_up, product = _swiglu_gradients(a, b, d)
    _store_both(
        _cut(of_gate * tl.load(gate_scale), LARGEST),
        gate_rows,
        gate_columns,
        at,
        to,
        inside,
        flipped,
        ALONE,
    )
    _store_both(
        _cut(of_up * tl.load(up_scale), LARGEST),
        up_rows,
        up_columns,
        at,
        to,
        inside,
        flipped,
        ALONE,
    )
    value = _cut(product * tl.load(made_scale), LARGEST_MADE)
    tl.store(made_columns + to, tl.trans(_bytes(value, MADE, False)), mask=flipped)


def _alone(dtype: torch.dtype) -> bool:
    return dtype == torch.float8_e5m2 and torch.version.hip is None


def _grid(rows: int, columns: int, tile: tuple[int, int, int]) -> tuple[int, int]:
    return triton.cdiv(columns, tile[1]), triton.cdiv(rows, tile[0])


def _reduced(shape: tuple[int, ...], *inputs: torch.Tensor) -> torch.Tensor:
    highest = torch.zeros(shape, dtype=torch.float32, device=inputs[0].device)
    count = inputs[0].numel()
    used = [x.contiguous() for x in inputs]
    gate, up, grad = (*used, used[0], used[0])[:3]
    _largest[(triton.cdiv(count, _LARGEST_BLOCK * _LARGEST_BLOCKS),)](
        gate,
        up,
        grad,
        highest,
        count,
        INPUTS=len(inputs),
        BLOCK=_LARGEST_BLOCK,
        BLOCKS=_LARGEST_BLOCKS,
        num_warps=8,
    )
    return highest


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8).t().clone(memory_format=torch.contiguous_format).view(x.dtype)


@torch.library.custom_op("primus::fp8_cast_both", mutates_args=())
def cast_both(
    parts: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply each of ``parts`` [rows, columns of each] by its scale, clamp it to ``dtype``'s
    range and cast it.

    Returns all of them side by side, and the transpose of the same.
    """
    CALLS["fp8_cast_both" if len(parts) == 1 else "fp8_cast_parts"] += 1
    if not parts[0].is_cuda:
        eights = [
            eight(x, scale, dtype).view(torch.uint8) for x, scale in zip(parts, scales, strict=True)
        ]
        rows = torch.cat(eights, dim=1).view(dtype)
        return rows, _turned(rows)
    rows = len(parts[0])
    width = sum(x.shape[1] for x in parts)
    out = parts[0].new_empty((rows, width), dtype=dtype)
    flipped = parts[0].new_empty((width, rows), dtype=dtype)
    tile = TILES["cast_both"]
    start = 0
    for x, scale in zip(parts, scales, strict=True):
        columns = x.shape[1]
        _cast_both[_grid(rows, columns, tile)](
            x.contiguous(),
            scale,
            out[:, start:],
            flipped[start:].view(torch.uint8),
            rows,
            columns,
            width,
            LARGEST=torch.finfo(dtype).max,
            ALONE=_alone(dtype),
            ROWS=tile[0],
            COLUMNS=tile[1],
            num_warps=tile[2],
        )
        start += columns
    return out, flipped


@torch.library.custom_op("primus::fp8_largest", mutates_args=())
def largest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of ``x``, in float32; NaN if ``x`` contains one."""
    CALLS["fp8_largest"] += 1
    if not x.is_cuda:
        return x.abs().max().float()
    return _reduced((), x)


@torch.library.custom_op("primus::fp8_flip", mutates_args=())
def flip(x: torch.Tensor) -> torch.Tensor:
    """Return the transpose in memory of ``x`` [rows, columns], of an 8-bit type."""
    CALLS["fp8_flip"] += 1
    if not x.is_cuda:
        return _turned(x)
    x = x.contiguous()
    rows, columns = x.shape
    out = x.new_empty((columns, rows))
    tile = TILES["flip"]
    _flip[_grid(rows, columns, tile)](
        x.view(torch.uint8),
        out.view(torch.uint8),
        rows,
        columns,
        ROWS=tile[0],
        COLUMNS=tile[1],
        num_warps=tile[2],
    )
    return out


@torch.library.custom_op("primus::fp8_swiglu_largest", mutates_args=())
def swiglu_largest(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of ``silu(gate) · up``, in float32; NaN if it contains one."""
    CALLS["fp8_swiglu_largest"] += 1
    if not gate.is_cuda:
        return (torch.nn.functional.silu(gate.float()) * up.float()).abs().max()
    return _reduced((), gate, up)


@torch.library.custom_op("primus::fp8_swiglu_cast", mutates_args=())
def swiglu_cast(
    gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``silu(gate) · up · scale``, computed in float32, clamped to ``dtype``'s range and
    cast to it.
    """
    CALLS["fp8_swiglu_cast"] += 1
    if not gate.is_cuda:
        return eight(torch.nn.functional.silu(gate.float()) * up.float(), scale, dtype)
    out = gate.new_empty(gate.shape, dtype=dtype)
    count = gate.numel()
    _, block, warps = TILES["swiglu_cast"]
    _swiglu_cast[(triton.cdiv(count, block),)](
        gate.contiguous(),
        up.contiguous(),
        scale,
        out,
        count,
        LARGEST=torch.finfo(dtype).max,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def _gradients(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a = gate.float()
    b = up.float()
    d = grad.float()
    sigmoid = a.sigmoid()
    silu = a * sigmoid
    return d * b * (sigmoid + silu * (1 - sigmoid)), d * silu, silu * b


@torch.library.custom_op("primus::fp8_swiglu_backward_largest", mutates_args=())
def swiglu_backward_largest(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """Return the largest absolute gradients of ``gate`` and ``up`` under ``grad``: two float32, NaN
    if there is one.
    """
    CALLS["fp8_swiglu_backward_largest"] += 1
    if not gate.is_cuda:
        of_gate, of_up, _ = _gradients(gate, up, grad)
        return torch.stack((of_gate.abs().max(), of_up.abs().max()))
    return _reduced((2,), gate, up, grad)


@torch.library.custom_op("primus::fp8_swiglu_backward", mutates_args=())
def swiglu_backward(
    gate: torch.Tensor,
    up: torch.Tensor,
    grad: torch.Tensor,
    gate_scale: torch.Tensor,
    up_scale: torch.Tensor,
    made_scale: torch.Tensor,
    dtype: torch.dtype,
    made_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scaled gradients of ``gate`` and ``up`` [rows, columns] in ``dtype``, each with
    its transpose.

    Also returns ``silu(gate) · up · made_scale`` in ``made_dtype``, transposed.
    """
    CALLS["fp8_swiglu_backward"] += 1
    if not gate.is_cuda:
        of_gate, of_up, product = _gradients(gate, up, grad)
        gate_eight = eight(of_gate, gate_scale, dtype)
        up_eight = eight(of_up, up_scale, dtype)
        product = eight(product, made_scale, made_dtype)
        return gate_eight, _turned(gate_eight), up_eight, _turned(up_eight), _turned(product)
    rows, columns = gate.shape
    straight = [gate.new_empty((rows, columns), dtype=dtype) for _ in range(2)]
    flipped = [gate.new_empty((columns, rows), dtype=kind) for kind in (dtype, dtype, made_dtype)]
    tile = TILES["swiglu_backward"]
    _swiglu_backward[_grid(rows, columns, tile)](
        gate.contiguous(),
        up.contiguous(),
        grad.contiguous(),
        gate_scale,
        up_scale,
        made_scale,
        straight[0],
        flipped[0].view(torch.uint8),
        straight[1],
        flipped[1].view(torch.uint8),
        flipped[2].view(torch.uint8),
        rows,
        columns,
        LARGEST=torch.finfo(dtype).max,
        LARGEST_MADE=torch.finfo(made_dtype).max,
        MADE=_TYPES[made_dtype],
        ALONE=_alone(dtype),
        ROWS=tile[0],
        COLUMNS=tile[1],
        num_warps=tile[2],
    )
    return straight[0], flipped[0], straight[1], flipped[1], flipped[2]


# What a compiler sees of the operators: the types and shapes of their results.
largest.register_fake(lambda x: x.new_empty((), dtype=torch.float32))
swiglu_largest.register_fake(lambda gate, _up: gate.new_empty((), dtype=torch.float32))
swiglu_backward_largest.register_fake(
    lambda gate, _up, _grad: gate.new_empty((2,), dtype=torch.float32)
)
swiglu_cast.register_fake(lambda gate, _up, _scale, dtype: gate.new_empty(gate.shape, dtype=dtype))
flip.register_fake(lambda x: x.new_empty(x.shape[::-1]))


@cast_both.register_fake
def _(parts: Any, _scales: Any, dtype: torch.dtype) -> Any:
    rows = parts[0].shape[0]
    width = sum(x.shape[1] for x in parts)
    return parts[0].new_empty((rows, width), dtype=dtype), parts[0].new_empty(
        (width, rows), dtype=dtype
    )


@swiglu_backward.register_fake
def _(gate: Any, *others: Any) -> Any:
    dtype, made_dtype = others[-2:]
    straight = gate.shape
    flipped = gate.shape[::-1]
    shapes = (
        (straight, dtype),
        (flipped, dtype),
        (straight, dtype),
        (flipped, dtype),
        (flipped, made_dtype),
    )
    return tuple(gate.new_empty(shape, dtype=kind) for shape, kind in shapes)
