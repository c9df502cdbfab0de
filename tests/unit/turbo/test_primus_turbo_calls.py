"""What Primus Turbo is called with, and frozen weights in FP8."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")

from torch import Tensor, nn  # noqa: E402

from primus_images.turbo import fp8, primus_turbo  # noqa: E402
from primus_images.turbo.optimizations import CALLS  # noqa: E402


class Package:
    """A stand-in for ``primus_turbo.pytorch`` that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.ops = SimpleNamespace(flash_attn_func=self.attend, grouped_gemm=self.product)
        self.modules = SimpleNamespace(Float8Linear=SimpleNamespace(from_float=self.convert))
        low = SimpleNamespace(
            Float8QuantConfig=lambda **words: words,
            ScalingGranularity=SimpleNamespace(TENSORWISE="by tensor"),
        )
        self.core = SimpleNamespace(low_precision=low)

    def attend(self, *parts: Tensor, **words: Any) -> Tensor:
        assert all(part.is_contiguous() for part in parts)
        self.calls.append(words)
        return parts[0]

    def product(self, x: Tensor, weights: Tensor, group_lens: Tensor, trans_b: bool) -> Tensor:
        assert trans_b and group_lens.dtype == torch.int64
        parts = x.split(group_lens.tolist())
        return torch.cat([part @ one.T for part, one in zip(parts, weights, strict=True)])

    def convert(self, module: nn.Module, config: Any) -> None:
        self.calls.append((module.out_features, config))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    made = Package()
    monkeypatch.setattr(primus_turbo, "_package", lambda: made)
    before = dict(CALLS)
    yield made
    CALLS.clear()
    CALLS.update(before)


@pytest.mark.parametrize(("window", "seen"), [(0, (-1, -1)), (4, (3, 0))])
def test_attention_is_causal_with_a_window(
    package: Package, window: int, seen: tuple[int, int]
) -> None:
    q, k, v = (torch.randn(2, 4, 3, 8).transpose(1, 2) for _ in range(3))
    before = CALLS["turbo_attention"]
    out = primus_turbo.attention(q, k, v, scale=0.3, window=window)
    assert torch.equal(out, q)
    assert package.calls == [
        {"softmax_scale": 0.3, "causal": True, "window_size": seen, "deterministic": False}
    ]
    assert CALLS["turbo_attention"] == before + 1


def test_linear_layers_are_converted_but_those_left_out(package: Package) -> None:
    model = nn.ModuleDict(
        {"wide": nn.Linear(128, 256), "output": nn.Linear(128, 3), "norm": nn.LayerNorm(128)}
    )
    before = CALLS["turbo_fp8_linear"]
    primus_turbo.convert_linears(model, ["output"])
    assert package.calls == [(256, {"granularity": "by tensor"})]
    model["wide"](torch.ones(1, 128))
    assert CALLS["turbo_fp8_linear"] == before + 1
    with pytest.raises(SystemExit, match=r"output has 3 × 128 weights, .* multiples of 128"):
        primus_turbo.convert_linears(model, [])


def test_experts_are_grouped_products(package: Package) -> None:
    torch.manual_seed(0)
    w1, w3 = torch.randn(2, 2, 6, 4)
    w2 = torch.randn(2, 4, 6)
    x = torch.randn(5, 4)
    before = CALLS["turbo_grouped_gemm"]
    out = primus_turbo.grouped_experts(w1, w2, w3, x, torch.tensor([2, 3]))
    rows = []
    for number, part in enumerate(x.split([2, 3])):
        inner = nn.functional.silu(part @ w1[number].T) * (part @ w3[number].T)
        rows.append(inner @ w2[number].T)
    torch.testing.assert_close(out.float(), torch.cat(rows), rtol=0.05, atol=0.1)
    assert CALLS["turbo_grouped_gemm"] == before + 1


def test_package_is_that_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("primus_turbo", ".pytorch", ".core", ".low_precision")
    modules: list[Any] = []
    for number in range(len(names)):
        name = "".join(names[: number + 1])
        modules.append(ModuleType(name))
        monkeypatch.setitem(sys.modules, name, modules[-1])
    modules[0].pytorch = modules[1]
    assert primus_turbo._package() is modules[1]


@pytest.mark.parametrize("bias", [True, False])
def test_frozen_weights_in_fp8_give_nearly_the_same(bias: bool) -> None:
    from torchao.float8 import convert_to_float8_training

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64, bias=bias), nn.Linear(64, 16)).bfloat16()
    plain[0].weight.requires_grad_(False)
    model = convert_to_float8_training(nn.Sequential(*plain))
    weight = plain[0].weight.detach().clone()
    fp8.freeze(model)
    assert [name for name, _ in model.named_buffers()] == [
        "0.eight",
        "0.eight_turned",
        "0.eight_scale",
    ]
    assert not model.state_dict().keys() & {"0.eight", "0.eight_turned", "0.eight_scale"}
    x = torch.randn(2, 8, 32).bfloat16().requires_grad_()
    out = model[0](x)
    right = nn.functional.linear(x, weight, plain[0].bias if bias else None)
    assert out.shape == right.shape
    assert float((out - right).detach().norm() / right.detach().norm()) < 0.06
    given = torch.randn_like(out)
    of_x, right_of_x = (torch.autograd.grad(each, x, given)[0] for each in (out, right))
    assert float((of_x - right_of_x).norm() / right_of_x.norm()) < 0.12
    assert not torch.equal(out, right)
