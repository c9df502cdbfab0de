"""Routing of tokens to experts, forward and backward, against a loop over tokens in 64 bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from primus_images.turbo import experts  # noqa: E402

EXPERTS, WIDTH = 5, 48

SELECTIONS = {
    "an odd number of tokens": [
        [0, 1, 3],
        [3, 4, 0],
        [1, 0, 4],
        [4, 3, 1],
        [0, 4, 2],
        [2, 1, 0],
        [3, 0, 1],
    ],
    "an expert without tokens": [
        [0, 1],
        [1, 3],
        [3, 4],
        [4, 0],
        [0, 3],
        [1, 4],
        [0, 1],
        [3, 1],
        [4, 3],
    ],
    "all tokens to one expert": [[2]] * 19,
    "one token": [[4, 0, 1]],
}


def wanted(
    x: torch.Tensor,
    weights: torch.Tensor,
    base: torch.Tensor,
    layers: torch.Tensor,
    selected: list[list[int]],
):
    rows = []
    for token, chosen in enumerate(selected):
        made = base[token]
        for place, expert in enumerate(chosen):
            made = made + weights[token, place] * torch.tanh(x[token] @ layers[expert])
        rows.append(made)
    return torch.stack(rows)


def found(
    x: torch.Tensor,
    weights: torch.Tensor,
    base: torch.Tensor,
    layers: torch.Tensor,
    selected: list[list[int]],
):
    chosen = torch.tensor(selected)
    ways = experts.routes(chosen, torch.bincount(chosen.flatten(), minlength=len(layers)))
    assert (ways.counts % experts.ALIGNMENT == 0).all()
    assert (ways.counts > 0).all()
    given = experts.dispatch(x, ways)
    assert (given[ways.choices < 0] == 0).all()
    ends = ways.counts.cumsum(0).tolist()
    made = [
        torch.tanh(given[first:end] @ layers[i])
        for i, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    ]
    # Grouped products leave the rows after the last expert uninitialized.
    made.append(torch.full((len(given) - ends[-1], x.shape[1]), float("nan")))
    return experts.combine(torch.cat(made), weights, ways, base)


def compare(selected: list[list[int]]) -> None:
    torch.manual_seed(5)
    count, choices = len(selected), len(selected[0])
    shapes = ((count, WIDTH), (count, choices), (count, WIDTH), (EXPERTS, WIDTH, WIDTH))
    given = [(torch.randn(shape) / 4).requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    ours, right = found(*given, selected), wanted(*exact, selected)
    assert torch.allclose(ours.double(), right, atol=1e-5)
    grad = torch.randn_like(ours)
    gradients = torch.autograd.grad(ours, given, grad)
    for mine, theirs in zip(
        gradients, torch.autograd.grad(right, exact, grad.double()), strict=True
    ):
        assert torch.allclose(mine.double(), theirs, atol=1e-5)


@pytest.mark.parametrize("selected", SELECTIONS.values(), ids=SELECTIONS)
def test_routing_and_its_gradients_are_exact(selected: list[list[int]]) -> None:
    compare(selected)


def test_grouped_products_compile_into_the_model() -> None:
    torch.manual_seed(5)
    counts = torch.tensor([8, 0, 16])
    sizes = ((3, 16, WIDTH), (3, WIDTH, 16), (3, 16, WIDTH), (32, WIDTH))
    tensors = [torch.randn(size).bfloat16().requires_grad_() for size in sizes]
    results = []
    for run in (
        experts.grouped_experts,
        torch.compile(experts.grouped_experts, backend="aot_eager", fullgraph=True),
    ):
        out = run(*tensors, counts)
        assert not out[int(counts.sum()) :].any()
        results.append((out, *torch.autograd.grad(out.float().square().sum(), tensors)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_the_kernels_compute_the_same() -> None:
    """In a process of its own, because Triton decides on import whether it interprets kernels."""
    code = """
import test_turbo_experts as test
test.experts._plain = lambda x: False
for selected in test.SELECTIONS.values():
    test.compare(selected)
print("compared", len(test.SELECTIONS))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith(f"compared {len(SELECTIONS)}"), done.stderr[-2000:]
