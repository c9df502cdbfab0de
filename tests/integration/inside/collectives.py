"""Ranks over gloo: collectives of 16-bit floats, gathered tensors, and a store that finds its own
port.
"""

import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from forks import ranks
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from primus_images.training.backends import gloo
from primus_images.training.judge import witness
from primus_images.training.run import facts

warnings.filterwarnings("ignore", category=FutureWarning)


def check_a_completed_gloo_gives_the_same(folder: Path) -> None:
    """As one with 16-bit floats of its own. The second group of ranks does without them, as an
    older PyTorch.
    """
    results = []
    for completed in (False, True):
        place = folder / str(completed)
        place.mkdir()
        texts = ranks(partial(use_all, place, completed))
        assert (texts[0].count("gloo has no bfloat16") == 1) is completed, texts[0]
        assert "gloo has no" not in texts[1]
        results.append([torch.load(path) for path in sorted(place.glob("*.pt"))])
    assert len(results[1]) == 2
    # A PyTorch whose gloo lacks bfloat16 has nothing to compare with.
    for plain, completed_results in zip(*results, strict=False):
        torch.testing.assert_close(completed_results, plain, rtol=0, atol=0)


def use_all(folder: Path, completed: bool, number: int) -> None:
    os.environ["RANK"] = str(number)
    if completed:
        assert gloo.complete(always=True) == (torch.bfloat16, torch.float16)
    elif gloo.lacks(torch.bfloat16):
        return
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    torch.save(
        [use(number, dtype) for dtype in (torch.bfloat16, torch.float32)], folder / f"{number}.pt"
    )
    end()


def use(number: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The result of each collective."""
    torch.manual_seed(number)
    mine = torch.randn(6, dtype=dtype)
    results: dict[str, torch.Tensor] = {}

    def into(name: str, size: int, run: Callable[..., Any]) -> None:
        results[name] = torch.zeros(size, dtype=dtype)
        run(results[name], mine)

    def in_place(name: str, run: Callable[..., Any]) -> None:
        results[name] = mine.clone()
        if (work := run(results[name])) is not None:
            work.wait()

    in_place("sum", dist.all_reduce)
    in_place(
        "maximum, waited for", lambda out: dist.all_reduce(out, op=dist.ReduceOp.MAX, async_op=True)
    )
    in_place("broadcast", lambda out: dist.broadcast(out, 0))
    into("reduce and scatter", 3, dist.reduce_scatter_tensor)
    into("gather", 12, dist.all_gather_into_tensor)
    into("all to all", 6, dist.all_to_all_single)
    into("send", 6, lambda out, source: dist.send(source, 1) if number == 0 else dist.recv(out, 0))
    parts = [torch.zeros(6, dtype=dtype) for _ in range(2)]
    dist.all_gather(parts, mine)
    results["gather in parts"] = torch.cat(parts)
    # The result lies in the memory of what is reduced, as optimizers of sharded states have it.
    results["reduce and scatter in place"] = whole = torch.arange(6, dtype=dtype) * (number + 1)
    dist.reduce_scatter_tensor(whole[3 * number : 3 * number + 3], whole)
    results["as a function"] = functional.all_reduce(mine, "sum", dist.group.WORLD) + 0
    # Many at once: a rank that holds the interpreter's lock while gloo works would hang here.
    waiting = [(copy := mine * n, dist.all_reduce(copy, async_op=True)) for n in range(200)]
    for _, work in waiting:
        work.wait()
    results["many"] = torch.stack([copy for copy, _ in waiting])
    return results


def end() -> None:
    """End as a job's ranks do: a thread of gloo may abort a process that ends through Python's
    finalization.
    """
    dist.barrier()
    gloo.leave()


def check_every_layout_is_gathered_whole(folder: Path) -> None:
    ranks(partial(gather, folder), 4)


def gather(folder: Path, number: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=4)
    torch.manual_seed(0)
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    # The last rank has fewer rows, or several ranks have none.
    rows = {
        "even": (8, 3),
        "odd": (7, 3),
        "few": (5,),
        "one": (1, 2),
        "vector": (12,),
        "deep": (6, 2, 3),
    }
    layouts = {
        "rows": (flat, [Shard(0)]),
        "copies": (square, [Replicate(), Shard(0)]),
        "copies of rows": (square, [Shard(0), Replicate()]),
    }
    whole: dict[str, torch.Tensor] = {"plain": torch.randn(3)}
    shares = dict(whole)
    for name, (mesh, placements) in layouts.items():
        for size, shape in rows.items():
            for dtype in (torch.float32, torch.bfloat16):
                key = f"{name} {size} {dtype}"
                whole[key] = torch.randn(shape).to(dtype)
                shares[key] = distribute_tensor(whole[key], mesh, placements)
    for name, placements in (("columns", [Shard(1), Replicate()]), ("both", [Shard(0), Shard(1)])):
        whole[name] = torch.randn(6, 6)
        shares[name] = distribute_tensor(whole[name], square, placements)
    with (
        patch.object(witness, "whole_tensor", wraps=witness.whole_tensor) as alone,
        patch.object(witness, "_all_gather", wraps=witness._all_gather) as packed,
    ):
        gathered = witness.whole_tensors(shares)
    # One collective for each of three groups and two dtypes; the plain tensor and the last two
    # layouts are alone.
    assert (alone.call_count, packed.call_count) == (3, 6)
    assert list(gathered) == list(shares)
    for name, tensor in whole.items():
        assert type(gathered[name]) is torch.Tensor, name
        assert torch.equal(gathered[name], tensor), name
        assert gathered[name].data_ptr() != tensor.data_ptr(), name
    end()


def check_an_evaluation_leaves_the_digest_of_the_weights(folder: Path) -> None:
    """FSDP2 keeps the weights that an evaluation gathered, until a checkpoint is saved."""
    ranks(partial(evaluate, folder))


def evaluate(folder: Path, number: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    before = facts.digest([model])
    with torch.no_grad():
        model(torch.ones(2, 4))
        assert not isinstance(model[1].weight, DTensor)
    assert facts.digest([model]) == before
    end()


def check_ranks_meet_also_after_an_attempt_that_ended(folder: Path) -> None:
    (folder / "cache").mkdir()
    for os.environ["PRIMUS_LAUNCH"] in ("1", "2"):
        ranks(partial(meet, folder))


def meet(folder: Path, number: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "RANK": str(number),
    }
    gloo.choose_store(folder)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert float(total) == 2
    end()


def check_a_torch_without_libuv(_: Path) -> None:
    """The store does without libuv if torch says that it has none. No other error decides that."""
    missing = "use_libuv was requested but PyTorch was built without libuv support"
    for error, expected in ((None, None), (missing, "0"), ("the port is taken", RuntimeError)):
        refused = RuntimeError(error) if error else None
        elsewhere = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        with (
            patch.dict(os.environ, elsewhere),
            patch("torch.distributed.TCPStore", side_effect=refused),
        ):
            os.environ.pop("USE_LIBUV", None)
            try:
                gloo.choose_store(Path())
            except RuntimeError:
                assert expected is RuntimeError
            else:
                assert os.environ.get("USE_LIBUV") == expected


for check in (
    check_a_completed_gloo_gives_the_same,
    check_every_layout_is_gathered_whole,
    check_an_evaluation_leaves_the_digest_of_the_weights,
    check_ranks_meet_also_after_an_attempt_that_ended,
    check_a_torch_without_libuv,
):
    with tempfile.TemporaryDirectory() as name:
        check(Path(name))
