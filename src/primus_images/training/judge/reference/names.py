"""Each backend's names and layouts of weights → Hugging Face's, by slicing and permuting only, as
gradients need it.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from primus_images.recipes.architecture import Architecture
from primus_images.recipes.family import family, renamed

Tensors = dict[str, Tensor]
# The content of the run's ``job.json``.
Job = Mapping[str, Any]
# The name of a router bias ends so. It is no parameter.
BIAS = ".e_score_correction_bias"


class UnknownWeight(Exception):
    """A tensor of the run that no model of its sizes has."""


def kind_of(name: str) -> str:
    """Return the kind of a tensor: its name without the numbers of layer and expert."""
    return re.sub(r"\.\d+", "", name)


def to_canonical(backend: str, model: Architecture, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return ``tensors`` of a backend by Hugging Face's names. Raises UnknownWeight for an
    unexpected name.
    """
    converted: Tensors = {}
    for name, tensor in tensors.items():
        converted.update(_CONVERT[backend](model, name, tensor))
    if model.tied_embeddings:
        converted.pop("lm_head.weight", None)
    return converted


def from_canonical(
    backend: str,
    model: Architecture,
    name: str,
    shape: Sequence[int],
    look_up: Callable[[str], Tensor],
) -> Tensor:
    """Return a backend's tensor ``name`` of ``shape``, made of Hugging Face's tensors. ``look_up``
    returns one by name.

    This is the inverse of :func:`to_canonical`. Rows that Hugging Face's tensors lack, such as
    those that pad a vocabulary, are 0. Raises UnknownWeight, or what ``look_up`` raises.
    """
    # Backends move whole rows, but transformers transposes some experts. Where each goes is seen
    # from its number.
    outer = shape[:-1] or shape
    numbers = torch.arange(math.prod(outer)).view(*outer, 1)
    if _transposes(model) and ".experts." in name:
        numbers = torch.arange(math.prod(shape)).view(*shape)
    tensor: Tensor | None = None
    for part, rows in to_canonical(backend, model, {name: numbers}).items():
        values = look_up(part)
        if tensor is None:
            tensor = torch.zeros(tuple(shape), dtype=values.dtype)
        tensor.view(numbers.numel(), -1)[rows.flatten()] = values.reshape(rows.numel(), -1)
    if tensor is None:
        raise UnknownWeight(name)
    return tensor


def _blocks(
    backend: str, model: Architecture, name: str, tensor: Tensor
) -> Iterable[tuple[str, Tensor]]:
    layer, inner = _placed(
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""), "layers"
    )
    if inner == "moe.tokens_per_expert":
        return []
    try:
        ours = renamed(model, backend)[inner]
    except KeyError:
        raise UnknownWeight(name) from None
    pairs = backend == "torchtitan" and family(model.family).backends[backend].model == "llama3"
    if pairs and ours.endswith(("q_proj.weight", "k_proj.weight")):
        # The backend's rotation pairs neighbors; Hugging Face's pairs element i with i + size / 2.
        tensor = tensor.unflatten(0, (-1, model.head_size // 2, 2)).transpose(1, 2).flatten(0, 2)
    if "{}" in ours:
        return [(layer + ours.format(number), each) for number, each in enumerate(tensor)]
    return [(layer + ours, tensor)]


def _placed(name: str, layers: str) -> tuple[str, str]:
    match = re.fullmatch(rf"{re.escape(layers)}\.(\d+)\.(.+)", name)
    if match:
        return (f"model.layers.{match[1]}.", match[2])
    return ("", name)


def _transposes(model: Architecture) -> bool:
    """Return whether transformers keeps the weights of experts transposed: gpt-oss's and Llama 4's."""
    return model.moe.bias or model.moe.weighted_inputs


def _finetune(model: Architecture, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    name = name.removeprefix("model.").removeprefix("base_model.model.")
    name = re.sub(r"\.base_layer(?=\.)|(?<=\.lora_[AB])\.default(?=\.)", "", name)
    name = name.replace(".feed_forward.", ".mlp.").replace(
        ".mlp.shared_expert.", ".mlp.shared_experts."
    )
    name = name.replace(".mlp.router.", ".mlp.gate.")
    match = re.fullmatch(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?", name)
    if match:
        parts = {"down_proj": tensor}
        kind = "weight"
        if match[3]:
            kind = "bias"
        if _transposes(model) and kind == "weight":
            parts = {"down_proj": tensor.transpose(1, 2)}
        if match[2] == "gate_up_proj":
            whole = parts["down_proj"]
            # gpt-oss alternates the rows of both parts of SwiGLU.
            if model.moe.bias:
                halves = (whole[:, ::2], whole[:, 1::2])
            else:
                halves = whole.chunk(2, 1)
            parts = dict(zip(("gate_proj", "up_proj"), halves, strict=True))
        return [
            (f"{match[1]}.{number}.{part}.{kind}", each)
            for part, stacked in parts.items()
            for number, each in enumerate(stacked)
        ]
    return [(name, tensor)]


def _megatron(model: Architecture, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    layer, inner = _placed(name, "decoder.layers")
    # Transformer Engine's product of all experts numbers its weights.
    inner = re.sub(
        r"(?<=mlp\.experts\.)(linear_fc[12]\.weight)(\d+)", r"local_experts.\2.\1", inner
    )
    ours = renamed(model, "megatron").get(inner)
    if ours is not None:
        # The vocabulary is padded to a multiple that the ranks share.
        whole = layer or "norm" in inner
        return [(layer + ours, tensor if whole else tensor[: model.vocab_size])]
    match = re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", inner)
    if match:
        # One group: its heads of queries, then its head of keys, then its head of values.
        each = model.heads // model.kv_heads
        grouped = tensor.unflatten(0, (model.kv_heads, each + 2, model.head_size))
        parts = grouped.split([each, 1, 1], 1)
        return [
            (f"{layer}self_attn.{kind}_proj.{match[1]}", part.flatten(0, 2))
            for kind, part in zip("qkv", parts, strict=True)
        ]
    match = re.fullmatch(
        r"mlp\.(experts\.local_experts\.\d+\.|shared_experts\.|)linear_fc([12])\.weight", inner
    )
    if match:
        head = layer + "mlp." + match[1].replace("local_experts.", "")
        if match[2] == "2":
            return [(head + "down_proj.weight", tensor)]
        gate, up = tensor.chunk(2)
        return [(head + "gate_proj.weight", gate), (head + "up_proj.weight", up)]
    raise UnknownWeight(name)


_CONVERT: dict[str, Callable[[Architecture, str, Tensor], Iterable[tuple[str, Tensor]]]] = {
    "torchtitan": partial(_blocks, "torchtitan"),
    "fsdp": partial(_blocks, "fsdp"),
    "finetune": _finetune,
    "megatron": _megatron,
    "flux": lambda _model, name, tensor: [(name, tensor)],
}
