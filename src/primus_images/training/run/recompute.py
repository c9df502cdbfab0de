"""Silent corruption: a rank that computes one micro-batch twice and gets other gradients has a GPU
that computes wrong.

The gradients are those of the rank itself. Once ranks have added theirs, a wrong one is on all of
them.
"""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from primus_images.system.measure import device_name
from primus_images.terminal import some
from primus_images.training.run.facts import checksums


class WrongResultError(RuntimeError):
    """The same computation had two results on one GPU."""


def compare(parts: Sequence[nn.Module], step: int, compute: Callable[[], object]) -> None:
    """Call ``compute`` twice, which computes the gradients of one micro-batch of the models
    ``parts``. All ranks.

    Its kernels must be deterministic. Afterwards, there are no gradients, and buffers and random
    states are as before. Raises WrongResultError on a rank whose gradients differ in any bit.
    """
    buffers = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers()]
    if torch.cuda.is_available():
        gpus = [torch.cuda.current_device()]
    else:
        gpus = []
    hashes: list[dict[str, Tensor]] = []
    for _ in range(2):
        hashes.append({})
        hooks = [
            tensor.register_hook(partial(_note, hashes[-1], name))
            for name, tensor in _computed(parts)
        ]
        with torch.random.fork_rng(gpus):
            compute()
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for part in parts:
            part.zero_grad()
    first, second = hashes
    if not first:
        raise RuntimeError(
            f"step {step}: no gradient of this rank was seen, so none could be compared"
        )
    wrong = [
        name for name in first if name not in second or not torch.equal(first[name], second[name])
    ]
    if wrong:
        raise WrongResultError(
            f"step {step}: {_device()} computed one micro-batch twice, and {some(wrong, 3)} got "
            "other gradients: "
            "it computes wrong. Replace it, and resume from an earlier checkpoint"
        )


def _computed(parts: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors whose gradients autograd computes. FSDP2's are gathered copies, which it
    reuses.
    """
    for part in parts:
        yield from (
            (name, tensor) for name, tensor in part.named_parameters() if tensor.requires_grad
        )
        for module in part.modules():
            if not isinstance(module, FSDPModule):
                continue
            state: Any = module._get_fsdp_state()
            # Newer versions of PyTorch can have several groups.
            groups = vars(state).get("_fsdp_param_groups") or [state._fsdp_param_group]
            for parameter in (
                parameter for group in groups if group for parameter in group.fsdp_params
            ):
                if parameter.sharded_param.requires_grad:
                    yield str(parameter._param_fqn), parameter._unsharded_param


def _note(hashes: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    hashes[name] = checksums(gradient.to_local() if isinstance(gradient, DTensor) else gradient)


def _device() -> str:
    node = platform.node()
    if not torch.cuda.is_available():
        return f"the CPU of {node}"
    name = device_name(torch.device("cuda", torch.cuda.current_device()))
    return f"GPU {os.environ.get('LOCAL_RANK', '0')} of {node} ({name})"
