"""What megatron-core 0.16.1 needs to train on a machine without a GPU. Applied before it is imported.

Each patch states what breaks without it. On a GPU none is applied.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed import DeviceMesh
from torch.overrides import TorchFunctionMode

from primus.patch import replace


def apply() -> None:
    """Make the CPU stand for the GPU that Megatron names everywhere, on this thread."""
    # torch.compile, which Megatron decorates small functions with, would look for a C++ compiler.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for name, stand_in in {
        # Buffers and gradients are made on the current device.
        "current_device": lambda: torch.device("cpu"),
        # Groups, pipelines and the dispatcher of tokens wait for the device.
        "synchronize": lambda *_: None,
        # The dispatcher of tokens copies their counts to the host on a stream of its own.
        "Stream": _Stream,
        "current_stream": lambda *_: _Stream(),
        "stream": lambda _: nullcontext(),
    }.items():
        replace(torch.cuda, name, stand_in)
    _AsCuda().__enter__()


class _Stream:
    """All work is done when its call returns, so there is nothing to wait for, and no event to wait on."""

    def __init__(self, *_of_device: object, **_of_priority: object) -> None: ...

    def wait_stream(self, _other: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self


class _AsCuda(TorchFunctionMode):  # type: ignore[misc,unused-ignore]
    """``device="cuda"`` and ``.cuda()`` stay on the CPU, and a tensor says it is of a CUDA type.

    The first two stand as literals in schedules, optimizer and clipping. By the last the optimizers sort parameters;
    they raise TypeError for a type of the CPU.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


def apply_after_import() -> None:
    """The rest, on Megatron's own names."""
    from megatron.core.distributed import torch_fully_sharded_data_parallel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    # Its tracker of random states forks CUDA's generators, and layers computed twice start from the same state of
    # them; nothing draws from them without dropout.
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    replace(random, "_get_cuda_rng_state", lambda *_, **__: None, takes="device, clone, graph_safe")
    replace(random, "_set_cuda_rng_state", lambda *_, **__: None, takes="new_state, device, graph_safe")
    # Its mesh of ranks names the GPU.
    replace(torch_fully_sharded_data_parallel, "DeviceMesh", _Mesh)
    # The all-to-all takes its splits as numbers; they become such only on their way from a GPU.
    takes = "tensor, as_numpy, record_stream"
    replace(token_dispatcher, "maybe_move_tensor_to_cpu", _as_numbers, takes=takes)


class _Mesh:
    @staticmethod
    def from_group(group: Any, _cuda: str) -> DeviceMesh:
        return DeviceMesh.from_group(group, "cpu")


def _as_numbers(tensor: Any, as_numpy: bool = False, **_of_streams: Any) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
