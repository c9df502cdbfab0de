"""The process of one rank: device, group, threads, seeds, memory, compiled graphs and exit."""

import os
import resource
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from primus_images.training.backends import gloo
from primus_images.training.backends.loop.config import RankJob, read_job
from primus_images.training.run.failure import noting

# While one rank builds and shards a large model, or loads its weights, the other ranks wait.
_PATIENCE = timedelta(minutes=30)


def main(folder: str, train: Callable[[RankJob, torch.device], None]) -> None:
    """Run one rank of the job in the output folder ``folder``: ``train`` it, and exit."""
    with noting(Path(folder)):
        job = read_job(Path(folder))
        device = start(job)
        train(job, device)
        dist.barrier()
        dist.destroy_process_group()
    if device.type == "cpu":
        gloo.leave()


def start(job: RankJob) -> torch.device:
    """Join the job's process group, and return the device of this rank.

    The launcher's environment describes the group. Everything is set that makes a run repeatable.
    """
    gloo.choose_store(job.output)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=_PATIENCE)
    else:
        device = torch.device("cpu")
        use_cpu()
        dist.init_process_group("gloo", timeout=_PATIENCE)
    if job.training.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    torch.manual_seed(job.training.seed)
    return device


def use_cpu() -> None:
    """Prepare a rank on a CPU, before its process group."""
    # With one thread, sums always have the same order.
    torch.set_num_threads(1)
    # All ranks are on this machine. By default, gloo looks up the host name, which a sandbox may
    # not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gloo.complete()


def peak_memory(device: torch.device) -> tuple[float, float]:
    """Return the peak memory of this rank, in GiB and in percent of the device's.

    On a CPU, it is the resident memory.
    """
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        peak = torch.cuda.max_memory_reserved()
        whole = torch.cuda.get_device_properties(device).total_memory
    return peak / 2**30, 100 * peak / whole


def keep_graphs() -> None:
    """Let torch.compile keep the graphs that it traces for later runs.

    Call this in the thread that compiles. PyTorch keeps a graph only if it knows every function in
    it, and those that select attention backends are not known.
    """
    import torch._dynamo  # before torch._inductor, which has a circular import otherwise
    from torch._inductor import config

    # Their arguments are part of the graph, and so of the cache key; this is the only other state
    # that they read.
    state = f"{torch.__version__} {torch._C._get_sdp_priority_order()}"
    choosing = {
        f"torch.nn.attention.{name}": state for name in ("_backend_from_string", "_sdpa_kernel")
    }
    config.unsafe_marked_cacheable_functions = config.unsafe_marked_cacheable_functions | choosing


def keep_fewer_activations() -> None:
    """Let torch.compile compute norms and activation functions again in the backward pass.

    A product reads their results there, so PyTorch keeps them by default: about a third of what a
    layer of a language model keeps.
    """
    from torch._functorch import config

    config.ban_recompute_materialized_backward = False
