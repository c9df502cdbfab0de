"""The same weights in Megatron's DeepSeek, made from our sizes, and in transformers' give the same logits.

Of other families the reference says so: it agrees with transformers' models, and judged runs of Megatron with it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from primus.recipes.architecture import Architecture, LatentAttention, MixtureOfExperts, RopeScaling

LENGTH = 48
SIZES: dict[str, Any] = {
    "layers": 3, "hidden_size": 64, "heads": 4, "kv_heads": 4, "ffn_size": 96, "vocab_size": 128, "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": RopeScaling(
        kind="yarn", factor=40.0, original_max_position=16, mscale=0.707, mscale_all_dim=0.707
    ),
}  # fmt: skip
LATENT = LatentAttention(kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
MODELS = {
    "DeepseekV2": Architecture(
        family="deepseek_v2", **SIZES, mla=LATENT,
        moe=MixtureOfExperts(experts=8, top_k=3, ffn_size=32, shared_experts=2, dense_layers=1),
    ),
    "DeepseekV3": Architecture(
        family="deepseek_v3", **SIZES, mla=replace(LATENT, q_lora_rank=20),
        moe=MixtureOfExperts(
            experts=8, top_k=4, ffn_size=32, shared_experts=1, dense_layers=1, score="sigmoid", normalize_top_k=True,
            route_scale=2.5, groups=4, top_groups=2,
        ),
    ),
}  # fmt: skip


def reference(name: str, model: Architecture) -> Any:
    """transformers' model of the same sizes."""
    import transformers

    moe, mla, scaling = model.moe, model.mla, model.rope_scaling
    rope = {
        "rope_type": "yarn", "rope_theta": model.rope_theta, "factor": scaling.factor, "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": scaling.original_max_position,
    }  # fmt: skip
    sizes: dict[str, Any] = {
        "vocab_size": model.vocab_size, "hidden_size": model.hidden_size, "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.layers, "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": model.norm_eps, "rope_parameters": rope, "max_position_embeddings": 640,
        "attn_implementation": "eager", "n_routed_experts": moe.experts, "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_size, "n_shared_experts": moe.shared_experts,
        "first_k_dense_replace": moe.dense_layers, "norm_topk_prob": moe.normalize_top_k,
        "routed_scaling_factor": moe.route_scale, "n_group": moe.groups, "topk_group": moe.top_groups,
        "topk_method": "greedy", "q_lora_rank": mla.q_lora_rank or None, "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim, "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
    }  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).eval()


def weights(model: Architecture, theirs: dict[str, Any]) -> dict[str, Any]:
    """transformers' weights under Megatron's names, in its order."""
    import torch

    moved = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    attention = {
        "linear_proj": "o_proj", "linear_q_proj": "q_proj", "linear_q_down_proj": "q_a_proj",
        "q_layernorm": "q_a_layernorm", "linear_q_up_proj": "q_b_proj", "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm", "linear_kv_up_proj": "kv_b_proj",
    }  # fmt: skip
    for number in range(model.layers):
        prefix = f"model.layers.{number}."
        here = {key.removeprefix(prefix): value for key, value in theirs.items() if key.startswith(prefix)}
        layer = {
            "input_layernorm.weight": here["input_layernorm.weight"],
            "pre_mlp_layernorm.weight": here["post_attention_layernorm.weight"],
        }
        for to, source in attention.items():
            if f"self_attn.{source}.weight" in here:
                layer[f"self_attention.{to}.weight"] = here[f"self_attn.{source}.weight"]
        for block in ("mlp.", "mlp.shared_experts."):
            if f"{block}gate_proj.weight" in here:
                gate, up = here[f"{block}gate_proj.weight"], here[f"{block}up_proj.weight"]
                layer[f"{block}linear_fc1.weight"] = torch.cat([gate, up])
                layer[f"{block}linear_fc2.weight"] = here[f"{block}down_proj.weight"]
        if "mlp.gate.weight" in here:
            layer["mlp.router.weight"] = here["mlp.gate.weight"]
            if "mlp.gate.e_score_correction_bias" in here:
                layer["mlp.router.expert_bias"] = here["mlp.gate.e_score_correction_bias"]
            for expert in range(model.moe.experts):
                to = f"mlp.experts.local_experts.{expert}."
                layer[to + "linear_fc1.weight"] = here["mlp.experts.gate_up_proj"][expert]
                layer[to + "linear_fc2.weight"] = here["mlp.experts.down_proj"][expert]
        moved |= {f"decoder.layers.{number}.{key}": value for key, value in layer.items()}
    return moved


def main() -> None:
    import torch

    from primus.training.megatron import cpu

    cpu.apply()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state

    from primus.training import gloo

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    cpu.apply_after_import()
    for name, model in MODELS.items():
        torch.manual_seed(0)
        gap, largest = gap_of(name, model)
        # Unscaled rotary positions make it 5e-2.
        assert gap < 1e-4 * largest, (name, gap, largest)
    gloo.leave()


def gap_of(name: str, model: Architecture) -> tuple[float, float]:
    """The largest gap of any logit, and the largest logit."""
    import torch

    from primus.training.loop.config import LoopConfig
    from primus.training.megatron.model import build
    from primus.training.megatron.render import MegatronConfig

    theirs = reference(name, model)
    with torch.no_grad():
        for parameter, tensor in (*theirs.named_parameters(), *theirs.named_buffers()):
            if parameter.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
            elif "inv_freq" not in parameter:
                tensor.normal_(0, 0.15)
    training = LoopConfig(seq_len=LENGTH, dtype="float32")
    config = {"model.moe_token_dispatcher_type": "alltoall", "model.moe_router_dtype": "fp32"}
    (ours,) = build(model, training, config, MegatronConfig(), on_cpu=True)
    moved = weights(model, theirs.state_dict())
    slots = {**dict(ours.module.named_parameters()), **dict(ours.module.named_buffers())}
    slots = {name: slot for name, slot in slots.items() if name in moved or slot.requires_grad}
    assert slots.keys() == moved.keys(), slots.keys() ^ moved.keys()
    with torch.no_grad():
        for key, slot in slots.items():
            slot.copy_(moved[key])
        tokens = torch.randint(0, model.vocab_size, (2, LENGTH))
        place = torch.arange(LENGTH).expand_as(tokens)
        expected = theirs(tokens).logits
        got = ours.module(tokens, place, None)
    return (got - expected).abs().max().item(), expected.abs().max().item()


main()
