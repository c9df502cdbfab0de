"""Every collective of two ranks gives the same over a gloo with 16-bit floats and over one that is completed.

The second group of ranks does without gloo's own bfloat16, as a PyTorch whose gloo lacks it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore", category=FutureWarning)


def rank(number: int, folder: Path, completed: bool) -> None:
    """One of the two ranks; leaves its results in the folder."""
    from primus.training import gloo

    os.environ |= {"RANK": str(number), "GLOO_SOCKET_IFNAME": "lo"}
    if completed:
        assert gloo.complete(always=True) == (torch.bfloat16, torch.float16)
    elif gloo.lacks(torch.bfloat16):
        return
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    found = {
        f"{dtype} {name}": value for dtype in (torch.bfloat16, torch.float32) for name, value in use(number, dtype)
    }
    torch.save(found, folder / f"{number}.pt")
    dist.barrier()
    dist.destroy_process_group()
    # As a job's ranks end: a thread of gloo may abort a process that ends through Python's finalization.
    gloo.leave()


def use(number: int, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    """The result of each collective."""
    import torch.distributed._functional_collectives as functional

    torch.manual_seed(number)
    mine = torch.randn(6, dtype=dtype)
    found: list[tuple[str, torch.Tensor]] = []

    def into(name: str, size: int, run: object, source: torch.Tensor = mine) -> None:
        result = torch.zeros(size, dtype=dtype)
        run(result, source)  # type: ignore[operator]
        found.append((name, result))

    def in_place(name: str, run: object) -> None:
        result = mine.clone()
        if (work := run(result)) is not None:  # type: ignore[operator]
            work.wait()
        found.append((name, result))

    in_place("sum", dist.all_reduce)
    in_place("maximum, waited for", lambda one: dist.all_reduce(one, op=dist.ReduceOp.MAX, async_op=True))
    in_place("broadcast", lambda one: dist.broadcast(one, 0))
    into("reduce and scatter", 3, dist.reduce_scatter_tensor)
    into("gather", 12, dist.all_gather_into_tensor)
    into("all to all", 6, dist.all_to_all_single)
    parts = [torch.zeros(6, dtype=dtype) for _ in range(2)]
    dist.all_gather(parts, mine)
    found.append(("gather in parts", torch.cat(parts)))
    # The result lies in the memory of what is reduced, as optimizers of sharded states have it.
    whole = torch.arange(6, dtype=dtype) * (number + 1)
    dist.reduce_scatter_tensor(whole[3 * number : 3 * number + 3], whole)
    found.append(("reduce and scatter in place", whole))
    into("send", 6, lambda one, source: dist.send(source, 1) if number == 0 else dist.recv(one, 0))
    found.append(("as a function", functional.all_reduce(mine, "sum", dist.group.WORLD) + 0))
    # Many at once: a rank that holds the interpreter's lock while gloo works would hang here.
    waiting = [(copy := mine * n, dist.all_reduce(copy, async_op=True)) for n in range(200)]
    for _, work in waiting:
        work.wait()
    found.append(("many", torch.stack([copy for copy, _ in waiting])))
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        left = {}
        for completed in (False, True):
            folder = Path(name, str(completed))
            folder.mkdir()
            words = [[sys.executable, __file__, str(number), str(folder), str(int(completed))] for number in range(2)]
            ranks = [subprocess.Popen(line, stderr=subprocess.PIPE, text=True) for line in words]
            said = [one.communicate(timeout=240)[1] for one in ranks]
            assert all(one.returncode == 0 for one in ranks), "\n".join(said)
            assert (said[0].count("gloo has no bfloat16") == 1) is completed, said[0]
            assert "gloo has no" not in said[1]
            left[completed] = [torch.load(path) for path in sorted(folder.glob("*.pt"))]
        assert len(left[True]) == 2
        # A PyTorch whose gloo lacks bfloat16 has nothing to compare with.
        for plain, completed in zip(left[False], left[True], strict=False):
            assert list(plain) == list(completed)
            for what, value in plain.items():
                assert torch.equal(value, completed[what]), what


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1")
    else:
        main()
