"""Memory of one rank of Megatron."""

from __future__ import annotations

from primus.recipes.memory import BFLOAT16, FLOAT32, RECOMPUTED, Memory, layer_elements, unsharded, width_of
from primus.recipes.recipe import Recipe
from primus.recipes.size import size

# Megatron has fused kernels for some norms, RoPE and SiLU, so eager layers keep less than in other backends (fitted).
_EAGER = 1.08
# Bytes per logit: in BF16 and float32, with the gradient in float32.
_LOSS = 10


def predict(recipe: Recipe, batch: int) -> Memory:
    """Predict the peak of one rank with micro-batches of ``batch``.

    Every data-parallel rank has all weights and gradients. The optimizer's float32 copies are sharded.
    """
    model = recipe.architecture
    tokens, total = batch * recipe.seq_len / recipe.degree("cp"), float(size(model).total)
    width = width_of(recipe.find("megatron.training.dtype", "bfloat16"))
    reduced = FLOAT32 if recipe.find("megatron.ddp.grad_reduce_in_fp32", True) else width
    tensor, stages = recipe.degree("tp"), recipe.degree("pp")
    parts = tensor * stages * recipe.degree("ep")
    states = 2 * FLOAT32 + (FLOAT32 if width == BFLOAT16 else 0)
    sharded = recipe.find("megatron.ddp.use_distributed_optimizer", True)
    fully = recipe.find("megatron.torch_fsdp2", False)
    layers = model.layers / stages
    again, group = _recomputed(recipe, layers)
    layer = layer_elements(model, eight=False) * _EAGER
    kept = (layers - again) * layer + again / group * model.hidden_size + (group * layer * RECOMPUTED if again else 0)
    in_flight = min(stages, max(1, recipe.accumulation))
    return Memory(
        weights=width * total / (recipe.world_size if fully else parts),
        gradients=reduced * total / (recipe.world_size if fully else parts),
        optimizer=states * total / (recipe.world_size if sharded or fully else parts),
        unsharded=unsharded(model, width, tensor, world=recipe.world_size) if fully else 0,
        activations=kept * in_flight * tokens * width / tensor,
        loss=tokens * model.vocab_size * _LOSS / tensor,
    )


def _recomputed(recipe: Recipe, layers: float) -> tuple[float, int]:
    """Return how many of a stage's layers are recomputed in full, and how many at a time."""
    if recipe.find("megatron.training.recompute", "none") == "full":
        return layers, 1
    if recipe.find("megatron.model.recompute_granularity", "none") != "full":
        return 0.0, 1
    named = recipe.find("megatron.model.recompute_num_layers", 0)
    # "block" recomputes that many layers one by one; "uniform" recomputes all layers in groups of that many.
    block = recipe.find("megatron.model.recompute_method", "") == "block"
    return (min(layers, named), 1) if block else (layers, max(1, named))


def least(recipe: Recipe, *, offload: bool) -> float:  # noqa: ARG001
    """Return the bytes of weights, gradients and optimizer states. Only FSDP2 shards weights and gradients."""
    total = size(recipe.architecture).total
    width = width_of(recipe.find("megatron.training.dtype", "bfloat16"))
    if any(value for key, value in recipe.section("megatron.optimizer").items() if "offload" in key or "aware" in key):
        states = 0
    else:
        states = 2 * FLOAT32 + (FLOAT32 if width == BFLOAT16 else 0)
    parts = recipe.degree("tp") * recipe.degree("pp") * recipe.degree("ep")
    if recipe.find("megatron.torch_fsdp2", False):
        return total * (2 * width + states) / recipe.world_size
    sharded = recipe.find("megatron.ddp.use_distributed_optimizer", True)
    return total * (2 * width / parts + states / (recipe.world_size if sharded else parts))
