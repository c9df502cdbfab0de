"""Patches that let torchtitan 0.2.2 train on a machine without a GPU. Apply them before importing
its trainer.

Each patch states what fails without it. None is applied on a GPU.
"""

import os
import resource
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from primus_images.patch import replace
from primus_images.training.backends.loop.process import use_cpu
from primus_images.training.backends.loop.weights import fill


def patch_torch() -> None:
    """Make the CPU torchtitan's device in this process."""
    use_cpu()
    # torchtitan takes torch's accelerator, or else cuda, which a CPU build cannot set.
    replace(torch._utils, "_get_available_device_type", lambda: "cpu", takes="")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    additions: dict[str, Callable[..., Any]] = {
        "get_device_name": lambda _device=None: "cpu",
        "get_device_properties": lambda _device=None: SimpleNamespace(
            name="cpu", total_memory=memory
        ),
        "reset_peak_memory_stats": lambda _device=None: None,
        "empty_cache": lambda: None,
        "memory_stats": _memory_stats,
    }
    for name, function in additions.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)

    # torchtitan passes ``device_ids`` to the barrier, and gloo refuses them.
    def without_device_ids(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return barrier(*args, **kwargs)

    barrier = replace(dist, "barrier", without_device_ids)

    # With a gradient divisor, FSDP2 uses PREMUL_SUM, which gloo lacks.
    def with_plain_sum(module: Any, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    set_factor = replace(
        FSDPModule, "set_gradient_divide_factor", with_plain_sum, takes="self, factor"
    )

    # Routers count tokens by ``histc``, which torch has for integers only on GPUs.
    def over_floats(values: Any, *args: Any, **kwargs: Any) -> Any:
        return histc(values.float(), *args, **kwargs).to(values.dtype)

    histc = replace(torch, "histc", over_floats)
    # Only now, because torchtitan looks for the device when it is imported.
    from torchtitan.models.moe import kernels

    parameters = (
        "tokens_per_expert_group, start_index_values, write_offsets, experts_per_rank, "
        "num_ranks, max_len"
    )
    replace(
        kernels,
        "fill_indices_wrapper",
        kernels.fill_indices_cpu,
        takes=f"{parameters}, block_size, max_blocks",
    )
    # On GPUs, DTensor gives each share of a sharded weight its own random numbers. On CPUs, all
    # shares would be equal.
    for name, more in (("normal_", ""), ("trunc_normal_", ", a, b")):
        replace(
            nn.init,
            name,
            _drawn(getattr(nn.init, name)),
            takes=f"tensor, mean, std{more}, generator",
        )


def _memory_stats(_device: object = None) -> dict[str, int]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "active_bytes.all.peak": peak,
        "reserved_bytes.all.peak": peak,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _drawn(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``draw`` for sharded weights: it draws the whole, and keeps this rank's share."""

    def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        else:
            whole = tensor
        draw(whole, *args, **kwargs)
        if whole is not tensor:
            fill(tensor, lambda first, last: whole[first:last])
        return tensor

    return drawn
