"""Each backend's names and layouts of weights → Hugging Face's.

Only by slicing and permuting, as gradients need it.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from primus_images.recipes.architecture import Architecture
from primus_images.recipes.family import family, renamed

Tensors = dict[str, Tensor]
# The content of the run's ``job.json``.
Job = Mapping[str, Any]
# torchtitan's models that rotate pairs of neighbors, unlike Hugging Face's.
_PAIRED = ("llama3", "llama4")
# The name of a router bias ends so. It is no parameter.
BIAS = ".e_score_correction_bias"
_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")
# Transformer Engine's product of all experts numbers its weights.
_NUMBERED = re.compile(r"(?<=mlp\.experts\.)(linear_fc[12]\.weight)(\d+)")
_QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_FC = re.compile(r"mlp\.(experts\.local_experts\.\d+\.|shared_experts\.|)linear_fc([12])\.weight")


class UnknownWeight(Exception):
    """A tensor of the run that no model of its sizes has."""


def kind_of(name: str) -> str:
    """Return the kind of a tensor: its name without the numbers of layer and expert."""
    return re.sub(r"\.\d+", "", name)


def to_canonical(backend: str, model: Architecture, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return ``tensors`` of a backend by Hugging Face's names.

    Raises UnknownWeight for an unexpected name.
    """
    converted: Tensors = {}
    for name, tensor in tensors.items():
        if backend == "megatron":
            converted.update(_from_megatron(model, name, tensor))
        elif backend == "finetune":
            converted.update(_from_transformers(model, name, tensor))
        elif backend == "flux":
            converted[name] = tensor
        else:
            converted.update(_from_torchtitan(backend, model, name, tensor))
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
    """Return a backend's tensor ``name`` of ``shape``, made of Hugging Face's tensors.

    ``look_up`` returns one by name. This is the inverse of :func:`to_canonical`. Rows that Hugging
    Face's tensors lack, such as those that pad a vocabulary, are 0. Raises UnknownWeight, or what
    ``look_up`` raises.
    """
    # Backends move whole rows, but transformers transposes some experts. Where each goes is seen
    # from its number.
    outer = [*(shape[:-1] or shape), 1]
    if _transposes(model) and ".experts." in name:
        outer = [*shape]
    count = math.prod(outer)
    numbers = torch.arange(count).view(*outer)
    numbered = to_canonical(backend, model, {name: numbers})
    tensor: Tensor | None = None
    for part, rows in numbered.items():
        values = look_up(part)
        if tensor is None:
            tensor = torch.zeros(tuple(shape), dtype=values.dtype)
        every_row = tensor.view(count, -1)
        every_row[rows.flatten()] = values.reshape(rows.numel(), -1)
    if tensor is None:
        raise UnknownWeight(name)
    return tensor


def _from_torchtitan(
    backend: str, model: Architecture, name: str, tensor: Tensor
) -> Iterable[tuple[str, Tensor]]:
    """The layout of our FSDP benchmark as well."""
    plain = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
    layer, inner = _placed(plain, "layers")
    if inner == "moe.tokens_per_expert":
        return
    canonical = renamed(model, backend).get(inner)
    if canonical is None:
        raise UnknownWeight(name)
    if _pairs_neighbors(model, backend) and canonical.endswith(("q_proj.weight", "k_proj.weight")):
        # Hugging Face's rotation pairs element i with i + size / 2.
        pairs = tensor.unflatten(0, (-1, model.head_size // 2, 2))
        tensor = pairs.transpose(1, 2).flatten(0, 2)
    if "{}" not in canonical:
        yield layer + canonical, tensor
        return
    for number, expert in enumerate(tensor):
        yield layer + canonical.format(number), expert


def _pairs_neighbors(model: Architecture, backend: str) -> bool:
    """Return whether the backend's rotation pairs elements that are neighbors."""
    if backend != "torchtitan":
        return False
    of_backend = family(model.family).backends[backend]
    return of_backend.model in _PAIRED


def _placed(name: str, layers: str) -> tuple[str, str]:
    match = re.fullmatch(rf"{re.escape(layers)}\.(\d+)\.(.+)", name)
    if match:
        return (f"model.layers.{match[1]}.", match[2])
    return ("", name)


def _transposes(model: Architecture) -> bool:
    """Return whether transformers keeps weights of experts transposed: gpt-oss's and Llama 4's."""
    return model.moe.bias or model.moe.weighted_inputs


def _from_transformers(
    model: Architecture, name: str, tensor: Tensor
) -> Iterable[tuple[str, Tensor]]:
    name = name.removeprefix("model.").removeprefix("base_model.model.")
    name = re.sub(r"\.base_layer(?=\.)|(?<=\.lora_[AB])\.default(?=\.)", "", name)
    name = name.replace(".feed_forward.", ".mlp.").replace(".mlp.router.", ".mlp.gate.")
    name = name.replace(".mlp.shared_expert.", ".mlp.shared_experts.")
    match = _EXPERTS.fullmatch(name)
    if not match:
        yield name, tensor
        return
    kind = "weight"
    if match[3]:
        kind = "bias"
    elif _transposes(model):
        tensor = tensor.transpose(1, 2)
    parts = {"down_proj": tensor}
    if match[2] == "gate_up_proj":
        gate, up = tensor.chunk(2, 1)
        if model.moe.bias:
            # gpt-oss alternates the rows of both parts of SwiGLU.
            gate = tensor[:, ::2]
            up = tensor[:, 1::2]
        parts = {"gate_proj": gate, "up_proj": up}
    for part, stacked in parts.items():
        for number, expert in enumerate(stacked):
            yield f"{match[1]}.{number}.{part}.{kind}", expert


def _from_megatron(model: Architecture, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    layer, inner = _placed(name, "decoder.layers")
    inner = _NUMBERED.sub(r"local_experts.\2.\1", inner)
    canonical = renamed(model, "megatron").get(inner)
    if canonical is not None:
        if not layer and "norm" not in inner:
            # The vocabulary is padded to a multiple that the ranks share.
            tensor = tensor[: model.vocab_size]
        yield layer + canonical, tensor
        return
    match = _QKV.fullmatch(inner)
    if match:
        # One group: its heads of queries, then its head of keys, then its head of values.
        queries = model.heads // model.kv_heads
        grouped = tensor.unflatten(0, (model.kv_heads, queries + 2, model.head_size))
        heads = grouped.split([queries, 1, 1], 1)
        for kind, part in zip("qkv", heads, strict=True):
            canonical = f"{layer}self_attn.{kind}_proj.{match[1]}"
            yield canonical, part.flatten(0, 2)
        return
    match = _FC.fullmatch(inner)
    if not match:
        raise UnknownWeight(name)
    place = layer + "mlp." + match[1].replace("local_experts.", "")
    if match[2] == "2":
        yield place + "down_proj.weight", tensor
        return
    gate, up = tensor.chunk(2)
    yield place + "gate_proj.weight", gate
    yield place + "up_proj.weight", up
