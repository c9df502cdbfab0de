"""Rendering a recipe as arguments of megatron-core 0.16.1's configuration classes. Does not need torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from primus.recipes.architecture import Architecture, arguments
from primus.training.loop.config import LoopConfig
from primus.yamlfile import read_values, section

_FILE = Path(__file__).with_name("arguments.yaml")
TABLES: Any = read_values(_FILE).data


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Settings that Megatron's own configuration classes do not have.

    ``layers`` selects Transformer Engine's layers or Megatron's own ("local"); "auto" uses Transformer Engine's on
    a GPU if it is installed. ``weights`` are the initial weights: "random" (from the seed), a folder of safetensors
    files with Hugging Face's names, or ``hf:OWNER/NAME``. ``torch_fsdp2`` shards weights, gradients and optimizer
    states over the data-parallel ranks, instead of optimizer states alone.
    """

    layers: Literal["auto", "local", "transformer_engine"] = "auto"
    weights: str = "random"
    torch_fsdp2: bool = False


def transformer(model: Architecture, training: LoopConfig) -> dict[str, Any]:
    """Return the arguments of ``TransformerConfig``, or of ``MLATransformerConfig`` for a model with latent
    attention.

    Activation function and dtypes are added in ``model``, where torch is available.
    """
    values = {
        **arguments(model, _FILE, "transformer"),
        **TABLES["fixed"],
        "num_query_groups": model.kv_heads or model.heads,
        "bf16": training.dtype == "bfloat16",
        "deterministic_mode": training.deterministic,
    }
    if model.window:
        # A window of n tokens consists of the token itself and the n − 1 before it.
        values["window_size"] = (model.window - 1, 0)
    if training.recompute == "full":
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if model.mla.kv_lora_rank:
        # The norms are those of the two compressed vectors.
        values |= {**arguments(model, _FILE, "latent"), "q_lora_rank": model.mla.q_lora_rank or None}
        values |= {"qk_layernorm": True}
        if model.rope_scaling.kind == "yarn":
            values |= arguments(model, _FILE, "yarn")
        else:
            # The factor scales the softmax even without YaRN.
            values |= {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    return values | (_experts(model) if model.moe.experts else {})


def _experts(model: Architecture) -> dict[str, Any]:
    moe = model.moe
    return {
        **arguments(model, _FILE, "experts", *(["groups"] if moe.groups > 1 else [])),
        "moe_layer_freq": [0] * moe.dense_layers + [1] * (model.layers - moe.dense_layers),
        "moe_shared_expert_intermediate_size": moe.shared_experts * moe.ffn_size or None,
        # A softmax over the chosen experts equals one over all experts that is normalized again.
        "moe_router_pre_softmax": not moe.normalize_top_k,
        "moe_router_topk_scaling_factor": moe.route_scale if moe.route_scale != 1.0 else None,
        # DeepSeek-V3's balancing without a loss (arXiv:2408.15664) needs its sigmoid scores.
        "moe_router_enable_expert_bias": moe.score == "sigmoid",
    }


def gpt(model: Architecture, seq_len: int) -> dict[str, Any]:
    """Return the arguments of ``GPTModel`` that are plain values."""
    return {
        **arguments(model, _FILE, "gpt"),
        "max_sequence_length": seq_len,
        "position_embedding_type": "rope",
        "rope_scaling": model.rope_scaling.kind == "llama3",
    }


def optimizer(training: LoopConfig, sharded: bool) -> dict[str, Any]:
    """Return the arguments of ``OptimizerConfig``. ``sharded``: the data-parallel ranks shard its states."""
    return {
        **arguments(training, _FILE, "optimizer"),
        "optimizer": "adam",
        "bf16": training.dtype == "bfloat16",
        "use_distributed_optimizer": sharded,
    }


def ddp(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``DistributedDataParallelConfig``: Megatron's usual ones, then those of the job."""
    usual = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": not config.get("torch_fsdp2")}
    return {**usual, **section(config, "ddp")}
