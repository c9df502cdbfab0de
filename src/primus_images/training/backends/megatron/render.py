"""A recipe as arguments of megatron-core 0.16.1's configuration classes. It needs no torch."""

from pathlib import Path
from typing import Any

from primus_images.recipes.architecture import Architecture, arguments
from primus_images.training.backends.loop.config import LoopConfig
from primus_images.yamlfile import read_values

ARGUMENTS = Path(__file__).with_name("arguments.yaml")
TABLES: Any = read_values(ARGUMENTS).data


def transformer(model: Architecture, training: LoopConfig) -> dict[str, Any]:
    """Return the plain values of ``TransformerConfig``.

    With latent attention, they are those of ``MLATransformerConfig``.
    """
    values: dict[str, Any] = {
        **arguments(model, ARGUMENTS, "transformer"),
        **TABLES["fixed"],
        "num_query_groups": model.kv_heads or model.heads,
        "bf16": training.dtype == "bfloat16",
        "deterministic_mode": training.deterministic,
    }
    if model.window:
        # A window of n tokens consists of the token itself and the n − 1 before it.
        values["window_size"] = (model.window - 1, 0)
    if training.recompute == "full":
        values |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if model.mla.kv_lora_rank:
        values |= _latent(model)
    if model.moe.experts:
        values |= _experts(model)
    return values


def _latent(model: Architecture) -> dict[str, Any]:
    values = arguments(model, ARGUMENTS, "latent")
    values["q_lora_rank"] = model.mla.q_lora_rank or None
    # The norms of the two compressed vectors.
    values["qk_layernorm"] = True
    if model.rope_scaling.kind == "yarn":
        return values | arguments(model, ARGUMENTS, "yarn")
    # The factor scales the softmax even without YaRN.
    return values | {"rope_type": "rope", "rotary_scaling_factor": 1.0}


def _experts(model: Architecture) -> dict[str, Any]:
    moe = model.moe
    values = arguments(model, ARGUMENTS, "experts")
    if moe.groups > 1:
        values |= arguments(model, ARGUMENTS, "groups")
    values["moe_layer_freq"] = [int(model.is_sparse(layer)) for layer in range(model.layers)]
    values["moe_shared_expert_intermediate_size"] = moe.shared_experts * moe.ffn_size or None
    # A softmax over the chosen experts equals one over all experts that is normalized again.
    values["moe_router_pre_softmax"] = not moe.normalize_top_k
    values["moe_router_topk_scaling_factor"] = None
    if moe.route_scale != 1.0:
        values["moe_router_topk_scaling_factor"] = moe.route_scale
    # DeepSeek-V3's balancing without a loss (arXiv:2408.15664) needs its sigmoid scores.
    values["moe_router_enable_expert_bias"] = moe.score == "sigmoid"
    return values


def gpt(model: Architecture, seq_len: int) -> dict[str, Any]:
    """Return the arguments of ``GPTModel`` that are plain values."""
    return {
        "max_sequence_length": seq_len,
        "position_embedding_type": "rope",
        "rope_scaling": model.rope_scaling.kind == "llama3",
        **arguments(model, ARGUMENTS, "gpt"),
    }
