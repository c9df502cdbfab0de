"""FSDP2's protocol of gathers and reductions by copies; ranks take turns in one process."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
import torch.distributed as dist  # noqa: E402

from primus_images.turbo import sharded  # noqa: E402

RANKS, CPU = 3, torch.device("cpu")


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank creates its memory in turn; those of the same size are one symmetric memory."""
    sizes: dict[int, list[Any]] = {}

    def empty(size: int, **options: Any) -> Any:
        sizes.setdefault(size, []).append(torch.zeros(size, **options))
        return sizes[size][-1]

    monkeypatch.setattr(sharded.symmetric, "empty", empty)
    monkeypatch.setattr(
        sharded.symmetric, "rendezvous", lambda buffer, _name: sharded.Buffers(sizes[len(buffer)])
    )
    monkeypatch.setattr("torch.cuda.synchronize", lambda _device: None)


def _group(rank: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: RANKS, group_name="all")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.uint8))
def test_each_rank_gets_the_shares_of_all(dtype: Any) -> None:
    ranks = [sharded.PeerGather() for _ in range(RANKS)]
    for count in (8, 5000, 17, 17, 8):  # memory grows once, then its slots are used in turn
        shares = [torch.randint(0, 100, (count,)).to(dtype) for _ in range(RANKS)]
        outputs = [r.allocate((RANKS * count,), dtype=dtype, device=CPU) for r in ranks]
        own = [output[rank * count : (rank + 1) * count] for rank, output in enumerate(outputs)]
        for part, share in zip(own, shares, strict=True):
            part.copy_(share)
        for rank, gathering in enumerate(ranks):
            gathering(outputs[rank], own[rank], _group(rank))
        assert all(torch.equal(output, torch.cat(shares)) for output in outputs)


def test_memory_is_not_used_before_it_is_zeroed_and_its_addresses_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = list[str]()
    monkeypatch.setattr(
        sharded.symmetric, "empty", lambda size, **_: events.append("zeroed") or torch.zeros(size)
    )
    monkeypatch.setattr(
        sharded.symmetric, "rendezvous", lambda *_: events.append("exchanged") or object()
    )
    monkeypatch.setattr("torch.cuda.synchronize", lambda _device: events.append("waited"))
    gathering = sharded.PeerGather()
    gathering.allocate((8,), dtype=torch.uint8, device=CPU)
    assert events[-2:] == ["zeroed", "waited"]
    handle = gathering.memory(_group(0))
    assert gathering.memory(_group(0)) is handle
    assert events[-3:] == ["waited", "exchanged", "waited"]


def test_weights_that_are_copied_out_are_not_those_of_the_next_gather() -> None:
    gathering = sharded.PeerGather()
    first, second, third = (
        gathering.allocate((8,), dtype=torch.bfloat16, device=CPU).data_ptr() for _ in range(3)
    )
    assert first == third != second


def test_each_rank_gets_its_share_of_the_sum_in_float32() -> None:
    ranks = [sharded.PeerReduce() for _ in range(RANKS)]
    for count in (8, 5000, 17):
        gradients = [torch.randn(RANKS * count).bfloat16() for _ in range(RANKS)]
        inputs = [r.allocate((RANKS * count,), dtype=torch.float32, device=CPU) for r in ranks]
        for buffer, gradient in zip(inputs, gradients, strict=True):
            assert buffer.dtype == torch.bfloat16
            buffer.copy_(gradient)
        total = torch.stack([gradient.float() for gradient in gradients]).sum(0)
        for rank, reducing in enumerate(ranks):
            output = reducing.allocate((count,), dtype=torch.float32, device=CPU)
            reducing(output, inputs[rank], _group(rank), dist.ReduceOp.SUM)
            assert torch.equal(output, total[rank * count : (rank + 1) * count])
    with pytest.raises(RuntimeError, match="cannot reduce by"):
        reducing(output, inputs[0], _group(0), dist.ReduceOp.MAX)


def test_a_gather_leaves_the_share_of_the_rank_itself_as_it_is() -> None:
    buffers = [torch.full((4,), float(rank)) for rank in range(RANKS)]
    output = torch.full((RANKS, 4), 9.0)
    sharded.gather(sharded.Buffers(buffers), [output], [0], 0, rank=1)
    assert output[:, 0].tolist() == [0.0, 9.0, 2.0]
