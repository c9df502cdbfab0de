"""What torchtitan and Megatron compute of a recipe, what they do not, and what is not judged."""

from typing import Any

import pytest

from primus_images.errors import InputError
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.rules import rules_of
from primus_images.recipes.setting import Choices

MX = "model.converters=[quantize.linear.mx]"
PROXY: dict[str, Any] = {"gpu": "cpu", "precision": "fp32", "proxy": True}
SHARED = "where ranks share layers and none shards them, all but the FP8 products would be in"


def recipe_of(backend: str, name: str, *words: str, **choices: Any) -> Recipe:
    usual = {"gpu": "mi355x", "precision": "bf16"}
    return resolve(name, words, Choices(**{"backend": backend, **usual, **choices}))


@pytest.mark.parametrize(
    ("words", "precision", "unjudged", "blocks", "compiled", "parallel"),
    [
        ([], "bf16", None, False, True, 8),
        ([MX, "quantize.linear.mx.recipe_name=mxfp8_cublas"], "mxfp8", None, False, True, 8),
        (["model.converters=[quantize.linear.float8]"], "fp8", None, False, True, 8),
        (
            ["quantize.linear.float8.recipe_name=rowwise"],
            "fp8",
            "the reference rounds to FP8 by tensors, not rowwise",
            False,
            True,
            8,
        ),
        (["quantize.linear.float8.recipe_name=rowwise"], "bf16", None, False, True, 8),
        (["pp=2"], "bf16", "the run has pipeline stages", False, True, 4),
        (["compile.enable=false"], "bf16", None, True, False, 8),
        (["compile.components=[loss]"], "bf16", None, True, False, 8),
        # One rank without FSDP uses autocast, unless all is in the computing precision.
        (["compile.enable=false", "ranks=1"], "bf16", None, False, False, 1),
        (
            ["compile.enable=false", "ranks=1", "training.dtype=bfloat16"],
            "bf16",
            None,
            True,
            False,
            1,
        ),
        (["tp=8", "training.dtype=bfloat16"], "fp8", None, False, True, 1),
        (["tp=8", "training.dtype=bfloat16"], "bf16", None, False, True, 1),
        (["tp=4", "cp=2"], "bf16", None, False, True, 1),
    ],
)
def test_what_torchtitan_computes_and_what_of_it_is_judged(
    words: list[str],
    precision: str,
    unjudged: str | None,
    blocks: bool,
    compiled: bool,
    parallel: int,
) -> None:
    recipe = recipe_of("torchtitan", "llama3.1-8b", *words, precision=precision)
    rules = rules_of(recipe)
    assert rules.precision(recipe) == precision
    assert rules.unjudged(recipe) == unjudged
    assert rules.blocks_judged(recipe) is blocks
    assert rules.compiled(recipe) is compiled
    assert recipe.data_parallel == parallel
    assert rules.layout(recipe) == {}


@pytest.mark.parametrize(
    ("words", "choices", "layout", "unjudged"),
    [
        ([], {}, {}, None),
        (["tp=2"], {}, {"tp": 2}, None),
        (["pp=2"], {}, {"pp": 2}, None),
        (
            ["pp=2", "model.virtual_pipeline_model_parallel_size=2"],
            {},
            {"pp": 2, "virtual_pp": 2},
            None,
        ),
        (["ddp.use_distributed_optimizer=false"], {}, {"ranks": None}, None),
        ([], {"precision": "fp8"}, {}, None),
        ([], {"precision": "mxfp8"}, {}, None),
        (["training.dtype=float32"], {**PROXY}, {"dtype": "float32", "ranks": 2}, None),
        (
            ["model.moe_router_load_balancing_type=sinkhorn"],
            {},
            {},
            "the reference does not balance experts by sinkhorn",
        ),
        (["model.moe_router_load_balancing_type=seq_aux_loss"], {}, {}, None),
        (["model.moe_router_load_balancing_type=aux_loss"], {}, {}, None),
    ],
)
def test_a_checkpoint_of_megatron_has_the_layout_of_its_ranks(
    words: list[str], choices: dict[str, Any], layout: dict[str, Any], unjudged: str | None
) -> None:
    recipe = recipe_of("megatron", "llama3.1-8b", *words, **choices)
    rules = rules_of(recipe)
    usual = {"tp": 1, "pp": 1, "ep": 1, "virtual_pp": 1, "ranks": 8, "dtype": "bfloat16"}
    expected = {
        f"layout.{key}": value for key, value in {**usual, **layout}.items() if value is not None
    }
    assert rules.layout(recipe) == expected
    assert rules.unjudged(recipe) == unjudged
    assert rules.precision(recipe) == choices.get("precision", "bf16")


@pytest.mark.parametrize(
    ("backend", "name", "words", "choices", "key", "why", "hint"),
    [
        (
            "torchtitan",
            "llama3.1-8b",
            ["replicas=8"],
            {},
            "torchtitan.parallelism.data_parallel_replicate_degree",
            "without FSDP, torchtitan 0.2.2 divides gradients by the number of replicas once too",
            "replicas=1, or more ranks than replicas",
        ),
        (
            "torchtitan",
            "llama3.1-8b",
            ["cp=2", "ranks=2"],
            PROXY,
            "torchtitan.parallelism.context_parallel_degree",
            "PyTorch's attention on the CPU cannot split sequences over ranks",
            "cp=1",
        ),
        (
            "torchtitan",
            "llama3.1-8b",
            ["cp=2"],
            {"precision": "fp32", "proxy": True},
            "torchtitan.parallelism.context_parallel_degree",
            "PyTorch's attention in float32 cannot split sequences over ranks",
            "cp=1",
        ),
        (
            "torchtitan",
            "llama3.1-8b",
            ["training.enable_cpu_offload=true", "ranks=1"],
            PROXY,
            "torchtitan.training.enable_cpu_offload",
            "the weights are on the CPU already",
            "training.enable_cpu_offload=false",
        ),
        (
            "torchtitan",
            "llama3.1-8b",
            ["checkpoint.async_mode=async_with_pinned_mem"],
            PROXY,
            "torchtitan.checkpoint.async_mode",
            "only a GPU copies to pinned memory",
            "checkpoint.async_mode=async",
        ),
        (
            "torchtitan",
            "qwen3-8b",
            ["pp=2"],
            {},
            "torchtitan.parallelism.pipeline_parallel_degree",
            "torchtitan 0.2.2 cannot cut Qwen 3 into stages",
            "pp=1",
        ),
        (
            "torchtitan",
            "llama3.1-8b",
            ["tp=8"],
            {"precision": "fp8"},
            "precision",
            f"{SHARED} float32",
            "leave ranks to data or context parallelism",
        ),
        (
            "megatron",
            "llama3.1-8b",
            ["cp=2"],
            {},
            "megatron.model.context_parallel_size",
            "Megatron splits sequences in Transformer Engine alone",
            "use TP",
        ),
        (
            "megatron",
            "llama3.1-8b",
            ["torch_fsdp2=true", "tp=2"],
            {},
            "megatron.model.tensor_model_parallel_size",
            "torch_fsdp2 shares out the whole model over all ranks",
            "tp=1",
        ),
        (
            "megatron",
            "llama3.1-8b",
            ["torch_fsdp2=true"],
            {},
            "megatron.ddp.use_distributed_optimizer",
            "is about Megatron's own buffers, and torch_fsdp2 has none",
            "ddp.use_distributed_optimizer=false",
        ),
        (
            "megatron",
            "llama3.1-8b",
            ["model.recompute_num_layers=33"],
            {},
            "megatron.model.recompute_num_layers",
            "33 is more than the model's 32 layers",
            "model.recompute_num_layers=32 at most",
        ),
        (
            "megatron",
            "deepseek-v2-lite",
            ["tp=2"],
            {},
            "megatron.model.tensor_model_parallel_size",
            "latent attention shared by Megatron's ranks gets wrong gradients of kv_a_proj",
            "tp=1",
        ),
        (
            "megatron",
            "mixtral-8x7b",
            ["tp=2", "ep=2", "ranks=4"],
            PROXY,
            "megatron.model.expert_model_parallel_size",
            "gloo, which connects ranks on a CPU, cannot gather the unequal shares of TP with EP",
            "tp=1 or ep=1",
        ),
        (
            "megatron",
            "deepseek-v3",
            ["model.moe.normalize_top_k=false"],
            {"nodes": 16},
            "model.moe.score",
            "Megatron always normalizes the chosen sigmoid scores",
            "model.moe.normalize_top_k=true",
        ),
    ],
)
def test_what_a_backend_does_not_compute_is_refused_with_a_remedy(
    backend: str,
    name: str,
    words: list[str],
    choices: dict[str, Any],
    key: str,
    why: str,
    hint: str,
) -> None:
    with pytest.raises(InputError) as caught:
        recipe_of(backend, name, *words, **choices)
    assert caught.value.message.startswith(f"{key}: {why}")
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("torchtitan", ["replicas=4"]),
        ("torchtitan", ["replicas=4", "cp=2"]),
        ("torchtitan", ["cp=2"]),
        ("torchtitan", ["tp=8", "training.dtype=bfloat16"]),
        ("megatron", ["model.recompute_num_layers=32"]),
        ("megatron", ["tp=2"]),
        (
            "megatron",
            [
                "torch_fsdp2=true",
                "ddp.use_distributed_optimizer=false",
                "ddp.overlap_grad_reduce=false",
                "ddp.grad_reduce_in_fp32=true",
            ],
        ),
    ],
)
def test_what_is_close_to_a_fault_is_computed(backend: str, words: list[str]) -> None:
    assert recipe_of(backend, "llama3.1-8b", *words).backend == backend
