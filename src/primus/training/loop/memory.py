"""Memory of one rank with our own loop on FSDP2."""

from __future__ import annotations

from primus.recipes.memory import (
    EAGER,
    EAGER_LOSS,
    FLOAT32,
    RECOMPUTED,
    Memory,
    chunked_loss,
    copies_in_eight,
    fused_loss,
    layer_elements,
    unsharded,
    width_of,
)
from primus.recipes.recipe import Recipe
from primus.recipes.size import size

# Elements per token and hidden unit that one layer of FLUX keeps for its backward pass (fitted).
_FLUX_LAYER = 20


def predict(recipe: Recipe, batch: int) -> Memory:
    """Predict the peak of one rank with micro-batches of ``batch``. FSDP2 gathers one block at a time."""
    head, model = recipe.backend, recipe.architecture
    tokens, total = batch * recipe.seq_len, float(size(model).total)
    width = width_of(recipe.find(f"{head}.training.master_dtype", "float32"))
    compute = width_of(recipe.find(f"{head}.training.dtype", "bfloat16"))
    compiled = recipe.find(f"{head}.training.compile", False)
    recomputed = recipe.find(f"{head}.training.recompute", "none") == "full"
    shard = total * recipe.degree("replicas") / recipe.world_size
    trained = 0.0 if recipe.mode == "lora" else 1.0
    if model.family == "flux":
        layers, layer = model.dit.double_layers + model.dit.single_layers, float(_FLUX_LAYER * model.hidden_size)
    else:
        layers = model.layers
        eight = recipe.precision == "fp8"
        layer = layer_elements(model, eight=eight) * (1 if compiled else EAGER)
    kept = layers * model.hidden_size + layer * RECOMPUTED if recomputed else layers * layer
    copies = copies_in_eight(model) if recipe.precision == "fp8" and not recomputed else 0.0
    chunk = min(tokens, recipe.find(f"{head}.loss_chunk", 2048))
    # One rank gathers nothing, and reads the rows of a frozen embedding in place.
    ends = 2 if trained or recipe.world_size > 1 else 1
    stay = not recipe.find(f"{head}.sharding.reshard_after_forward", True)
    gathered = unsharded(
        model,
        compute,
        1,
        alone=not trained,
        ends=ends,
        world=recipe.world_size // recipe.degree("replicas"),
        cast=width != compute,
    )
    activations = kept * tokens * compute + copies
    reused = 0.0
    if stay and recipe.world_size == 1 and not trained:
        # All weights but the embedding, including the output layer and the blocks, stay in the computing precision.
        gathered = compute * (total - model.vocab_size * model.hidden_size)
    elif stay:
        gathered += compute * total
    if recipe.world_size == 1 and trained and recipe.accumulation == 1:
        # The gradient of the embedding is computed last, in the memory of activations, in both precisions.
        reused = min(activations, model.vocab_size * model.hidden_size * float(compute + FLOAT32))
    return Memory(
        weights=width * shard,
        gradients=trained * width * shard,
        optimizer=trained * 2 * width * shard,
        unsharded=gathered,
        activations=activations,
        reused=reused,
        loss=fused_loss(model, tokens) if chunked_loss(recipe) else chunk * model.vocab_size * EAGER_LOSS,
    )


def least(recipe: Recipe, *, offload: bool) -> float:  # noqa: ARG001
    """Return the bytes of weights, gradients and optimizer states. With LoRA, only the frozen weights count."""
    width = width_of(recipe.find(f"{recipe.backend}.training.master_dtype", "float32"))
    values = 1 if recipe.mode == "lora" else 4
    return size(recipe.architecture).total * width * values * recipe.degree("replicas") / recipe.world_size
