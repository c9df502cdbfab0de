"""The verdict on a kernel's result: how far it is from float64, next to plain PyTorch's result in the same types."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The distance from float64 may be this many times that of plain PyTorch. Healthy kernels round at other places, and
# reach 1.5 in the largest of many rows.
_ROWS = 2.5
_ELEMENTS = 3.0
_ALL = 1.5
# A factor on the whole result, relative. Rounding cancels out over a tensor, and leaves a tenth of this. With two or
# three bits, it depends on where the values fall between powers of two, and reaches 0.7 %.
SCALE = 5e-4
SCALE_FP8 = 2e-2
# Rows and columns with almost no content are measured by the size of the others.
_LEAST = 0.05


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One tensor that a kernel computed, beside the same in float64 and by plain PyTorch.

    All have the same shape. Without ``exact``, ``out`` must have the bits of ``plain``. ``floor`` is a relative error
    that is always allowed, for results with few numbers.
    """

    label: str
    out: torch.Tensor
    plain: torch.Tensor
    exact: torch.Tensor | None = None
    floor: float = 0.0
    factor: float = SCALE

    def fault(self) -> str:
        """Return what is wrong with ``out`` as the end of "LABEL …", or an empty string."""
        if self.out.shape != self.plain.shape:
            return f"has shape {list(self.out.shape)}, not {list(self.plain.shape)}"
        if self.exact is None:
            return self._other_bits()
        out, plain, exact = (_rows(tensor) for tensor in (self.out, self.plain, self.exact))
        if count := int((~torch.isfinite(out)).sum()):
            return f"has {count:,} values that are not finite, of {out.numel():,}"
        error, accepted = out - exact, plain - exact
        for part, limit, ratios in (
            ("as a whole", _ALL, [_relative(e, exact, None) for e in (error, accepted)]),
            ("in one row", _ROWS, [_relative(e, exact, 1) for e in (error, accepted)]),
            ("in one column", _ROWS, [_relative(e, exact, 0) for e in (error, accepted)]),
            ("in one value", _ELEMENTS, [_largest(e, exact) for e in (error, accepted)]),
        ):
            here, there = ratios
            if not here <= limit * there + self.floor + _resolution(self.out.dtype):
                return f"is {here:.2g} from float64 {part}, and plain PyTorch {there:.2g}"
        factor, usual = (float((t * exact).sum() / (exact * exact).sum()) - 1 for t in (out, plain))
        if abs(factor) > 2 * abs(usual) + self.factor + self.floor:
            return f"is scaled by {1 + factor:.5f}"
        return ""

    def _other_bits(self) -> str:
        out, plain = (tensor.contiguous().view(torch.uint8) for tensor in (self.out, self.plain))
        other = int((out != plain).sum())
        return f"has {other:,} other bytes than plain PyTorch, of {out.numel():,}" if other else ""


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.detach().double()
    return wide.reshape(-1, wide.shape[-1]) if wide.dim() > 1 else wide.reshape(1, -1)


def _relative(error: torch.Tensor, exact: torch.Tensor, dim: int | None) -> float:
    """Return the norm of ``error`` ÷ that of ``exact``; with ``dim``, the largest over all rows (1) or columns (0)."""
    if dim is None:
        return float(error.norm() / exact.norm().clamp(min=1e-300))
    sizes = exact.norm(dim=dim)
    least = _LEAST * sizes.square().mean().sqrt().clamp(min=1e-300)
    return float((error.norm(dim=dim) / sizes.clamp(min=least)).max())


def _largest(error: torch.Tensor, exact: torch.Tensor) -> float:
    return float(error.abs().max() / exact.square().mean().sqrt().clamp(min=1e-300))


def _resolution(dtype: torch.dtype) -> float:
    """Return an error that one rounding to ``dtype`` makes on average, relative."""
    return float(torch.finfo(dtype).eps) / 16
