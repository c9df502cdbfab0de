"""Comparing a kernel's results with float64, next to those of plain PyTorch in the same types."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primus_images.turbo.deterministic import deterministic

# How many times as far from float64 as plain PyTorch in the same types. Healthy kernels round at
# other places, and reach 1.5 in the largest of many rows.
_AS_A_WHOLE = 1.5
_IN_ONE_ROW = 2.5
_IN_ONE_VALUE = 3.0
# A factor on the whole result, relative. Rounding cancels out over a tensor, and leaves a tenth of
# this. With two or three bits, it depends on where the values fall between powers of two, and
# reaches 0.7 %.
SCALE = 5.0e-4
SCALE_FP8 = 2.0e-2
# The error of a single number is not that of a mean: it may be 0 in plain PyTorch by chance.
_ALONE = 1.0e-4
# Rows and columns with almost no content are measured by the size of the others.
_LEAST = 0.05
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One tensor that a kernel computed, beside the same in float64 and by plain PyTorch.

    All have the same shape. Without ``exact``, ``out`` must have the bits of ``plain``, which is
    that of ``beside``. ``floor`` is a relative error that is always allowed, for results with few
    numbers.
    """

    label: str
    out: Tensor
    plain: Tensor
    exact: Tensor | None = None
    beside: str = "plain PyTorch"
    floor: float = 0.0
    factor: float = SCALE

    def fault(self) -> str:
        """Return what is wrong with ``out`` as the end of "LABEL …", or an empty string."""
        if self.out.shape != self.plain.shape:
            return f"has shape {list(self.out.shape)}, not {list(self.plain.shape)}"
        if self.exact is None:
            return self._other_bytes()
        out = _matrix(self.out)
        count = int((~torch.isfinite(out)).sum())
        if count:
            return f"has {count:,} values that are not finite, of {out.numel():,}"
        plain = _matrix(self.plain)
        exact = _matrix(self.exact)
        return self._distance(out, plain, exact) or self._scaling(out, plain, exact)

    def _other_bytes(self) -> str:
        bits = self.out.reshape(-1).view(torch.uint8)
        count = int((bits != self.plain.reshape(-1).view(torch.uint8)).sum())
        if count:
            return f"has {count:,} other bytes than {self.beside}, of {bits.numel():,}"
        return ""

    def _distance(self, out: Tensor, plain: Tensor, exact: Tensor) -> str:
        allowed = self.floor + float(torch.finfo(self.out.dtype).eps) / 16
        for part, limit, measure in _MEASURES:
            error = measure(out - exact, exact)
            accepted = measure(plain - exact, exact)
            if not error <= limit * accepted + allowed:
                return f"is {error:.2g} from float64 {part}, and plain PyTorch {accepted:.2g}"
        return ""

    def _scaling(self, out: Tensor, plain: Tensor, exact: Tensor) -> str:
        excess = _factor(out, exact) - 1
        accepted = _factor(plain, exact) - 1
        if abs(excess) > 2 * abs(accepted) + self.factor + self.floor:
            return f"is scaled by {1 + excess:.5f}"
        return ""


def _matrix(tensor: Tensor) -> Tensor:
    wide = tensor.detach().double()
    if wide.dim() > 1:
        return wide.reshape(-1, wide.shape[-1])
    return wide.reshape(1, -1)


def _factor(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor * exact).sum() / (exact * exact).sum())


def _root_mean_square(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt().clamp(min=_TINY)


def _as_a_whole(error: Tensor, exact: Tensor) -> float:
    return float(error.norm() / exact.norm().clamp(min=_TINY))


def _in_one_row(error: Tensor, exact: Tensor) -> float:
    sizes = exact.norm(dim=1)
    least = _LEAST * _root_mean_square(sizes)
    return float((error.norm(dim=1) / sizes.clamp(min=least)).max())


def _in_one_column(error: Tensor, exact: Tensor) -> float:
    return _in_one_row(error.t(), exact.t())


def _in_one_value(error: Tensor, exact: Tensor) -> float:
    return float(error.abs().max() / _root_mean_square(exact))


_MEASURES = (
    ("as a whole", _AS_A_WHOLE, _as_a_whole),
    ("in one row", _IN_ONE_ROW, _in_one_row),
    ("in one column", _IN_ONE_ROW, _in_one_column),
    ("in one value", _IN_ONE_VALUE, _in_one_value),
)

Rows = Iterator[Compared]


class Maker:
    """Random tensors on one device. ``deterministic``: kernels must repeat their bits."""

    def __init__(self, device: str, seed: int, *, deterministic: bool = False) -> None:
        self.device = device
        self.deterministic = deterministic
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(
        self, *sizes: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """Return numbers from N(0, ``scale``²)."""
        numbers = torch.randn(*sizes, generator=self.generator, device=self.device)
        return (numbers * scale).to(dtype)

    def weight(self, rows: int, columns: int) -> Tensor:
        """Return the weight of a layer whose outputs are as large as its inputs."""
        return self.normal(rows, columns, scale=columns**-0.5)

    def whole(self, top: int, *sizes: int) -> Tensor:
        """Return whole numbers from 0 to ``top`` − 1."""
        return torch.randint(0, top, sizes, generator=self.generator, device=self.device)

    def gradient(self, out: Tensor) -> Tensor:
        """Return a gradient of the result ``out``: 1 for a loss."""
        if out.dim():
            return self.normal(*out.shape, dtype=out.dtype)
        return torch.ones_like(out)


class Ways(NamedTuple):
    """Three functions of the same tensors: a kernel, plain PyTorch, and one for float64."""

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    exact: Callable[..., Any]


def three_ways(
    labels: Sequence[str],
    ways: Ways,
    inputs: Sequence[Tensor],
    make: Maker,
    factor: float = SCALE,
) -> Rows:
    """Compare results of three functions of ``inputs``, then the gradients of all inputs."""
    results: list[list[Tensor]] = []
    grads: list[Tensor] = []
    for function, dtype in ((ways.ours, None), (ways.plain, None), (ways.exact, torch.float64)):
        leaves = leaves_of(inputs, dtype)
        outputs = _outputs(function, leaves)
        if not grads:
            grads = [make.gradient(out) for out in outputs]
        results.append(_with_gradients(outputs, leaves, grads))
        del outputs, leaves
    for label, out, plain, exact in zip(labels, *results, strict=True):
        if out.dim():
            floor = 0.0
        else:
            floor = _ALONE
        yield Compared(label=label, out=out, plain=plain, exact=exact, floor=floor, factor=factor)
    if make.deterministic:
        yield from _twice(labels, ways.ours, inputs, grads)


def _twice(
    labels: Sequence[str],
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> Rows:
    """Compare the bits of two calls by deterministic algorithms."""
    calls = []
    with deterministic():
        for _ in range(2):
            leaves = leaves_of(inputs, None)
            outputs = _outputs(function, leaves)
            calls.append(_with_gradients(outputs, leaves, grads))
    for label, first, second in zip(labels, *calls, strict=True):
        yield Compared(
            label=f"{label}, computed twice,", out=second, plain=first, beside="the first time"
        )


def leaves_of(inputs: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Return copies in ``dtype``, if there is one, of which gradients can be computed."""
    return [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in inputs]


def _outputs(function: Callable[..., Any], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    outputs = function(*leaves)
    if isinstance(outputs, tuple):
        return outputs
    return (outputs,)


def _with_gradients(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[Tensor]:
    grads = [grad.to(out.dtype) for grad, out in zip(grads, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, leaves, grads)
    return [*(out.detach() for out in outputs), *gradients]


def formats() -> Any:
    """Return torchao's settings of FP8 with one scale per tensor."""
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig.from_recipe_name("tensorwise")


def plain_linear(x: Tensor, weight: Tensor, config: Any) -> Tensor:
    """Return ``x @ weight.T`` by torchao in FP8."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    # A CPU has no product of FP8: torchao emulates it there.
    products = []
    for product in (
        config.gemm_config_output,
        config.gemm_config_grad_input,
        config.gemm_config_grad_weight,
    ):
        fast = x.is_cuda and product.use_fast_accum
        products.append(ScaledMMConfig(not x.is_cuda, fast, False, False))
    out: Tensor = matmul_with_hp_or_float8_args.apply(
        x, weight.t(), LinearMMConfig(*products), config
    )
    return out
