"""What the self-test does not call: logits without labels, frozen layers, NaN, what is left to
PyTorch, compilation.
"""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("torchao")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torchao.float8 import Float8LinearConfig  # noqa: E402

from primus_images.turbo import fp8, fp8_kernels, kernels  # noqa: E402
from primus_images.turbo.kernels import LossHead, linear_cross_entropy  # noqa: E402


def test_the_head_returns_logits_where_no_labels_are_set() -> None:
    head = torch.nn.Linear(8, 20, bias=False)
    x = torch.randn(2, 3, 8)
    logits = head(x)
    head.__class__ = LossHead
    assert torch.equal(head(x), logits)
    head.labels = torch.zeros(2, 3, dtype=torch.long)
    assert head(x).dim() == 0
    assert torch.equal(head(x), logits)  # labels hold for one call


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    torch.manual_seed(2)
    x = torch.randn(10, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.float64)
    labels = torch.randint(0, 50, (10,))
    (gradient,) = torch.autograd.grad(
        torch.nn.functional.cross_entropy(x @ weight.t(), labels, reduction="sum"), x
    )
    linear_cross_entropy(x, weight, labels, chunk=4).backward()
    assert torch.allclose(x.grad, gradient, atol=1e-6)
    assert weight.grad is None


@pytest.mark.parametrize("grad", [torch.randn(3, 4), torch.randn(4, 4).t()])
def test_what_cannot_be_laid_out_is_left_to_pytorch(grad: Any) -> None:
    out = torch.zeros(16)
    assert not kernels.copy_in([grad], out, 2)
    assert not out.any()


def test_nan_is_not_hidden() -> None:
    gate, up, grad = (torch.randn(4, 8) for _ in range(3))
    gate[1, 2] = float("nan")
    assert fp8_kernels.swiglu_largest(gate, up).isnan()
    assert fp8_kernels.swiglu_backward_largest(gate, up, grad).isnan().all()
    assert fp8.linear(gate, torch.randn(5, 8), Float8LinearConfig()).isnan().any()


def test_a_layer_can_be_compiled() -> None:
    torch.manual_seed(3)
    x, weight, config = torch.randn(2, 24, 32), torch.randn(48, 32), Float8LinearConfig()
    layer = torch.compile(
        lambda x, w: fp8.linear(x, w, config), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(layer(x, weight), fp8.linear(x, weight, config))


def _signatures(results: Any) -> list[tuple[Any, torch.dtype]]:
    tensors = results if isinstance(results, tuple) else (results,)
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


FP8 = torch.float8_e4m3fn
BF8 = torch.float8_e5m2


@pytest.mark.parametrize(
    ("operator", "matrices", "scales", "dtypes"),
    [
        (fp8_kernels.cast_both, 1, 1, (FP8,)),
        (fp8_kernels.swiglu_largest, 2, 0, ()),
        (fp8_kernels.swiglu_backward_largest, 3, 0, ()),
        (fp8_kernels.swiglu_cast, 2, 1, (FP8,)),
        (fp8_kernels.swiglu_backward, 3, 3, (BF8, FP8)),
    ],
)
def test_a_compiler_sees_the_shapes_and_types_of_the_results(
    operator: Any, matrices: int, scales: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    def signatures() -> list[tuple[Any, torch.dtype]]:
        inputs = [torch.ones(16, 48) for _ in range(matrices)]
        inputs += [torch.tensor(1.0) for _ in range(scales)]
        return _signatures(operator(*inputs, *dtypes))

    with FakeTensorMode():
        seen = signatures()
    assert seen == signatures()


def test_a_compiler_sees_the_shape_of_a_transpose() -> None:
    with FakeTensorMode():
        turned = fp8_kernels.flip(torch.ones(16, 48).to(FP8))
    assert _signatures(turned) == [((48, 16), FP8)]
    assert _signatures(fp8_kernels.flip(torch.ones(16, 48).to(FP8))) == [((48, 16), FP8)]
