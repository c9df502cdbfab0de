"""Rendering a recipe as arguments of megatron-core 0.16.1's configuration classes. Does not need torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from primus.recipes.architecture import Architecture
from primus.training.loop.config import LoopConfig


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Settings that Megatron's own configuration classes do not have.

    ``layers`` selects Transformer Engine's layers or Megatron's own ("local"); "auto" uses Transformer Engine's on
    a GPU if it is installed. ``attention`` selects that of the local layers: torch's fused kernels, or Megatron's
    unfused one, which stores all scores of a sequence. ``torch_fsdp2`` shards weights, gradients and optimizer
    states over the data-parallel ranks, instead of optimizer states alone.
    """

    layers: Literal["auto", "local", "transformer_engine"] = "auto"
    attention: Literal["torch", "unfused"] = "torch"
    torch_fsdp2: bool = False


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the keys of a job's configuration below ``name``."""
    head = name + "."
    return {key.removeprefix(head): value for key, value in config.items() if key.startswith(head)}


def transformer(model: Architecture, training: LoopConfig) -> dict[str, Any]:
    """Return the arguments of ``TransformerConfig``, or of ``MLATransformerConfig`` for a model with latent
    attention.

    Activation function and dtypes are added in ``model``, where torch is available.
    """
    return {
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads or model.heads,
        "kv_channels": model.head_size,
        "ffn_hidden_size": model.ffn_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": training.dtype == "bfloat16",
        "deterministic_mode": training.deterministic,
        # A window of n tokens consists of the token itself and the n − 1 before it.
        **({"window_size": (model.window - 1, 0)} if model.window else {}),
        **(
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            if training.recompute == "full"
            else {}
        ),
        **(_latent(model) if model.mla.kv_lora_rank else {}),
        **(_experts(model) if model.moe.experts else {}),
    }


def _latent(model: Architecture) -> dict[str, Any]:
    mla, scaling = model.mla, model.rope_scaling
    return {
        "q_lora_rank": mla.q_lora_rank or None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        # The norms of the two compressed vectors.
        "qk_layernorm": True,
        "rotary_base": model.rope_theta,
        **(
            {
                "rope_type": "yarn",
                "rotary_scaling_factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_position,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "mscale": scaling.mscale,
                "mscale_all_dim": scaling.mscale_all_dim,
            }
            if scaling.kind == "yarn"
            # The factor scales the softmax even without YaRN.
            else {"rope_type": "rope", "rotary_scaling_factor": 1.0}
        ),
    }


def _experts(model: Architecture) -> dict[str, Any]:
    moe = model.moe
    return {
        "num_moe_experts": moe.experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_size,
        "moe_layer_freq": [0] * moe.dense_layers + [1] * (model.layers - moe.dense_layers),
        "moe_shared_expert_intermediate_size": moe.shared_experts * moe.ffn_size or None,
        "moe_router_score_function": moe.score,
        # A softmax over the chosen experts equals one over all experts that is normalized again.
        "moe_router_pre_softmax": not moe.normalize_top_k,
        "moe_router_topk_scaling_factor": moe.route_scale if moe.route_scale != 1.0 else None,
        # DeepSeek-V3's balancing without a loss (arXiv:2408.15664) needs its sigmoid scores.
        "moe_router_enable_expert_bias": moe.score == "sigmoid",
        "moe_aux_loss_coeff": moe.auxiliary_loss,
        **({"moe_router_num_groups": moe.groups, "moe_router_group_topk": moe.top_groups} if moe.groups > 1 else {}),
    }


def gpt(model: Architecture, seq_len: int) -> dict[str, Any]:
    """Return the arguments of ``GPTModel`` that are plain values."""
    scaling = model.rope_scaling
    return {
        "vocab_size": model.vocab_size,
        "max_sequence_length": seq_len,
        "position_embedding_type": "rope",
        "rotary_base": model.rope_theta,
        "rope_scaling": scaling.kind == "llama3",
        "rope_scaling_factor": scaling.factor,
        "share_embeddings_and_output_weights": model.tied_embeddings,
    }


def optimizer(training: LoopConfig, sharded: bool) -> dict[str, Any]:
    """Return the arguments of ``OptimizerConfig``. ``sharded``: the data-parallel ranks shard its states."""
    return {
        "optimizer": "adam",
        "lr": training.lr,
        "min_lr": training.min_lr,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.beta1,
        "adam_beta2": training.beta2,
        "adam_eps": training.eps,
        "clip_grad": training.max_norm,
        "bf16": training.dtype == "bfloat16",
        "use_distributed_optimizer": sharded,
    }


def ddp(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``DistributedDataParallelConfig``: Megatron's usual ones, then those of the job."""
    usual = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": not config.get("torch_fsdp2")}
    return {**usual, **section(config, "ddp")}
