"""Silent corruption: a GPU that computes one micro-batch twice with other gradients is wrong.

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
    """Compute the gradients of one micro-batch of the models ``parts`` twice. All ranks.

    The kernels of ``compute`` must be deterministic. Afterwards, there are no gradients, and
    buffers and random states are as before. Raises WrongResultError on a rank whose gradients
    differ in any bit.
    """
    first = _hashes(parts, compute)
    second = _hashes(parts, compute)
    if not first:
        raise RuntimeError(
            f"step {step}: no gradient of this rank was seen, so none could be compared"
        )
    wrong = []
    for name, checksum in first.items():
        if name not in second or not torch.equal(checksum, second[name]):
            wrong.append(name)
    if wrong:
        raise WrongResultError(
            f"step {step}: {_device()} computed one micro-batch twice, and {some(wrong, 3)} got "
            "other gradients: it computes wrong. Replace it, and resume from an earlier checkpoint"
        )


def _hashes(parts: Sequence[nn.Module], compute: Callable[[], object]) -> dict[str, Tensor]:
    """Return the checksums of the gradients, and leave the models as they were."""
    hashes: dict[str, Tensor] = {}
    buffers = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers()]
    hooks = []
    for name, tensor in _computed(parts):
        hooks.append(tensor.register_hook(partial(_note, hashes, name)))
    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.current_device()]
    with torch.random.fork_rng(gpus):
        compute()
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for part in parts:
        part.zero_grad()
    return hashes


def _computed(parts: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors whose gradients autograd computes.

    FSDP2's are gathered copies, which it reuses.
    """
    for part in parts:
        for name, tensor in part.named_parameters():
            if tensor.requires_grad:
                yield name, tensor
        for module in part.modules():
            if isinstance(module, FSDPModule):
                yield from _gathered(module)


def _gathered(module: FSDPModule) -> Iterator[tuple[str, Tensor]]:
    state: Any = module._get_fsdp_state()
    # Newer versions of PyTorch can have several groups.
    groups = vars(state).get("_fsdp_param_groups") or [state._fsdp_param_group]
    for group in filter(None, groups):
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad:
                yield str(parameter._param_fqn), parameter._unsharded_param


def _note(hashes: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    hashes[name] = checksums(gradient)


def _device() -> str:
    node = platform.node()
    if not torch.cuda.is_available():
        return f"the CPU of {node}"
    name = device_name(torch.device("cuda", torch.cuda.current_device()))
    return f"GPU {os.environ.get('LOCAL_RANK', '0')} of {node} ({name})"
