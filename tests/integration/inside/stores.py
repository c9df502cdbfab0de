"""Two ranks meet although another process has taken the port that torchrun chose, also after an attempt that ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from primus.training import gloo
from primus.training.gloo import choose_store


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


def check_a_torch_without_libuv() -> None:
    """The store does without libuv if torch says that it has none. No other error decides that."""
    missing = "use_libuv was requested but PyTorch was built without libuv support"
    for error, expected in ((None, None), (missing, "0"), ("the port is taken", RuntimeError)):
        refused = RuntimeError(error) if error else None
        elsewhere = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        with patch.dict(os.environ, elsewhere), patch("torch.distributed.TCPStore", side_effect=refused):
            os.environ.pop("USE_LIBUV", None)
            try:
                choose_store(Path())
            except RuntimeError:
                assert expected is RuntimeError
            else:
                assert os.environ.get("USE_LIBUV") == expected


def main() -> None:
    check_a_torch_without_libuv()
    with tempfile.TemporaryDirectory() as name:
        Path(name, "cache").mkdir()
        attempt(Path(name))
        attempt(Path(name))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(Path(sys.argv[1]))
    else:
        main()
