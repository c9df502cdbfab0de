"""Predicted memory of many settings, to the byte: a changed formula is seen, and reviewed."""

from pathlib import Path

import pytest

from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.rules import predict, rules_of
from primus_images.recipes.setting import Choices

GOLDEN = Path(__file__).parents[2] / "golden/memory.txt"
# Backend, precision, nodes, recipe and settings. Each names what the others do not.
ROWS = """\
torchtitan bf16 1 llama3.1-8b
torchtitan bf16 1 llama3.1-8b activation_checkpoint.mode=none turbo=off
torchtitan bf16 1 llama3.1-8b activation_checkpoint.mode=full compile.enable=false turbo=off
torchtitan bf16 1 llama3.1-8b activation_checkpoint.mode=selective turbo=off
torchtitan bf16 1 llama3.1-8b activation_checkpoint.mode=selective \
activation_checkpoint.selective_ac_option=op
torchtitan bf16 1 llama3.1-8b activation_checkpoint.mode=selective \
activation_checkpoint.selective_ac_option=op compile.enable=false turbo=off
torchtitan bf16 1 llama3.1-8b activation_checkpoint.mode=selective \
activation_checkpoint.selective_ac_option=4 tp=2
torchtitan bf16 1 llama3.1-8b pp=2 training.local_batch_size=4
torchtitan bf16 1 llama3.1-8b tp=4 compile.components=[loss] turbo=off
torchtitan bf16 1 llama3.1-8b cp=2 training.enable_cpu_offload=true turbo=off
torchtitan bf16 1 llama3.1-8b replicas=2 parallelism.fsdp_reshard_after_forward=never
torchtitan bf16 1 llama3.1-8b ranks=1 training.local_batch_size=1
torchtitan bf16 1 llama3.1-8b ranks=1 training.local_batch_size=1 \
activation_checkpoint.mode=full turbo=off
torchtitan bf16 1 llama3.1-8b ranks=1 training.local_batch_size=1 training.global_batch_size=4
torchtitan fp8 1 llama3.1-8b ranks=1 training.local_batch_size=1 compile.enable=false turbo=off
torchtitan fp8 1 llama3.1-8b
torchtitan fp8 1 llama3.1-8b turbo=off activation_checkpoint.mode=selective
torchtitan fp8 1 llama3.1-8b parallelism.fsdp_reshard_after_forward=never tp=2 turbo=off \
quantize.linear.float8.enable_fsdp_float8_all_gather=true
torchtitan bf16 1 llama3.1-8b training.dtype=bfloat16
torchtitan bf16 1 deepseek-16b
torchtitan bf16 2 llama3.1-70b
torchtitan bf16 1 qwen3-30b-a3b
megatron bf16 1 llama3.1-8b
megatron bf16 1 llama3.1-8b tp=2
megatron bf16 1 llama3.1-8b pp=2
megatron bf16 1 llama3.1-8b pp=2 model.virtual_pipeline_model_parallel_size=2
megatron bf16 1 llama3.1-8b ddp.use_distributed_optimizer=false
megatron bf16 1 llama3.1-8b model.recompute_granularity=full model.recompute_method=uniform \
model.recompute_num_layers=1
megatron bf16 1 llama3.1-8b model.recompute_granularity=full model.recompute_method=block \
model.recompute_num_layers=8
megatron bf16 1 llama3.1-8b model.recompute_granularity=full model.recompute_method=uniform \
model.recompute_num_layers=4
megatron bf16 1 llama3.1-8b training.recompute=full
megatron bf16 1 llama3.1-8b optimizer.use_precision_aware_optimizer=true \
optimizer.exp_avg_dtype=bf16
megatron bf16 1 llama3.1-8b optimizer.optimizer_cpu_offload=true \
optimizer.optimizer_offload_fraction=0.25
megatron bf16 1 llama3.1-8b ddp.grad_reduce_in_fp32=false
megatron bf16 1 llama3.1-8b ddp.num_distributed_optimizer_instances=2
megatron bf16 1 llama3.1-8b model.cross_entropy_loss_fusion=true
megatron bf16 1 llama3.1-8b model.cross_entropy_loss_fusion=true \
model.cross_entropy_fusion_impl=te
megatron bf16 1 llama3.1-8b torch_fsdp2=true \
ddp.use_distributed_optimizer=false ddp.overlap_grad_reduce=false
megatron fp8 1 llama3.1-8b
megatron fp8 1 llama3.1-8b model.disable_parameter_transpose_cache=true
megatron fp8 1 llama3.1-8b model.disable_parameter_transpose_cache=true \
model.recompute_granularity=full model.recompute_method=block model.recompute_num_layers=8
megatron bf16 1 mixtral-8x7b ep=8
megatron bf16 1 mixtral-8x7b ep=4 tp=2
megatron bf16 1 deepseek-v2-lite
megatron fp8 1 mixtral-8x7b ep=8
finetune bf16 1 llama3.1-8b
finetune bf16 1 llama2-70b
fsdp bf16 1 llama3.1-8b
flux bf16 1 flux.1-dev
""".splitlines()


def recipe_of(row: str) -> Recipe:
    backend, precision, nodes, name, *words = row.split()
    choices = Choices(backend=backend, precision=precision, nodes=int(nodes), gpu="mi355x")
    return resolve(name, words, choices)


def line_of(row: str) -> str:
    recipe = recipe_of(row)
    memory = predict(recipe)
    terms = [f"{name} {round(size):,}" for name, size in memory.terms.items() if size]
    if memory.standing:
        terms.append("standing")
    layout = rules_of(recipe).layout(recipe)
    return f"{row}\n  {', '.join(terms)}\n  layout {dict(layout)}\n"


def test_every_term_of_predicted_memory_is_as_it_was_reviewed(
    request: pytest.FixtureRequest,
) -> None:
    text = "".join(map(line_of, ROWS))
    if request.config.getoption("--regenerate-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "run pytest --regenerate-golden if the formula is meant"
