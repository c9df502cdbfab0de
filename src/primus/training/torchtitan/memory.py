"""Memory of one rank of torchtitan."""

from __future__ import annotations

from primus.recipes.architecture import Architecture
from primus.recipes.memory import (
    EAGER,
    EAGER_LOSS,
    RECOMPUTED,
    Memory,
    chunked_loss,
    copies_in_eight,
    ffn_width,
    fused_loss,
    gathered_experts,
    layer_elements,
    unsharded,
    width_of,
)
from primus.recipes.recipe import Recipe
from primus.recipes.size import size

# Bytes per logit if the loss is compiled: only the logits in BF16. Their gradients have the same size and use the
# memory of gradients of weights, which are counted but do not exist yet.
_COMPILED_LOSS = 2


def predict(recipe: Recipe, batch: int) -> Memory:
    """Predict the peak of one rank with local batches of ``batch``."""
    model = recipe.architecture
    tokens, total = batch * recipe.seq_len / recipe.degree("cp"), float(size(model).total)
    width = width_of(recipe.find("torchtitan.training.dtype", "float32"))
    compute = width_of(recipe.find("torchtitan.training.mixed_precision_param", "bfloat16"))
    tensor, stages, replicas = recipe.degree("tp"), recipe.degree("pp"), recipe.degree("replicas")
    shard = total * replicas / recipe.world_size
    components = recipe.section("torchtitan.compile").get("components", ["model", "loss"])
    enabled = recipe.find("torchtitan.compile.enable", False) and isinstance(components, list)
    compiled, fused = (enabled and isinstance(components, list) and part in components for part in ("model", "loss"))
    mode = recipe.find("torchtitan.activation_checkpoint.mode", "none")
    offloaded = recipe.find("torchtitan.training.enable_cpu_offload", False)
    early = recipe.find("torchtitan.optimizer.early_step_in_backward", False)
    eight = recipe.precision in ("fp8", "mxfp8")
    layer = layer_elements(model, eight=eight) * (1 if compiled else EAGER)
    if mode == "full":
        saved, once = float(model.hidden_size), layer * RECOMPUTED
    elif mode == "selective":
        saved, once = _selective(recipe, model, layer, compiled=compiled), 0.0
    else:
        saved, once = layer, 0.0
    copies = copies_in_eight(model) / tensor / stages if eight and mode == "none" else 0.0
    # Two runs with experts on one rank agree with the sum of all terms within 2 %; they were not examined further.
    if recipe.world_size == 1 and not model.moe.experts:
        return _alone(recipe, tokens, saved=saved, once=once, copies=copies, compiled_loss=fused)
    if stages > 1:
        # A pipeline splits the local batch into micro batches of its own.
        part = recipe.find("torchtitan.parallelism.pipeline_parallel_microbatch_size", 1)
        in_flight = min(stages, max(1, batch // part))
        tokens *= min(1.0, part / batch)
    else:
        in_flight = 1
    activations = (model.layers / stages * saved * in_flight + once) * tokens * compute / tensor + copies
    # In FP8, weights are gathered and kept with one byte each.
    narrow = eight and recipe.find("torchtitan.quantize.linear.float8.enable_fsdp_float8_all_gather", False)
    gathered = 1 if narrow else compute
    never = recipe.find("torchtitan.parallelism.fsdp_reshard_after_forward", "default") == "never"
    return Memory(
        weights=0 if offloaded else width * shard,
        gradients=0 if offloaded or early else width * shard,
        optimizer=0 if offloaded else 2 * width * shard,
        unsharded=unsharded(
            model,
            compute,
            tensor,
            alone=recipe.world_size == 1,
            world=recipe.world_size // recipe.degree("replicas"),
            cast=width != compute,
            experts=gathered_experts(recipe, model),
        )
        + (gathered * total / tensor / stages if never else 0),
        activations=activations,
        loss=fused_loss(model, tokens)
        if chunked_loss(recipe)
        else tokens * model.vocab_size * (_COMPILED_LOSS if fused else EAGER_LOSS) / tensor,
    )


def _alone(recipe: Recipe, tokens: float, *, saved: float, once: float, copies: float, compiled_loss: bool) -> Memory:
    """Predict one rank alone, for which torchtitan uses autocast instead of FSDP.

    The residual stream is float32, and without recomputation the BF16 copies of all weights are kept for the
    backward pass. There are no collectives, so activations use the memory of gradients that do not exist yet.
    Logits and their gradients are two large blocks, which fit there only as a whole. The allocator's history of
    such runs shows all this.
    """
    model, accumulates = recipe.architecture, recipe.accumulation > 1
    total = float(size(model).total)
    width = width_of(recipe.find("torchtitan.training.dtype", "float32"))
    compute = width_of(recipe.find("torchtitan.training.mixed_precision_param", "bfloat16"))
    cast = unsharded(model, compute, 1, alone=True)
    if recipe.find("torchtitan.activation_checkpoint.mode", "none") == "none" and not copies and width != compute:
        cast = max(cast, compute * (total - model.vocab_size * model.hidden_size))
    if recipe.precision in ("fp8", "mxfp8") and not recipe.find("torchtitan.compile.enable", False):
        # Each FP8 layer casts and keeps its own input: three times for queries, keys and values, twice for gate and up.
        saved += 3 * model.hidden_size
    kept_bytes = model.layers * tokens * (saved * compute + (width - compute) * model.hidden_size) + copies
    per_logit = 2 * _COMPILED_LOSS if compiled_loss else EAGER_LOSS
    loss = tokens * model.vocab_size * per_logit
    # The last layer is recomputed after the logits are freed.
    activations = kept_bytes + max(0.0, once * tokens * compute - loss)
    gradients = 0.0 if recipe.find("torchtitan.optimizer.early_step_in_backward", False) else width * total
    reused = 0.0
    if not accumulates:
        reused = min(gradients, activations)
        for block in (loss / 2, loss / 2):
            reused += block if block <= gradients - reused else 0.0
    states = {"weights": width * total, "gradients": gradients, "optimizer": 2 * width * total}
    return Memory(**states, unsharded=cast, activations=activations, loss=loss, reused=reused)


def _selective(recipe: Recipe, model: Architecture, layer: float, *, compiled: bool) -> float:
    """Return what a layer keeps with selective checkpointing: all of every n-th layer, or every second product."""
    option = recipe.find("torchtitan.activation_checkpoint.selective_ac_option", "2")
    if option != "op":
        every = int(option) if option.isdecimal() and int(option) else 1
        return layer - (layer - model.hidden_size) / every
    queries, values = model.heads * model.head_size, model.kv_heads * model.head_size
    # The layer's input, the products wq, wv, w1 and (unless a compiler drops it) w2, and the output of attention.
    # Experts' grouped products are recomputed.
    saved = 2.0 * model.hidden_size + queries + values + ffn_width(model, routed=False)
    return saved * 1.05 if compiled else saved + model.hidden_size


def least(recipe: Recipe, *, offload: bool) -> float:
    """Return the bytes of weights, gradients and optimizer states; 0 if ``offload`` and all are on the host."""
    if offload and recipe.find("torchtitan.training.enable_cpu_offload", False):
        return 0.0
    width = width_of(recipe.find("torchtitan.training.dtype", "float32"))
    gradients = 0 if recipe.find("torchtitan.optimizer.early_step_in_backward", False) else 1
    return size(recipe.architecture).total * width * (3 + gradients) * recipe.degree("replicas") / recipe.world_size
