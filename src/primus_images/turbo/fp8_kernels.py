"""Triton kernels that quantize to FP8, and operators that call them.

Each writes a tensor and its transpose in one pass. Every operator counts its calls in
:data:`primus_images.turbo.optimizations.CALLS`. For tensors that are not on a GPU, the operators
compute the same in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
def _store_both(
    value, rows_out, columns_out, offsets, turned, inside, turned_inside, ALONE: tl.constexpr
):
    """Store ``value`` as FP8 at ``offsets``, and its transpose as bytes at ``turned``."""
    KIND: tl.constexpr = rows_out.dtype.element_ty
    tl.store(rows_out + offsets, value.to(KIND), mask=inside)
    tl.store(columns_out + turned, tl.trans(_bytes(value, KIND, ALONE)), mask=turned_inside)


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The offsets of this program's tile in a matrix and in its transpose, and what is inside."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    offsets = row[:, None] * columns + column[None, :]
    turned = column[:, None] * rows + row[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    turned_inside = (column[:, None] < columns) & (row[None, :] < rows)
    return offsets, turned, inside, turned_inside


@triton.jit
def _cast_both(
    x,
    scale,
    rows_out,
    columns_out,
    rows,
    columns,
    LARGEST: tl.constexpr,
    ALONE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    offsets, turned, inside, turned_inside = _tile(rows, columns, ROWS, COLUMNS)
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    value = _cut(value * tl.load(scale), LARGEST)
    _store_both(value, rows_out, columns_out, offsets, turned, inside, turned_inside, ALONE)


@triton.jit
def _flip(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    offsets, turned, inside, turned_inside = _tile(rows, columns, ROWS, COLUMNS)
    value = tl.load(x + offsets, mask=inside, other=0)
    tl.store(out + turned, tl.trans(value), mask=turned_inside)


@triton.jit
def _swiglu_cast(gate, up, scale, out, count, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    a = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + offsets, mask=inside, other=0.0).to(tl.float32)
    product = a * tl.sigmoid(a) * b
    value = _cut(product * tl.load(scale), LARGEST)
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_gradients(a, b, d):
    """Gradients of gate and up, and the product itself, in float32."""
    sigmoid = tl.sigmoid(a)
    silu = a * sigmoid
    return d * b * (sigmoid + silu * (1.0 - sigmoid)), d * silu, silu * b


@triton.jit
def _largest(
    gate,
    up,
    grad,
    largest,
    count,
    GRADIENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The largest absolute value of the product, or with ``GRADIENTS`` of both gradients."""
    top = tl.zeros([BLOCK], tl.float32)
    top_up = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    for block in tl.static_range(BLOCKS):
        offsets = first + block * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < count
        a = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(up + offsets, mask=inside, other=0.0).to(tl.float32)
        if GRADIENTS:
            d = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
            value, of_up, _ = _swiglu_gradients(a, b, d)
            top_up = _larger(top_up, tl.abs(of_up))
        else:
            value = a * tl.sigmoid(a) * b
        top = _larger(top, tl.abs(value))
    tl.atomic_max(largest, tl.reduce(top, 0, _larger), sem="relaxed")
    if GRADIENTS:
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
    offsets, turned, inside, turned_inside = _tile(rows, columns, ROWS, COLUMNS)
    a = tl.load(gate + offsets, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + offsets, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
    of_gate, of_up, product = _swiglu_gradients(a, b, d)
    value = _cut(of_gate * tl.load(gate_scale), LARGEST)
    _store_both(value, gate_rows, gate_columns, offsets, turned, inside, turned_inside, ALONE)
    value = _cut(of_up * tl.load(up_scale), LARGEST)
    _store_both(value, up_rows, up_columns, offsets, turned, inside, turned_inside, ALONE)
    value = _cut(product * tl.load(made_scale), LARGEST_MADE)
    tl.store(made_columns + turned, tl.trans(_bytes(value, MADE, False)), mask=turned_inside)


def _alone(dtype: torch.dtype) -> bool:
    return dtype == torch.float8_e5m2 and torch.version.hip is None


def _grid(rows: int, columns: int, tile: tuple[int, int, int]) -> tuple[int, int]:
    return triton.cdiv(columns, tile[1]), triton.cdiv(rows, tile[0])


def _reduced(gate: Tensor, up: Tensor, grad: Tensor | None = None) -> Tensor:
    gradients = grad is not None
    out = torch.zeros(2 if gradients else 1, dtype=torch.float32, device=gate.device)
    count = gate.numel()
    gate = gate.contiguous()
    _largest[(triton.cdiv(count, _LARGEST_BLOCK * _LARGEST_BLOCKS),)](
        gate,
        up.contiguous(),
        gate if grad is None else grad.contiguous(),
        out,
        count,
        GRADIENTS=gradients,
        BLOCK=_LARGEST_BLOCK,
        BLOCKS=_LARGEST_BLOCKS,
        num_warps=8,
    )
    return out


def _turned(x: Tensor) -> Tensor:
    return x.view(torch.uint8).t().clone(memory_format=torch.contiguous_format).view(x.dtype)


@torch.library.custom_op("primus::fp8_cast_both", mutates_args=())
def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Multiply ``x`` [rows, columns] by ``scale``, clamp it to ``dtype``'s range and cast it.

    Returns the result and its transpose.
    """
    CALLS["fp8_cast_both"] += 1
    if not x.is_cuda:
        cast = eight(x, scale, dtype)
        return cast, _turned(cast)
    rows, columns = x.shape
    out = x.new_empty((rows, columns), dtype=dtype)
    turned = x.new_empty((columns, rows), dtype=dtype)
    tile = TILES["cast_both"]
    _cast_both[_grid(rows, columns, tile)](
        x.contiguous(),
        scale,
        out,
        turned.view(torch.uint8),
        rows,
        columns,
        LARGEST=torch.finfo(dtype).max,
        ALONE=_alone(dtype),
        ROWS=tile[0],
        COLUMNS=tile[1],
        num_warps=tile[2],
    )
    return out, turned


@torch.library.custom_op("primus::fp8_flip", mutates_args=())
def flip(x: Tensor) -> Tensor:
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
def swiglu_largest(gate: Tensor, up: Tensor) -> Tensor:
    """Return the largest absolute value of ``silu(gate) · up``, in float32; NaN if there is one."""
    CALLS["fp8_swiglu_largest"] += 1
    if not gate.is_cuda:
        return (torch.nn.functional.silu(gate.float()) * up.float()).abs().max()
    return _reduced(gate, up)[0]


@torch.library.custom_op("primus::fp8_swiglu_cast", mutates_args=())
def swiglu_cast(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
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


def _gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a = gate.float()
    b = up.float()
    d = grad.float()
    sigmoid = a.sigmoid()
    silu = a * sigmoid
    return d * b * (sigmoid + silu * (1 - sigmoid)), d * silu, silu * b


@torch.library.custom_op("primus::fp8_swiglu_backward_largest", mutates_args=())
def swiglu_backward_largest(gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    """Return the largest absolute gradients of ``gate`` and ``up`` under ``grad``: two float32, NaN
    if there is one.
    """
    CALLS["fp8_swiglu_backward_largest"] += 1
    if not gate.is_cuda:
        of_gate, of_up, _ = _gradients(gate, up, grad)
        return torch.stack((of_gate.abs().max(), of_up.abs().max()))
    return _reduced(gate, up, grad)


@torch.library.custom_op("primus::fp8_swiglu_backward", mutates_args=())
def swiglu_backward(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    gate_scale: Tensor,
    up_scale: Tensor,
    made_scale: Tensor,
    dtype: torch.dtype,
    made_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
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
    gate_rows = gate.new_empty((rows, columns), dtype=dtype)
    gate_columns = gate.new_empty((columns, rows), dtype=dtype)
    up_rows = torch.empty_like(gate_rows)
    up_columns = torch.empty_like(gate_columns)
    made_columns = gate.new_empty((columns, rows), dtype=made_dtype)
    tile = TILES["swiglu_backward"]
    _swiglu_backward[_grid(rows, columns, tile)](
        gate.contiguous(),
        up.contiguous(),
        grad.contiguous(),
        gate_scale,
        up_scale,
        made_scale,
        gate_rows,
        gate_columns.view(torch.uint8),
        up_rows,
        up_columns.view(torch.uint8),
        made_columns.view(torch.uint8),
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
    return gate_rows, gate_columns, up_rows, up_columns, made_columns


# What a compiler sees of the operators: the types and shapes of their results.
swiglu_largest.register_fake(lambda gate, _up: gate.new_empty((), dtype=torch.float32))
swiglu_backward_largest.register_fake(
    lambda gate, _up, _grad: gate.new_empty((2,), dtype=torch.float32)
)
swiglu_cast.register_fake(lambda gate, _up, _scale, dtype: gate.new_empty(gate.shape, dtype=dtype))
flip.register_fake(lambda x: x.new_empty(x.shape[::-1]))


@cast_both.register_fake
def _(x: Any, _scale: Any, dtype: torch.dtype) -> Any:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[::-1], dtype=dtype)


@swiglu_backward.register_fake
def _(gate: Any, *others: Any) -> Any:
    dtype, made_dtype = others[-2:]
    rows = gate.new_empty(gate.shape, dtype=dtype)
    columns = gate.new_empty(gate.shape[::-1], dtype=dtype)
    made_columns = gate.new_empty(gate.shape[::-1], dtype=made_dtype)
    return rows, columns, torch.empty_like(rows), torch.empty_like(columns), made_columns
