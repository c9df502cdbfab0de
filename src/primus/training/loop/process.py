"""One rank as a process: device, group, threads, seeds, memory, and a safe end. CPU and GPU differ here only."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from primus.training import gloo
from primus.training.failure import noting
from primus.training.loop.given import Given, read
from primus.training.tcpstore import choose_store

__all__ = ["Process", "leave", "main", "peak_memory", "start"]

# Building and sharding a large model, or loading its weights on one rank, keeps the others waiting.
_PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True)
class Process:
    """This rank: its number among ``world_size``, and the device it computes on."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def on_cpu(self) -> bool:
        """Whether there is no GPU to compute on."""
        return str(self.device.type) == "cpu"


def main(folder: str, train: Callable[[Given, Process], None]) -> None:
    """Be one rank of the job in the output folder ``folder``: set up, ``train``, end."""
    with noting(Path(folder)):
        given = read(Path(folder))
        process = start(given)
        train(given, process)
        dist.barrier()
        dist.destroy_process_group()
    if process.on_cpu:
        leave()


def start(given: Given) -> Process:
    """Join the job's process group, from torchrun's environment, and fix all that makes a run repeatable.

    Threads are fixed on a CPU, whatever the environment says: sums are then always taken in the same order, and a
    run can be repeated to the last bit.
    """
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    choose_store()
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=_PATIENCE)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(given.threads)
        # All ranks are on this machine. Without a name gloo looks the host's up, which a sandbox may not know.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        gloo.complete()
        dist.init_process_group("gloo", timeout=_PATIENCE)
    if given.training.deterministic:
        # Read by cuBLAS when its handle is made, which nothing has done yet.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    torch.manual_seed(given.training.seed)
    return Process(rank=rank, local_rank=local_rank, world_size=world_size, device=device)


def peak_memory(process: Process) -> tuple[float, float]:
    """The most memory this rank has held, in GiB and percent of what there is. On a CPU: resident memory."""
    if process.on_cpu:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        peak = torch.cuda.max_memory_reserved()
        whole = torch.cuda.get_device_properties(process.device).total_memory
    return peak / 2**30, 100 * peak / whole


def leave() -> NoReturn:
    """End this process with exit code 0, now: call it when training is over and its groups are destroyed.

    A gloo thread that still holds the last reference to a finished collective takes the GIL to drop it. When
    that falls into the interpreter's finalization, CPython ends the thread by unwinding it, the destructor it
    is in may not throw, and the whole process aborts: about one good run in fifteen on busy cores would be
    reported as failed (pytorch#190489, pytorch#179291). What is skipped here is only that finalization.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
