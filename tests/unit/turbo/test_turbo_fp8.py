"""Linear layers and the feed-forward block in FP8: on a CPU, where the operators compute in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from primus.turbo import fp8, fp8_kernels  # noqa: E402
from primus.turbo.optimizations import CALLS  # noqa: E402

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
# What rounding the factors of a product to 3 and 2 bits does to it, with some room.
BOUND = 0.08


def config() -> Any:
    """The part of torchao's Float8LinearConfig that is read."""
    cast, product = (lambda kind: SimpleNamespace(target_dtype=kind)), SimpleNamespace(use_fast_accum=False)
    return SimpleNamespace(
        cast_config_input=cast(E4), cast_config_weight=cast(E4), cast_config_grad_output=cast(E5),
        gemm_config_output=product, gemm_config_grad_input=product, gemm_config_grad_weight=product,
    )  # fmt: skip


def off(found: Any, wanted: Any) -> float:
    return float((found.detach() - wanted.detach()).norm() / wanted.detach().norm())


def compare(ours: Callable[..., Any], exact: Callable[..., Any], tensors: list[Any]) -> list[float]:
    """How far outputs and gradients are from those in float32."""
    found, wanted = ours(*tensors), exact(*tensors)
    grads = [torch.randn_like(one) * 1e-4 for one in wanted]
    rows = zip(
        (*found, *torch.autograd.grad(found, tensors, grads)),
        (*wanted, *torch.autograd.grad(wanted, tensors, grads)), strict=True,
    )  # fmt: skip
    return [off(a, b) for a, b in rows]


def tensors(*shapes: tuple[int, ...], scale: float = 1.0) -> list[Any]:
    torch.manual_seed(3)
    return [(torch.randn(shape) * scale).requires_grad_() for shape in shapes]


def test_a_linear_layer_and_its_gradients_are_right_to_fp8() -> None:
    made = compare(
        lambda x, w: [fp8.linear(x, w, config())], lambda x, w: [torch.nn.functional.linear(x, w)],
        tensors((2, 24, 32), (48, 32)),
    )  # fmt: skip
    assert max(made) < BOUND


def test_layers_of_one_input_keep_their_own_scales() -> None:
    x, *weights = tensors((2, 24, 32), (48, 32), (16, 32), (16, 32))
    with torch.no_grad():
        weights[1] *= 1e-3
        weights[2] *= 1e3
    made = compare(
        lambda x, *w: list(fp8.projections(x, w, config())),
        lambda x, *w: [torch.nn.functional.linear(x, each) for each in w],
        [x, *weights],
    )
    assert max(made) < BOUND


def test_the_feed_forward_block_and_its_gradients_are_right_to_fp8() -> None:
    def exact(x: Any, gate: Any, up: Any, down: Any) -> list[Any]:
        linear = torch.nn.functional.linear
        return [linear(torch.nn.functional.silu(linear(x, gate)) * linear(x, up), down)]

    before = CALLS["fp8_swiglu_backward"]
    made = compare(
        lambda *given: [fp8.feed_forward(*given, config())], exact,
        tensors((2, 24, 32), (48, 32), (48, 32), (32, 48), scale=0.5),
    )  # fmt: skip
    # Two products follow each other, so errors of both add up.
    assert max(made) < 1.7 * BOUND
    assert CALLS["fp8_swiglu_backward"] == before + 1


@pytest.mark.parametrize("kind", [E4, E5])
def test_both_layouts_hold_the_same_values_side_by_side(kind: Any) -> None:
    parts = [torch.randn(6, 4) * 1e3, torch.randn(6, 3)]
    scales = [torch.tensor(2.0), torch.tensor(0.5)]
    rows, columns = fp8_kernels.cast_both(parts, scales, kind)
    top = torch.finfo(kind).max
    wanted = torch.cat([(part * scale).clamp(-top, top) for part, scale in zip(parts, scales, strict=True)], 1).to(kind)
    assert torch.equal(rows.float(), wanted.float())
    assert torch.equal(columns.float(), wanted.float().t())
    assert rows.is_contiguous() and columns.is_contiguous()


def test_nan_is_not_hidden() -> None:
    gate, up, grad = (torch.randn(4, 8) for _ in range(3))
    gate[1, 2] = float("nan")
    assert fp8_kernels.swiglu_largest(gate, up).isnan()
    assert fp8_kernels.swiglu_backward_largest(gate, up, grad).isnan().all()
    assert fp8_kernels.largest(gate).isnan()
    (weight,) = tensors((5, 8))
    assert fp8.linear(gate, weight, config()).isnan().any()


def test_a_compiled_layer_casts_one_input_once() -> None:
    x, one, other = tensors((2, 24, 32), (48, 32), (48, 32))
    settings = pytest.importorskip("torchao.float8").Float8LinearConfig()
    both = torch.compile(
        lambda x, a, b: fp8.linear(x, a, settings) + fp8.linear(x, b, settings), backend="aot_eager", fullgraph=True
    )
    assert off(both(x, one, other), x @ (one + other).t()) < BOUND
