"""Our own kernels compute what plain PyTorch computes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from primus.turbo import kernels  # noqa: E402
from primus.turbo.kernels import LossHead, linear_cross_entropy  # noqa: E402


def test_the_loss_and_its_gradients_are_those_of_pytorch() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 10, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (2, 10))
    labels[0, :3] = -100
    wanted = torch.nn.functional.cross_entropy(
        (x @ weight.t()).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
    )
    gradients = torch.autograd.grad(wanted * 0.5, (x, weight))
    found = linear_cross_entropy(x, weight, labels, chunk=7)
    ours = torch.autograd.grad(found * 0.5, (x, weight))
    assert torch.allclose(found.double(), wanted, rtol=1e-6)
    for one, other in zip(ours, gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


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
    wanted = torch.nn.functional.cross_entropy(x @ weight.t(), labels, reduction="sum")
    found = linear_cross_entropy(x, weight, labels, chunk=4)
    assert torch.allclose(found.double(), wanted, rtol=1e-6)
    (right,) = torch.autograd.grad(wanted, x)
    found.backward()
    assert torch.allclose(x.grad, right, atol=1e-6)
    assert weight.grad is None


def test_the_fp8_cast_saturates() -> None:
    x = torch.tensor([[-1e3, 0.5, 1e3]])
    made = kernels.cast_fp8(x, torch.tensor(2.0), torch.float8_e4m3fn)
    assert made.float().tolist() == [[-448.0, 1.0, 448.0]]


def test_gradients_are_laid_out_as_chunk_cat_does() -> None:
    grads = [torch.randn(4, 6), torch.randn(8), torch.randn(2, 2, 2)]
    out, wanted = torch.full((40,), float("nan")), torch.empty(2, 20)
    assert kernels.copy_in(grads, out, 2)
    torch._chunk_cat(grads, 0, 2, out=wanted)
    assert torch.equal(out.view(2, -1), wanted)


@pytest.mark.parametrize("grad", [torch.randn(3, 4), torch.randn(4, 4).t()])
def test_what_cannot_be_laid_out_is_left_to_pytorch(grad: Any) -> None:
    out = torch.zeros(16)
    assert not kernels.copy_in([grad], out, 2)
    assert not out.any()


def test_the_optimizer_step_is_that_of_adamw() -> None:
    torch.manual_seed(1)
    p = torch.randn(30, dtype=torch.float64)
    parameter = torch.nn.Parameter(p.clone())
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    stock = torch.optim.AdamW([parameter], weight_decay=0.1, **options)
    m, v, amax = torch.zeros_like(p), torch.zeros_like(p), torch.zeros((), dtype=torch.float64)
    clip = torch.tensor(0.3, dtype=torch.float64)
    for step in range(1, 5):
        gradient = torch.randn(30, dtype=torch.float64)
        parameter.grad = gradient * clip
        stock.step()
        amax.zero_()
        kernels.adamw_(p, gradient, m, v, clip=clip, amax=amax, decay=0.1, step=step, **options)
    assert torch.allclose(p, parameter.detach(), rtol=1e-12)
    assert amax == p.abs().max()
