"""Initial weights that depend only on the seed and the model, not on how ranks share the model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

Method = Callable[..., Any]


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def defer(config: Any) -> dict[str, Method]:
    """Remove the initialization methods from a ``TransformerConfig``, for :func:`initialize` after the model is
    built.

    Megatron draws from one generator per rank, in the order of its modules. The initial weights then depend on TP,
    PP and EP, and a sharded model cannot be compared with the whole one.
    """
    methods = {
        "embedding": config.embedding_init_method,
        "output": config.output_layer_init_method,
        "other": config.init_method,
    }
    config.embedding_init_method = config.output_layer_init_method = config.init_method = _nothing
    return methods


def initialize(model: Any, methods: dict[str, Method], seed: int, *, tied: bool) -> None:
    """Initialize every matrix of ``model`` (a ``GPTModel``) as in the whole model, each from its own generator.

    Norms and biases keep the values of their constructors. At any time, one whole matrix is in memory.
    """
    for name, parameter in _named(model, tied=tied):
        if parameter.dim() < 2:
            continue
        split = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        group = _tensor_group(name)
        shape = list(parameter.shape)
        if split >= 0:
            shape[split] *= group.size()
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big"))
        whole = torch.empty(shape, dtype=torch.float32, device=parameter.device)
        methods[_kind(name)](whole, generator=generator)
        if split >= 0:
            whole = _share(whole, split, group, halves=2 if "linear_fc1" in name else 1)
        parameter.data.copy_(whole)


def whole(
    parts: Sequence[Any],
    *,
    tied: bool,
    value: Callable[[torch.nn.Parameter], torch.Tensor] = _nothing,
    apart: set[str] | None = None,
) -> dict[str, torch.Tensor]:
    """On rank 0, return every parameter and router bias of ``parts`` as one rank would have it. All ranks must call
    this.

    ``value`` returns the tensor to gather for a parameter: itself, or a tensor of its shape, such as its gradient.
    If ranks that must hold the same values differ, the name is added to ``apart``, and the first rank's values are
    used.
    """
    mine: list[tuple[str, int, int, int, torch.Tensor]] = []
    for part in parts:
        model = part
        while hasattr(model, "module"):
            model = model.module
        biases = [(n, b) for n, b in model.named_buffers() if n.endswith("expert_bias") and b is not None]
        for name, tensor in [*_named(model, tied=tied), *biases]:
            split = getattr(tensor, "partition_dim", -1) if getattr(tensor, "tensor_model_parallel", False) else -1
            local = value(tensor) if isinstance(tensor, torch.nn.Parameter) else tensor
            local = local.full_tensor() if hasattr(local, "full_tensor") else local
            halves = 2 if "linear_fc1" in name else 1
            mine.append((name, split, halves, _tensor_group(name).rank(), local.detach().cpu().clone()))
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered)
    pieces: dict[str, dict[int, tuple[int, int, torch.Tensor]]] = {}
    for row in gathered or ():
        for name, split, halves, place, tensor in row:
            known = pieces.setdefault(name, {}).setdefault(place if split >= 0 else 0, (split, halves, tensor))
            if apart is not None and not torch.equal(known[2].nan_to_num(), tensor.nan_to_num()):
                apart.add(name)
    return {name: _joined([row[place] for place in sorted(row)]) for name, row in pieces.items()}


def _joined(pieces: list[tuple[int, int, torch.Tensor]]) -> torch.Tensor:
    """Reverse :func:`_share`."""
    split, halves, first = pieces[0]
    if split < 0:
        return first
    chunks = [tensor.chunk(halves, dim=split) for _, _, tensor in pieces]
    return torch.cat([chunk[half] for half in range(halves) for chunk in chunks], dim=split)


def _kind(name: str) -> str:
    if name.startswith("embedding."):
        return "embedding"
    return "output" if re.search(r"\.(linear_proj|linear_fc2)\.", name) else "other"


def _tensor_group(name: str) -> Any:
    if ".experts." in name:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _share(whole: torch.Tensor, split: int, group: Any, halves: int) -> torch.Tensor:
    """Return this rank's part. A gated layer's first matrix contains two, and a rank has a part of each."""
    parts = [half.chunk(group.size(), dim=split)[group.rank()] for half in whole.chunk(halves, dim=split)]
    return torch.cat(parts, dim=split)


def _named(model: Any, *, tied: bool) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield parameters with their names on one rank that has the whole model."""
    layers = {str(place): str(layer.layer_number - 1) for place, layer in enumerate(model.decoder.layers)}
    here = (model.config.num_moe_experts or 1) // parallel_state.get_expert_model_parallel_world_size()
    first = here * parallel_state.get_expert_model_parallel_rank()
    for name, parameter in model.named_parameters():
        if tied and name == "output_layer.weight":
            # The last pipeline stage's copy of the embedding.
            yield "embedding.word_embeddings.weight", parameter
            continue
        whole = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda match: layers[match[0]], name)
        yield _EXPERT.sub(lambda match: str(first + int(match[0])), whole), parameter


_EXPERT = re.compile(r"(?<=local_experts\.)\d+|(?<=experts\.linear_fc[12]\.weight)\d+")
