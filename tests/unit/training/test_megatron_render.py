from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from primus.errors import HostError, InputError
from primus.recipes.architecture import Architecture, LatentAttention, MixtureOfExperts, RopeScaling
from primus.recipes.recipe import Recipe
from primus.recipes.resolve import resolve
from primus.recipes.rules import rules_of
from primus.recipes.setting import Choices
from primus.training import start
from primus.training.job import Job
from primus.training.loop.config import LoopConfig
from primus.training.megatron import render

LLAMA = Architecture(
    family="llama3", layers=32, hidden_size=4096, heads=32, kv_heads=8, ffn_size=14336, vocab_size=128256,
    rope_theta=500000.0, rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position=8192),
)  # fmt: skip
MIXTRAL = replace(
    LLAMA, family="mixtral", moe=MixtureOfExperts(experts=8, top_k=2, ffn_size=14336, normalize_top_k=True)
)
DEEPSEEK = Architecture(
    family="deepseek_v3", layers=5, hidden_size=64, heads=4, kv_heads=4, ffn_size=128, vocab_size=512,
    rope_scaling=RopeScaling(kind="yarn", factor=40.0, original_max_position=4096, mscale=0.7, mscale_all_dim=0.7),
    moe=MixtureOfExperts(
        experts=8, top_k=3, ffn_size=32, shared_experts=2, dense_layers=2, score="sigmoid", normalize_top_k=True,
        route_scale=2.5, groups=4, top_groups=2, auxiliary_loss=0.0001,
    ),
    mla=LatentAttention(q_lora_rank=16, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=10),
)  # fmt: skip


FSDP2 = ["megatron.torch_fsdp2=true", "ddp.use_distributed_optimizer=false"]


def made(model: Architecture, **training: Any) -> Mapping[str, Any]:
    return render.transformer(model, LoopConfig(**training))


def test_llama_has_its_sizes_and_nothing_of_experts_or_latents() -> None:
    arguments = made(LLAMA)
    assert arguments["num_query_groups"] == 8
    assert arguments["kv_channels"] == 128
    assert arguments["ffn_hidden_size"] == 14336
    assert arguments["bf16"] is True
    assert not [key for key in arguments if key.startswith(("moe", "num_moe", "rope", "rotary", "q_lora", "window"))]
    whole = render.gpt(LLAMA, 8192)
    assert (whole["rope_scaling"], whole["rope_scaling_factor"], whole["rotary_base"]) == (True, 8.0, 500000.0)
    assert render.gpt(replace(LLAMA, rope_scaling=RopeScaling()), 8192)["rope_scaling"] is False


def test_bias_window_precision_and_recomputation_follow_the_recipe() -> None:
    arguments = made(replace(LLAMA, qkv_bias=True, window=4096), dtype="float32", recompute="full")
    assert arguments["add_qkv_bias"] is True
    # The token itself and 4095 before it.
    assert arguments["window_size"] == (4095, 0)
    assert arguments["bf16"] is False
    assert (arguments["recompute_granularity"], arguments["recompute_method"]) == ("full", "uniform")
    assert "recompute_granularity" not in made(LLAMA)


def test_a_softmax_over_the_chosen_experts_is_one_normalized_again() -> None:
    assert made(MIXTRAL)["moe_router_pre_softmax"] is False
    loose = replace(MIXTRAL, moe=replace(MIXTRAL.moe, normalize_top_k=False))
    assert made(loose)["moe_router_pre_softmax"] is True
    assert made(MIXTRAL)["moe_router_enable_expert_bias"] is False
    assert made(MIXTRAL)["moe_shared_expert_intermediate_size"] is None


def test_deepseek_routes_within_groups_with_a_bias_and_dense_layers_first() -> None:
    arguments = made(DEEPSEEK)
    assert arguments["moe_layer_freq"] == [0, 0, 1, 1, 1]
    assert arguments["moe_shared_expert_intermediate_size"] == 64
    assert arguments["moe_router_enable_expert_bias"] is True
    assert arguments["moe_router_topk_scaling_factor"] == 2.5
    assert (arguments["moe_router_num_groups"], arguments["moe_router_group_topk"]) == (4, 2)
    assert (arguments["q_lora_rank"], arguments["kv_lora_rank"], arguments["v_head_dim"]) == (16, 24, 10)
    assert (arguments["rope_type"], arguments["rotary_scaling_factor"], arguments["mscale"]) == ("yarn", 40.0, 0.7)


def test_without_yarn_nothing_scales_the_softmax_of_latent_attention() -> None:
    plain = made(replace(DEEPSEEK, rope_scaling=RopeScaling(), mla=replace(DEEPSEEK.mla, q_lora_rank=0)))
    assert (plain["rope_type"], plain["rotary_scaling_factor"]) == ("rope", 1.0)
    assert plain["q_lora_rank"] is None


def test_the_optimizer_takes_the_shared_section() -> None:
    arguments = render.optimizer(LoopConfig(lr=0.1, max_norm=2.0, beta2=0.9, dtype="float32"), sharded=True)
    assert (arguments["lr"], arguments["clip_grad"], arguments["adam_beta2"]) == (0.1, 2.0, 0.9)
    assert (arguments["bf16"], arguments["use_distributed_optimizer"]) == (False, True)
    assert render.ddp({"ddp.use_distributed_optimizer": False})["use_distributed_optimizer"] is False


EXPERTS = ("model.moe.experts=4", "model.moe.top_k=2", "model.moe.ffn_size=64")


def proxy(*words: str, name: str = "llama3.1-8b", precision: str | None = None, gpu: str = "cpu") -> Recipe:
    return resolve(name, words, Choices(backend="megatron", gpu=gpu, proxy=True, precision=precision))


@pytest.mark.parametrize("name", ["llama3.1-8b", "deepseek-v2-lite", "mixtral-8x7b"])
def test_the_recipes_are_computable(name: str) -> None:
    for recipe in (proxy(name=name), resolve(name, (), Choices(backend="megatron", gpu="mi300x", precision="bf16"))):
        assert list(rules_of(recipe).faults(recipe)) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.rope_scaling.original_max_position=4096"], "llama3 with 8192 only, not 4096"),
        (["model.rope_scaling.kind=yarn"], "llama3 with none or llama3 only, not yarn"),
        ([*EXPERTS, "model.moe.score=sigmoid"], "always normalizes"),
        (["model.context_parallel_size=2"], "megatron.model.context_parallel_size"),
        (["training.compile=true"], "megatron.training.compile"),
        (["training.master_dtype=bfloat16"], "float32 weights"),
        (["megatron.torch_fsdp2=true"], r"use_distributed_optimizer: is about Megatron's own buffers"),
        ([*FSDP2, "ddp.overlap_grad_reduce=true"], "overlap_grad_reduce: is about Megatron's own buffers"),
        ([*FSDP2, "tp=2"], "tensor_model_parallel_size: torch_fsdp2 shares out the whole model"),
    ],
)
def test_what_megatron_does_not_compute_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        proxy(*words)


def test_latent_attention_is_not_shared_by_tensor_parallelism() -> None:
    with pytest.raises(InputError, match="wrong gradients of kv_a_proj_with_mqa"):
        proxy("tp=2", "ranks=2", "ep=1", name="deepseek-v2-lite")


def test_gloo_does_not_gather_the_unequal_shares_of_experts() -> None:
    words = ("ranks=4", "tp=2", "ep=2", "global_batch=16")
    with pytest.raises(InputError, match="gloo"):
        proxy(*words, name="mixtral-8x7b")
    assert proxy(*words, name="mixtral-8x7b", gpu="mi355x").degree("ep") == 2


def test_the_recipe_s_own_size_is_meant_where_megatron_has_a_key_of_that_name() -> None:
    assert proxy("model.hidden_size=64").architecture.hidden_size == 64


def test_fsdp2_keeps_gradients_in_float32_and_has_no_distributed_optimizer() -> None:
    recipe = proxy(*FSDP2)
    assert render.ddp({"torch_fsdp2": True}) == {"grad_reduce_in_fp32": True, "use_distributed_optimizer": False}
    assert render.ddp({})["use_distributed_optimizer"] is True
    assert render.own(recipe.section("megatron"))["torch_fsdp2"] is True


def test_sizes_and_precision_are_set_in_one_place_only() -> None:
    for key in ("megatron.model.num_layers=2", "megatron.model.bf16=true", "megatron.optimizer.adam_beta1=0.5"):
        with pytest.raises(InputError, match="is set by primus"):
            proxy(key)


def test_fp8_without_transformer_engine_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = resolve("llama3.1-8b", (), Choices(backend="megatron", gpu="h200", precision="fp8"))
    monkeypatch.setattr(start, "importable", lambda name: name != "transformer_engine")
    with pytest.raises(HostError, match="transformer_engine cannot be imported"):
        start.check_backend(Job(name="train", recipe=recipe, output=tmp_path))
    start.check_backend(Job(name="train", recipe=proxy(), output=tmp_path))
