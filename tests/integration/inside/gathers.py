"""Four ranks gather tensors in every layout: the whole of each is what was divided, on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from primus.training import gloo, witness

RANKS = 4


def rank(number: int, folder: Path) -> None:
    """One of the ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=RANKS)
    torch.manual_seed(0)
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    rows = {
        # The last rank has fewer rows, or several ranks have none.
        "even": (8, 3), "odd": (7, 3), "few": (5,), "one": (1, 2), "vector": (12,), "deep": (6, 2, 3),
    }  # fmt: skip
    layouts = {
        "rows": (flat, [Shard(0)]),
        "copies": (square, [Replicate(), Shard(0)]),
        "copies of rows": (square, [Shard(0), Replicate()]),
    }
    wanted: dict[str, torch.Tensor] = {"plain": torch.randn(3)}
    given = dict(wanted)
    for name, (mesh, placements) in layouts.items():
        for size, shape in rows.items():
            for dtype in (torch.float32, torch.bfloat16):
                whole = torch.randn(shape).to(dtype)
                wanted[f"{name} {size} {dtype}"] = whole
                given[f"{name} {size} {dtype}"] = distribute_tensor(whole, mesh, placements)
    together = len(given)
    for name, placements in (("columns", [Shard(1), Replicate()]), ("both", [Shard(0), Shard(1)])):
        wanted[name] = torch.randn(6, 6)
        given[name] = distribute_tensor(wanted[name], square, placements)
    with (
        patch.object(witness, "whole_tensor", wraps=witness.whole_tensor) as alone,
        patch.object(witness, "_all_gather", wraps=witness._all_gather) as packed,
    ):
        found = witness.whole_tensors(given)
    assert alone.call_count == len(given) - together + 1, alone.call_count
    # One collective for each of three groups and two dtypes.
    assert packed.call_count == 6, packed.call_count
    assert list(found) == list(given)
    for name, whole in wanted.items():
        assert type(found[name]) is torch.Tensor, name
        assert torch.equal(found[name], whole), name
        assert found[name].data_ptr() != whole.data_ptr(), name
    dist.barrier()
    gloo.leave()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        ranks = [
            subprocess.Popen([sys.executable, __file__, str(number), name], stderr=subprocess.PIPE, text=True)
            for number in range(RANKS)
        ]
        said = [one.communicate(timeout=120)[1] for one in ranks]
        assert all(one.returncode == 0 for one in ranks), "\n".join(said)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        main()
