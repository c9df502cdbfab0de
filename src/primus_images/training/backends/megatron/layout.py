"""Where a rank's tensors are in the whole model: their names there, and how ranks split them."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

# The numbers of layer and expert in a name.
LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
EXPERT = re.compile(r"(?<=local_experts\.)\d+|(?<=experts\.linear_fc[12]\.weight)\d+")


def gpt_of(part: Any) -> Any:
    """Return the ``GPTModel`` in its wrappers."""
    while hasattr(part, "module"):
        part = part.module
    return part


def named(model: Any, *, tied: bool, biases: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield each parameter, and with ``biases`` each router's, by its name in the whole model."""
    for name, parameter in model.named_parameters():
        if tied and name == "output_layer.weight":
            # The last pipeline stage's copy of the embedding.
            yield "embedding.word_embeddings.weight", parameter
        else:
            yield _whole_name(model, name), parameter
    if biases:
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                yield _whole_name(model, name), buffer


def _whole_name(model: Any, name: str) -> str:
    layers = model.decoder.layers
    experts = model.config.num_moe_experts or 1
    experts_of_rank = experts // parallel_state.get_expert_model_parallel_world_size()
    first_expert = experts_of_rank * parallel_state.get_expert_model_parallel_rank()
    name = LAYER.sub(lambda match: str(layers[int(match[0])].layer_number - 1), name)
    return raised(EXPERT, name, first_expert)


def raised(number: re.Pattern[str], name: str, by: int) -> str:
    """Return ``name`` with its ``number`` raised."""
    return number.sub(lambda match: str(int(match[0]) + by), name)


def split_of(tensor: torch.Tensor) -> int:
    """Return along which dimension ranks split a tensor; -1: along none."""
    if getattr(tensor, "tensor_model_parallel", False):
        return getattr(tensor, "partition_dim", -1)
    return -1


def tensor_group(name: str) -> Any:
    """Return the ranks that split the tensor ``name``."""
    if ".experts." in name:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def piece(name: str, whole: torch.Tensor, split: int) -> torch.Tensor:
    """Return this rank's piece of a whole tensor."""
    if split < 0:
        return whole
    group = tensor_group(name)
    halves = whole.chunk(_halves(name), dim=split)
    pieces = [half.chunk(group.size(), dim=split)[group.rank()] for half in halves]
    return torch.cat(pieces, dim=split)


def join(name: str, pieces: Sequence[torch.Tensor], split: int) -> torch.Tensor:
    """Return the whole tensor of the pieces of all ranks, in their order."""
    if split < 0:
        return pieces[0]
    halves_of_ranks = [tensor.chunk(_halves(name), dim=split) for tensor in pieces]
    ordered: list[torch.Tensor] = []
    for halves in zip(*halves_of_ranks, strict=True):
        ordered.extend(halves)
    return torch.cat(ordered, dim=split)


def _halves(name: str) -> int:
    # The gate and the projection beside it are one tensor, of which a rank has a part of each.
    if "linear_fc1" in name:
        return 2
    return 1
