"""Megatron's initial weights, which depend only on the seed and the model.

They are the same however the ranks share the model.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from primus_images.training.backends.megatron.layout import named, piece, split_of, tensor_group

Method = Callable[..., Any]
# A function of the name and shape of a tensor in the whole model.
Source = Callable[[str, Sequence[int]], torch.Tensor]

_METHODS = ("embedding_init_method", "output_layer_init_method", "init_method")


def defer(config: Any) -> dict[str, Method]:
    """Remove the initialization methods from a ``TransformerConfig``, for :func:`initialize`.

    Megatron draws from one generator per rank, in the order of its modules. The initial weights
    then depend on TP, PP and EP, and a sharded model cannot be compared with the whole one.
    """
    methods = {name: getattr(config, name) for name in _METHODS}
    for name in _METHODS:
        setattr(config, name, lambda tensor: tensor)
    return methods


def draw(model: Any, methods: dict[str, Method], seed: int, *, tied: bool) -> None:
    """Initialize every matrix of ``model`` (a ``GPTModel``) at random, as in the whole model.

    Each has its own generator; norms and biases keep the values of their constructors.
    """

    def drawn(name: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        generator = torch.Generator(device=device)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:7], "big"))
        whole = torch.empty(shape, dtype=torch.float32, device=device)
        methods[_method_of(name)](whole, generator=generator)
        return whole

    for name, parameter in named(model, tied=tied):
        if parameter.dim() >= 2:
            whole = drawn(name, _whole_shape(name, parameter), parameter.device)
            parameter.data.copy_(piece(name, whole, split_of(parameter)))


def read(model: Any, source: Source, *, tied: bool) -> None:
    """Initialize every tensor of ``model`` (a ``GPTModel``) from ``source``.

    At any time, one whole tensor is in memory.
    """
    for name, parameter in named(model, tied=tied, biases=True):
        whole = source(name, _whole_shape(name, parameter))
        parameter.data.copy_(piece(name, whole, split_of(parameter)))


def _whole_shape(name: str, parameter: torch.Tensor) -> list[int]:
    shape = list(parameter.shape)
    split = split_of(parameter)
    if split >= 0:
        shape[split] *= tensor_group(name).size()
    return shape


def _method_of(name: str) -> str:
    if name.startswith("embedding."):
        return "embedding_init_method"
    # Those that add to the stream of hidden states.
    if re.search(r"\.(linear_proj|linear_fc2)\.", name):
        return "output_layer_init_method"
    return "init_method"
