"""The self-test of optimizations: planted faults are named, and healthy kernels pass with any
random numbers.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")
pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[3]))

from benchmarks.selftest import KINDS, PLACES, Place, planted  # noqa: E402

from primus_images.turbo import selftest, sharded  # noqa: E402
from primus_images.turbo.compared import Compared, Maker  # noqa: E402
from primus_images.turbo.optimizations import Shapes  # noqa: E402

SHAPES = Shapes(
    batch=2,
    seq_len=128,
    tokens=256,
    hidden=128,
    ffn=384,
    heads=4,
    kv_heads=2,
    head_dim=32,
    v_dim=32,
    rotated=32,
    vocabulary=1024,
    window=64,
    causal=True,
    experts=8,
    top_k=2,
    expert_ffn=64,
    shards=2,
)
HERE = sorted({place.optimization for place in PLACES} - {"flash-attention-4"})


@pytest.mark.parametrize("name", HERE)
def test_a_healthy_kernel_passes(name: str) -> None:
    assert [selftest.fault(name, SHAPES, device="cpu", seed=seed) for seed in range(4)] == [""] * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "place",
    [p for p in PLACES if p.optimization in HERE],
    ids=lambda p: f"{p.optimization}-{p.function}-{p.result}",
)
def test_a_planted_fault_is_named(place: Place, kind: str) -> None:
    if place.function == "cross_entropy_" and place.result == 2 and kind == "row":
        pytest.skip("one of so few losses in place of another hardly changes their sum")
    with planted(place, KINDS[kind]):
        assert selftest.fault(place.optimization, SHAPES, device="cpu")


def test_bits_that_change_between_calls_are_a_fault_where_steps_are_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rotate = selftest.attention.rotate
    calls: list[bool] = []

    def unsteady(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        calls.append(torch.are_deterministic_algorithms_enabled())
        out = rotate(x, turn)
        if len(calls) == 3:
            with torch.no_grad():
                out.view(-1)[5] = torch.nextafter(out.view(-1)[5], out.new_tensor(9.0))
        return out

    monkeypatch.setattr(selftest.attention, "rotate", unsteady)
    repeated = replace(SHAPES, deterministic=True)
    fault = selftest.fault("real-rope", repeated, device="cpu")
    assert fault.startswith("rotated, computed twice, has 1 other bytes than the first time")
    assert calls == [False, True, True]
    assert not selftest.fault("real-rope", SHAPES, device="cpu")


@pytest.mark.parametrize("name", HERE)
def test_healthy_kernels_repeat_their_bits(name: str) -> None:
    assert selftest.fault(name, replace(SHAPES, deterministic=True), device="cpu") == ""


@pytest.mark.parametrize("shift", (-1, 1))
def test_weights_from_the_memory_of_another_rank_are_a_fault(
    monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    get_buffer = sharded.Buffers.get_buffer
    monkeypatch.setattr(
        sharded.Buffers,
        "get_buffer",
        lambda self, rank, *where: get_buffer(self, (rank + shift) % SHAPES.shards, *where),
    )
    assert selftest.fault("peer-copies", SHAPES, device="cpu")


def test_a_kernel_that_raises_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setattr("primus_images.turbo.kernels.cast_fp8", broken)
    reason = selftest.fault("fp8-weight-cast", SHAPES, device="cpu")
    assert reason == "RuntimeError: CUDA error: an illegal memory access"


def test_another_shape_is_a_fault() -> None:
    tensor = torch.ones(2, 3)
    assert "shape" in Compared(label="x", out=tensor[:1], plain=tensor, exact=tensor).fault()


def test_the_largest_weights_of_a_cast_saturate() -> None:
    (row,) = selftest.fp8_weight_cast(SHAPES, Maker("cpu", seed=0))
    values = row.out.float().abs()
    saturated = (values == torch.finfo(row.out.dtype).max).float().mean()
    assert 0 < saturated < 0.1
    assert row.out.shape == (SHAPES.ffn // SHAPES.shards, SHAPES.hidden)


def test_packed_samples_begin_with_a_document_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    bounds_of = selftest.packed.bounds_of

    def noted(ends: torch.Tensor, length: int) -> torch.Tensor:
        seen.extend(ends.tolist())
        return bounds_of(ends, length)

    monkeypatch.setattr(selftest.packed, "bounds_of", noted)
    shapes = replace(SHAPES, seq_len=400, heads=1, kv_heads=1, head_dim=8, v_dim=8)
    assert not selftest.fault("packed-attention", shapes, device="cpu")
    assert seen[0] == [1, 133, 233, 400]


def test_only_the_exact_loss_is_summed_in_float64() -> None:
    loss = next(iter(selftest.linear_cross_entropy(SHAPES, Maker("cpu", seed=0))))
    assert loss.plain.dtype == torch.float32
    assert loss.exact is not None
    assert loss.exact.dtype == torch.float64
