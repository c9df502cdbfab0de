"""Two ranks meet although another process has taken the port that torchrun chose, also after an attempt that ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from primus.training import gloo
from primus.training.tcpstore import choose_store


def rank(folder: Path) -> None:
    """One of the ranks; its environment is torchrun's."""
    choose_store(folder)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert float(total) == 2
    dist.barrier()
    gloo.leave()


def attempt(folder: Path) -> None:
    """Start both ranks, the second one first."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        shared = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(folder)],
                env={**os.environ, **shared, "RANK": number}, stderr=subprocess.PIPE, text=True,
            )
            for number in ("1", "0")
        ]  # fmt: skip
        said = [one.communicate(timeout=120)[1] for one in ranks]
        assert all(one.returncode == 0 for one in ranks), "\n".join(said)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name, "cache").mkdir()
        attempt(Path(name))
        attempt(Path(name))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(Path(sys.argv[1]))
    else:
        main()
