"""Which weights a language model has, and how many operations a token takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from primus.recipes.architecture import Architecture


def shapes(model: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the model, by Hugging Face's name."""
    width, moe, mla = model.hidden_size, model.moe, model.mla
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocab_size, width),
        "model.norm.weight": (width,),
    }
    if not model.tied_embeddings:
        found["lm_head.weight"] = (model.vocab_size, width)

    def swiglu(name: str, size: int) -> None:
        found[name + "gate_proj.weight"] = found[name + "up_proj.weight"] = (size, width)
        found[name + "down_proj.weight"] = (width, size)

    for number in range(model.layers):
        layer = f"model.layers.{number}."
        found[layer + "input_layernorm.weight"] = found[layer + "post_attention_layernorm.weight"] = (width,)
        attention = layer + "self_attn."
        if mla.kv_lora_rank:
            per_head = mla.qk_nope_head_dim + mla.qk_rope_head_dim
            if mla.q_lora_rank:
                found[attention + "q_a_proj.weight"] = (mla.q_lora_rank, width)
                found[attention + "q_a_layernorm.weight"] = (mla.q_lora_rank,)
                found[attention + "q_b_proj.weight"] = (model.heads * per_head, mla.q_lora_rank)
            else:
                found[attention + "q_proj.weight"] = (model.heads * per_head, width)
            found[attention + "kv_a_proj_with_mqa.weight"] = (mla.kv_lora_rank + mla.qk_rope_head_dim, width)
            found[attention + "kv_a_layernorm.weight"] = (mla.kv_lora_rank,)
            found[attention + "kv_b_proj.weight"] = (
                model.heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank,
            )  # fmt: skip
            found[attention + "o_proj.weight"] = (width, model.heads * mla.v_head_dim)
        else:
            for kind, heads in (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads)):
                found[f"{attention}{kind}_proj.weight"] = (heads * model.head_size, width)
                if model.qkv_bias:
                    found[f"{attention}{kind}_proj.bias"] = (heads * model.head_size,)
            found[attention + "o_proj.weight"] = (width, model.heads * model.head_size)
        if moe.experts and number >= moe.dense_layers:
            found[layer + "mlp.gate.weight"] = (moe.experts, width)
            for expert in range(moe.experts):
                swiglu(f"{layer}mlp.experts.{expert}.", moe.ffn_size)
            if moe.shared_experts:
                swiglu(layer + "mlp.shared_experts.", moe.ffn_size * moe.shared_experts)
        else:
            swiglu(layer + "mlp.", model.ffn_size)
    return found


def operations(model: Architecture, length: int, adapters: int | None = None) -> float:
    """Return the floating-point operations per token of a sequence of ``length``, with attention counted in full.

    Each weight takes 2 operations forward and 4 backward; an expert's weights count only for the tokens that choose
    it. The embedding multiplies nothing. ``adapters`` is the number of weights that LoRA trains; the gradients of
    the others are not computed.
    """
    count = 0.0
    for name, shape in shapes(model).items():
        share = model.moe.top_k / model.moe.experts if ".experts." in name else 1.0
        count += 0.0 if name == "model.embed_tokens.weight" and not model.tied_embeddings else share * math.prod(shape)
    mla = model.mla
    # Queries with keys, and the shares with values.
    sizes = (model.head_size, model.head_size)
    if mla.kv_lora_rank:
        sizes = (mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim)
    seen = min(model.window or length, length)
    weights = 6 * count if adapters is None else 4 * count + 6 * adapters
    return weights + 6 * model.layers * model.heads * sum(sizes) * seen


def adapter_shapes(model: Architecture, rank: int, targets: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the adapters of the linear layers named by ``targets``, by default of all but the output layer."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes(model).items():
        layer = name.removesuffix(".weight")
        kind = layer.rpartition(".")[2]
        if kind.endswith("_proj") and name.endswith(".weight") and (not targets or kind in targets):
            found[layer + ".lora_A.weight"] = (rank, shape[1])
            found[layer + ".lora_B.weight"] = (shape[0], rank)
    return found
