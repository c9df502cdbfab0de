"""Rendering a recipe as arguments of megatron-core 0.16.1's configuration classes. Does not need
torch.
"""

from pathlib import Path
from typing import Any

from primus_images.recipes.architecture import Architecture, arguments
from primus_images.training.backends.loop.config import LoopConfig
from primus_images.yamlfile import read_values

ARGUMENTS = Path(__file__).with_name("arguments.yaml")
TABLES: Any = read_values(ARGUMENTS).data


def transformer(model: Architecture, training: LoopConfig) -> dict[str, Any]:
    """Return the plain values of ``TransformerConfig``, or of ``MLATransformerConfig`` with latent
    attention.
    """
    moe = model.moe
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
        # The norms are those of the two compressed vectors. The factor scales the softmax even
        # without YaRN.
        values |= {
            **arguments(model, ARGUMENTS, "latent"),
            "q_lora_rank": model.mla.q_lora_rank or None,
        }
        yarn = model.rope_scaling.kind == "yarn"
        values |= (
            arguments(model, ARGUMENTS, "yarn")
            if yarn
            else {"rope_type": "rope", "rotary_scaling_factor": 1.0}
        )
        values["qk_layernorm"] = True
    if moe.experts:
        values |= {
            **arguments(model, ARGUMENTS, "experts", *(["groups"] if moe.groups > 1 else [])),
            "moe_layer_freq": [0] * moe.dense_layers + [1] * (model.layers - moe.dense_layers),
            "moe_shared_expert_intermediate_size": moe.shared_experts * moe.ffn_size or None,
            # A softmax over the chosen experts equals one over all experts that is normalized
            # again.
            "moe_router_pre_softmax": not moe.normalize_top_k,
            "moe_router_topk_scaling_factor": moe.route_scale if moe.route_scale != 1.0 else None,
            # DeepSeek-V3's balancing without a loss (arXiv:2408.15664) needs its sigmoid scores.
            "moe_router_enable_expert_bias": moe.score == "sigmoid",
        }
    return values


def gpt(model: Architecture, seq_len: int) -> dict[str, Any]:
    """Return the arguments of ``GPTModel`` that are plain values."""
    scaled = model.rope_scaling.kind == "llama3"
    plain = {
        "max_sequence_length": seq_len,
        "position_embedding_type": "rope",
        "rope_scaling": scaled,
    }
    return plain | arguments(model, ARGUMENTS, "gpt")
