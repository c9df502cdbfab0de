from __future__ import annotations

from typing import Any

import pytest

from primus.errors import HostError, InputError
from primus.recipes.recipe import Recipe
from primus.recipes.resolve import resolve
from primus.recipes.rules import rules_of
from primus.recipes.setting import Choices
from primus.training import start
from primus.training.job import Job

FSDP2 = ["megatron.torch_fsdp2=true", "ddp.use_distributed_optimizer=false"]


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


def test_fp8_without_transformer_engine_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = resolve("llama3.1-8b", (), Choices(backend="megatron", gpu="h200", precision="fp8"))
    monkeypatch.setattr(start, "importable", lambda name: name != "transformer_engine")
    with pytest.raises(HostError, match="transformer_engine cannot be imported"):
        start.check_backend(Job(name="train", recipe=recipe, output=tmp_path))
    start.check_backend(Job(name="train", recipe=proxy(), output=tmp_path))
