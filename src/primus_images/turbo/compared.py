"""Comparing a kernel's results with float64, next to those of plain PyTorch in the same types."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from primus_images.yamlfile import read_values

_LIMITS: Any = read_values(Path(__file__).with_name("limits.yaml")).data
SCALE: float = _LIMITS["scale"]
SCALE_FP8: float = _LIMITS["scale_fp8"]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One tensor that a kernel computed, beside the same in float64 and by plain PyTorch.

    All have the same shape. Without ``exact``, ``out`` must have the bits of ``plain``. ``floor``
    is a relative error that is always allowed, for results with few numbers.
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
            bits, plain_bits = (
                tensor.contiguous().view(torch.uint8) for tensor in (self.out, self.plain)
            )
            other = int((bits != plain_bits).sum())
            if other:
                return f"has {other:,} other bytes than plain PyTorch, of {bits.numel():,}"
            return ""
        out, plain, exact = (_rows(tensor) for tensor in (self.out, self.plain, self.exact))
        count = int((~torch.isfinite(out)).sum())
        if count:
            return f"has {count:,} values that are not finite, of {out.numel():,}"
        error = out - exact
        accepted = plain - exact
        typical = exact.square().mean().sqrt().clamp(min=1e-300)
        for part, limit, ratios in (
            ("as a whole", _LIMITS["all"], [_relative(e, exact, None) for e in (error, accepted)]),
            ("in one row", _LIMITS["rows"], [_relative(e, exact, 1) for e in (error, accepted)]),
            ("in one column", _LIMITS["rows"], [_relative(e, exact, 0) for e in (error, accepted)]),
            (
                "in one value",
                _LIMITS["elements"],
                [float(e.abs().max() / typical) for e in (error, accepted)],
            ),
        ):
            here, there = ratios
            if not here <= limit * there + self.floor + float(torch.finfo(self.out.dtype).eps) / 16:
                return f"is {here:.2g} from float64 {part}, and plain PyTorch {there:.2g}"
        factor, usual = (float((t * exact).sum() / (exact * exact).sum()) - 1 for t in (out, plain))
        if abs(factor) > 2 * abs(usual) + self.factor + self.floor:
            return f"is scaled by {1 + factor:.5f}"
        return ""


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.detach().double()
    if wide.dim() > 1:
        return wide.reshape(-1, wide.shape[-1])
    return wide.reshape(1, -1)


def _relative(error: torch.Tensor, exact: torch.Tensor, dim: int | None) -> float:
    """Return the norm of ``error`` ÷ that of ``exact``; with ``dim``, the largest over all rows (1)
    or columns (0).
    """
    if dim is None:
        return float(error.norm() / exact.norm().clamp(min=1e-300))
    sizes = exact.norm(dim=dim)
    least = _LIMITS["least"] * sizes.square().mean().sqrt().clamp(min=1e-300)
    return float((error.norm(dim=dim) / sizes.clamp(min=least)).max())


Rows = Iterator[Compared]


class Maker:
    """Random tensors on one device."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(
        self, *sizes: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        """Return numbers from N(0, ``scale``²)."""
        numbers = torch.randn(*sizes, generator=self.generator, device=self.device)
        return (numbers * scale).to(dtype)

    def whole(self, top: int, *sizes: int) -> torch.Tensor:
        """Return whole numbers from 0 to ``top`` − 1."""
        return torch.randint(0, top, sizes, generator=self.generator, device=self.device)


def leaves_of(*tensors: torch.Tensor, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return copies in ``dtype`` of which gradients can be computed."""
    return [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors]


def three_ways(
    labels: tuple[str, ...],
    function: Any,
    plain: Any,
    exact: Any,
    *inputs: torch.Tensor,
    make: Maker,
    factor: float = SCALE,
) -> Rows:
    """Compare results and gradients of ``function`` with those of ``plain`` and of ``exact``, in
    float64.
    """
    results: list[tuple[torch.Tensor, ...]] = []
    grads: list[torch.Tensor] = []
    for call, dtype in ((function, None), (plain, None), (exact, torch.float64)):
        leaves = leaves_of(*inputs, dtype=dtype)
        outputs = call(*leaves)
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        grads = grads or [
            make.normal(*out.shape, dtype=out.dtype) if out.dim() else torch.ones_like(out)
            for out in outputs
        ]
        gradients = torch.autograd.grad(
            outputs, leaves, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
        )
        results.append((*(out.detach() for out in outputs), *gradients))
        del outputs, gradients, leaves
    for label, out, usual, best in zip(labels, *results, strict=True):
        if out.dim():
            floor = 0.0
        else:
            floor = _LIMITS["alone"]
        yield Compared(label=label, out=out, plain=usual, exact=best, floor=floor, factor=factor)


def formats() -> Any:
    """Return torchao's settings of FP8 with one scale per tensor."""
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig.from_recipe_name("tensorwise")


def plain_linear(x: torch.Tensor, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Return ``x @ weight.T`` by torchao in FP8; in float64 if ``x`` is."""
    if x.dtype == torch.float64:
        return x @ weight.t()
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    products = [
        ScaledMMConfig(not x.is_cuda, x.is_cuda and part.use_fast_accum, False, False)
        for part in (
            config.gemm_config_output,
            config.gemm_config_grad_input,
            config.gemm_config_grad_weight,
        )
    ]
    out: torch.Tensor = matmul_with_hp_or_float8_args.apply(
        x, weight.t(), LinearMMConfig(*products), config
    )
    return out
