"""Conversion of each backend's names and layouts of weights to Hugging Face's, and back.

One tensor of a backend becomes one or several of Hugging Face's by slicing and permuting only, so gradients and updates
are converted like weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch

from primus.recipes.architecture import Architecture

Tensors = dict[str, torch.Tensor]
# The name of a router bias ends so. It is no parameter.
BIAS = ".e_score_correction_bias"


class UnknownWeight(Exception):
    """A tensor of the run that no model of its sizes has."""


def kind_of(name: str) -> str:
    """Return the kind of a tensor: its name without the numbers of layer and expert."""
    return re.sub(r"\.\d+", "", name)


def to_canonical(backend: str, model: Architecture, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return ``tensors`` of a backend by Hugging Face's names. Raises UnknownWeight for an unexpected name."""
    converted: Tensors = {}
    for name, tensor in tensors.items():
        converted.update(_CONVERT[backend](model, name, tensor))
    return converted


def _torchtitan(model: Architecture, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    outer = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
             "output.weight": "lm_head.weight"}  # fmt: skip
    name = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
    if name in outer:
        return [(outer[name], tensor)]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if not match:
        raise UnknownWeight(name)
    layer, inner = f"model.layers.{match[1]}.", match[2]
    if inner in _TITAN_LAYER:
        return [(layer + _TITAN_LAYER[inner], tensor)]
    if inner in ("attention.wq.weight", "attention.wk.weight") and not model.mla.kv_lora_rank:
        # The backend's rotation pairs neighbors; Hugging Face's pairs element i with i + size / 2.
        turned = tensor.unflatten(0, (-1, model.head_size // 2, 2)).transpose(1, 2).flatten(0, 2)
        return [(f"{layer}self_attn.{inner[11]}_proj.weight", turned)]
    if inner == "attention.wq.weight":
        return [(layer + "self_attn.q_proj.weight", tensor)]
    if match := re.fullmatch(r"moe\.experts\.(w[123])", inner):
        part = _SWIGLU[match[1]]
        return [(f"{layer}mlp.experts.{number}.{part}.weight", each) for number, each in enumerate(tensor)]
    if inner == "moe.tokens_per_expert":
        return []
    raise UnknownWeight(name)


_SWIGLU = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_TITAN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.wq_a.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.wq_b.weight": "self_attn.q_b_proj.weight",
    "attention.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
    "moe.router.gate.weight": "mlp.gate.weight",
    "moe.expert_bias": "mlp.gate.e_score_correction_bias",
} | {
    f"{theirs}.{part}.weight": f"{ours}.{_SWIGLU[part]}.weight"
    for theirs, ours in (("feed_forward", "mlp"), ("moe.shared_experts", "mlp.shared_experts"))
    for part in _SWIGLU
}


def _fsdp(model: Architecture, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    outer = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
             "output.weight": "lm_head.weight"}  # fmt: skip
    if name in outer:
        return [] if name == "output.weight" and model.tied_embeddings else [(outer[name], tensor)]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if not match or match[2] not in _FSDP_LAYER:
        raise UnknownWeight(name)
    return [(f"model.layers.{match[1]}.{_FSDP_LAYER[match[2]]}.{match[3]}", tensor)]


_FSDP_LAYER = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def _finetune(model: Architecture, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """Convert transformers' own names, below the wrapper's ``model.`` and PEFT's ``base_model.model.``."""
    name = name.removeprefix("model.").removeprefix("base_model.model.")
    name = name.replace(".base_layer.", ".").replace(".lora_A.default.", ".lora_A.").replace(
        ".lora_B.default.", ".lora_B.")  # fmt: skip
    if name == "lm_head.weight" and model.tied_embeddings:
        return []
    if match := re.fullmatch(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)", name):
        if match[2] == "down_proj":
            return [(f"{match[1]}.{number}.down_proj.weight", each) for number, each in enumerate(tensor)]
        return [
            (f"{match[1]}.{number}.{part}.weight", half)
            for number, each in enumerate(tensor)
            for part, half in zip(("gate_proj", "up_proj"), each.chunk(2), strict=True)
        ]
    return [(name, tensor)]


def _megatron(model: Architecture, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    outer = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    if name in outer:
        # The vocabulary is padded to a multiple that the ranks share.
        return [(outer[name], tensor[: model.vocab_size] if "norm" not in name else tensor)]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if not match:
        raise UnknownWeight(name)
    layer, inner = f"model.layers.{match[1]}.", match[2]
    if inner in _MEGATRON_LAYER:
        return [(layer + _MEGATRON_LAYER[inner], tensor)]
    if match := re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", inner):
        # One group: its heads of queries, then its head of keys, then its head of values.
        each = model.heads // model.kv_heads
        grouped = tensor.unflatten(0, (model.kv_heads, each + 2, model.head_size))
        parts = grouped.split([each, 1, 1], 1)
        return [
            (f"{layer}self_attn.{kind}_proj.{match[1]}", part.flatten(0, 2))
            for kind, part in zip("qkv", parts, strict=True)
        ]
    if match := re.fullmatch(r"mlp\.(experts\.local_experts\.\d+\.|shared_experts\.|)linear_fc([12])\.weight", inner):
        head = layer + "mlp." + match[1].replace("local_experts.", "")
        if match[2] == "2":
            return [(head + "down_proj.weight", tensor)]
        gate, up = tensor.chunk(2)
        return [(head + "gate_proj.weight", gate), (head + "up_proj.weight", up)]
    raise UnknownWeight(name)


_MEGATRON_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}

_CONVERT: dict[str, Callable[[Architecture, str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]] = {
    "torchtitan": _torchtitan,
    "fsdp": _fsdp,
    "finetune": _finetune,
    "megatron": _megatron,
    "flux": lambda _model, name, tensor: [(name, tensor)],
}
