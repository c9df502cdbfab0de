"""Patches that let megatron-core 0.16.1 train without a GPU, or without Transformer Engine.

Each patch states what fails without it. Those for a CPU are applied before Megatron is imported,
and none of them on a GPU.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import DeviceMesh
from torch.overrides import TorchFunctionMode

from primus_images.patch import replace


def patch_torch() -> None:
    """Replace the GPU that Megatron names everywhere with the CPU, on this thread."""
    # Megatron uses Transformer Engine's optimizer and norms if it is installed, and they need a
    # GPU.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    # torch.compile, which decorates small functions of Megatron, would search for a C++ compiler.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Buffers and gradients are created on the current device.
    replace(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # Groups, pipelines and the token dispatcher wait for the device, and the latter copies numbers
    # on its own stream.
    replace(torch.cuda, "Stream", _Stream)
    for name in ("synchronize", "current_stream", "stream"):
        replace(torch.cuda, name, getattr(torch.cpu, name))
    _AsCuda().__enter__()


class _Stream(torch.cpu.Stream):  # type: ignore[misc,unused-ignore]
    def record_event(self) -> torch.cpu.Event:
        # That of torch returns nothing to wait for.
        return torch.cpu.Event()


class _AsCuda(TorchFunctionMode):  # type: ignore[misc,unused-ignore]
    """Keep ``device="cuda"`` and ``.cuda()`` on the CPU, and report a CUDA type for tensors.

    Schedules, optimizer and clipping contain the first two as literals. The optimizers sort
    parameters by the type, and raise TypeError for one of the CPU.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def patch_megatron() -> None:
    """Apply the patches to Megatron's own names."""
    from megatron.core.distributed import torch_fully_sharded_data_parallel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    # Its tracker of random states forks CUDA's generators so that recomputed layers start from the
    # same state. Without dropout, nothing draws from them.
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    replace(random, "_get_cuda_rng_state", lambda *_, **__: None, takes="device, clone, graph_safe")
    replace(
        random, "_set_cuda_rng_state", lambda *_, **__: None, takes="new_state, device, graph_safe"
    )
    # Its mesh of ranks requests the GPU.
    mesh = SimpleNamespace(from_group=lambda group, _cuda: DeviceMesh.from_group(group, "cpu"))
    replace(torch_fully_sharded_data_parallel, "DeviceMesh", mesh)
    # The all-to-all needs its splits as numbers. They become numbers only when they are copied from
    # a GPU.
    takes = "tensor, as_numpy, record_stream"

    def as_numbers(tensor: Any, as_numpy: bool = False, **_of_streams: Any) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return tensor

    replace(token_dispatcher, "maybe_move_tensor_to_cpu", as_numbers, takes=takes)


def patch_without_te() -> None:
    """Patch the two modules that assume Transformer Engine. Each patch states what fails."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # Latent attention: its imports set every class to None, and isinstance(…, None) raises
    # TypeError.
    replace(multi_latent_attention, "HAVE_TE", False)
    # The router: NameError, because another name of the same import is missing.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
