"""The rules of torchtitan 0.2.2, and its memory."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from primus_images.recipes.architecture import Architecture, size
from primus_images.recipes.choose import CPU
from primus_images.recipes.family import family
from primus_images.recipes.faults import Fault
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import loop as terms
from primus_images.recipes.rules.loop import DTYPES, FACTORS, Memory, Rules
from primus_images.turbo.optimizations import chosen

_DTYPE = "torchtitan.training.dtype"
_SELECTIVE = "torchtitan.activation_checkpoint.selective_ac_option"


class Torchtitan(Rules):
    """The rules of torchtitan, which reads a TOML file of its own keys."""

    divides_documents = True

    def precision(self, recipe: Recipe) -> str:
        """Converters replace linear layers, and determine their precision. Without one, it is that
        of FSDP or autocast.

        If all ranks share layers and none is left for FSDP, torchtitan computes in
        ``training.dtype``.
        """
        converters = recipe.section("torchtitan").get("model.converters")
        if isinstance(converters, list):
            names = [str(name) for name in converters]
        else:
            names = []
        if any(name.endswith("linear.mx") for name in names):
            return recipe.find("torchtitan.quantize.linear.mx.recipe_name", "mxfp8").partition("_")[
                0
            ]
        if any(name.endswith("linear.float8") for name in names):
            return "fp8"
        key, default = (
            ("dtype", "float32") if recipe.unsharded else ("mixed_precision_param", "bfloat16")
        )
        dtype = recipe.find(f"torchtitan.training.{key}", default)
        return DTYPES.get(dtype, dtype)

    def compiled(self, recipe: Recipe) -> bool:
        """Return whether the compiled parts include the model."""
        return self._compiles(recipe, "model")

    def _compiles(self, recipe: Recipe, part: str) -> bool:
        parts = recipe.section("torchtitan").get("compile.components", ["model", "loss"])
        return (
            recipe.find("torchtitan.compile.enable", False)
            and isinstance(parts, list)
            and part in parts
        )

    def faults(self, recipe: Recipe) -> Iterable[Fault]:
        """Return layouts in which torchtitan 0.2.2 computes something else, or which its CPU path
        lacks.
        """
        keys = {kind: f"torchtitan.{key}" for kind, key in recipe.knows.degrees.items()}
        shards = recipe.world_size // math.prod(
            recipe.degree(kind) for kind in ("tp", "pp", "cp", "replicas")
        )
        if recipe.degree("replicas") > 1 and shards * recipe.degree("cp") == 1:
            # github.com/pytorch/torchtitan/pull/2323. FSDP does not divide them.
            why = (
                "without FSDP, torchtitan 0.2.2 divides gradients by the number of replicas "
                "once too often"
            )
            yield keys["replicas"], why, "replicas=1, or more ranks than replicas"
        if (
            recipe.degree("pp") > 1
            and family(recipe.architecture.family).backends["torchtitan"].model == "qwen3"
        ):
            yield keys["pp"], "torchtitan 0.2.2 cannot cut Qwen 3 into stages", "pp=1"
        if recipe.degree("cp") > 1 and (recipe.gpu == CPU or recipe.precision == "fp32"):
            where = "in float32"
            if recipe.gpu == CPU:
                where = "on the CPU"
            yield (
                keys["cp"],
                f"PyTorch's attention {where} cannot split sequences over ranks",
                "cp=1",
            )
        if (
            recipe.unsharded
            and recipe.precision in ("fp8", "mxfp8")
            and recipe.find(_DTYPE, "float32") == "float32"
        ):
            why = (
                "where ranks share layers and none shards them, all but the FP8 products "
                "would be in float32"
            )
            yield "precision", why, "leave ranks to data or context parallelism"
        yield from super().faults(recipe)
        if recipe.find("torchtitan.training.enable_cpu_offload", False) and recipe.gpu == CPU:
            key = "training.enable_cpu_offload"
            yield f"torchtitan.{key}", "the weights are on the CPU already", f"{key}=false"

    def unjudged(self, recipe: Recipe) -> str | None:
        """Return the reason. The reference reads one rank's weights of one pipeline stage, and
        scales FP8 by tensor.
        """
        if recipe.degree("pp") > 1:
            return "the run has pipeline stages"
        kind = recipe.find("torchtitan.quantize.linear.float8.recipe_name", "tensorwise")
        if recipe.precision == "fp8" and kind not in ("", "tensorwise"):
            return f"the reference rounds to FP8 by tensors, not {kind}"
        return None

    def blocks_judged(self, recipe: Recipe) -> bool:
        """Whether it can. Without FSDP, one rank uses autocast, which keeps what blocks pass on in
        float32.
        """
        autocast = (
            recipe.world_size == 1
            and recipe.precision != "fp32"
            and recipe.find(_DTYPE, "float32") == "float32"
        )
        return super().blocks_judged(recipe) and not autocast

    def layout(self, recipe: Recipe) -> Mapping[str, Any]:
        """Return the number of data-parallel ranks, because each has its own place in the data."""
        return {"data_parallel": recipe.data_parallel}

    def memory(self, recipe: Recipe, batch: int) -> Memory:
        """Predict the peak of one rank with local batches of ``batch``."""
        model = recipe.architecture
        tokens = batch * recipe.seq_len / recipe.degree("cp")
        total = float(size(model).total)
        width = terms.width_of(recipe.find("torchtitan.training.dtype", "float32"))
        compute = terms.width_of(
            recipe.find("torchtitan.training.mixed_precision_param", "bfloat16")
        )
        tensor = recipe.degree("tp")
        stages = recipe.degree("pp")
        replicas = recipe.degree("replicas")
        shard = total * replicas / recipe.world_size
        compiled, fused = (self._compiles(recipe, part) for part in ("model", "loss"))
        mode = recipe.find("torchtitan.activation_checkpoint.mode", "none")
        offloaded = recipe.find("torchtitan.training.enable_cpu_offload", False)
        eight = recipe.precision in ("fp8", "mxfp8")
        layer = terms.layer_elements(model, eight=eight) * (1 if compiled else FACTORS["eager"])
        if "fp8-linear" in chosen(recipe):
            layer += FACTORS["fp8_inputs"] * model.hidden_size
        if mode == "full":
            saved = float(model.hidden_size)
            once = layer * FACTORS["recomputed"]
        elif mode == "selective":
            saved = _selective(recipe, model, layer, compiled=compiled)
            once = 0.0
        else:
            saved = layer
            once = 0.0
        # Layers of which nothing is recomputed keep their weights in FP8.
        whole = {"none": 1.0, "selective": 1 - _recomputed_layers(recipe)}.get(mode, 0.0)
        copies = 0.0
        if eight:
            copies = whole * terms.copies_in_eight(model) / tensor / stages
        # Two runs with experts on one rank agree with the sum of all terms within 2 %; they were
        # not examined further.
        if recipe.world_size == 1 and not model.moe.experts:
            return _alone(
                recipe, tokens, saved=saved, once=once, copies=copies, compiled_loss=fused
            )
        if stages > 1:
            # A pipeline splits the local batch into micro batches of its own.
            part = recipe.find("torchtitan.parallelism.pipeline_parallel_microbatch_size", 1)
            in_flight = min(stages, max(1, batch // part))
            tokens *= min(1.0, part / batch)
        else:
            in_flight = 1
        activations = (
            model.layers / stages * saved * in_flight + once
        ) * tokens * compute / tensor + copies
        # In FP8, weights are gathered and kept with one byte each.
        narrow = eight and recipe.find(
            "torchtitan.quantize.linear.float8.enable_fsdp_float8_all_gather", False
        )
        alone = recipe.world_size == 1
        gathered = terms.unsharded(recipe, compute, alone=alone, cast=width != compute)
        if recipe.find("torchtitan.parallelism.fsdp_reshard_after_forward", "default") == "never":
            gathered += (1 if narrow else compute) * total / tensor / stages
        return Memory(
            weights=0 if offloaded else width * shard,
            gradients=0 if offloaded else width * shard,
            optimizer=0 if offloaded else 2 * width * shard,
            unsharded=gathered,
            activations=activations,
            loss=terms.fused_loss(model, tokens)
            if "linear-cross-entropy" in chosen(recipe)
            else tokens
            * model.vocab_size
            * (FACTORS["compiled_loss"] if fused else FACTORS["eager_loss"])
            / tensor,
        )


def _alone(
    recipe: Recipe, tokens: float, *, saved: float, once: float, copies: float, compiled_loss: bool
) -> Memory:
    # Autocast replaces FSDP: the residual stream is float32, and without recomputation the BF16
    # copies of all weights are kept. Activations use the memory of gradients that do not exist yet.
    # Logits and their gradients are two large blocks, which fit there only as a whole. The
    # allocator's history of such runs shows all this.
    model = recipe.architecture
    total = float(size(recipe.architecture).total)
    width = terms.width_of(recipe.find("torchtitan.training.dtype", "float32"))
    compute = terms.width_of(recipe.find("torchtitan.training.mixed_precision_param", "bfloat16"))
    cast = terms.unsharded(recipe, compute, alone=True)
    if (
        recipe.find("torchtitan.activation_checkpoint.mode", "none") == "none"
        and not copies
        and width != compute
    ):
        cast = max(cast, compute * (total - model.vocab_size * model.hidden_size))
    if recipe.precision in ("fp8", "mxfp8") and not recipe.find("torchtitan.compile.enable", False):
        # Each FP8 layer casts and keeps its own input: three times for queries, keys and values,
        # twice for gate and up.
        saved += 3 * model.hidden_size
    kept_bytes = (
        model.layers * tokens * (saved * compute + (width - compute) * model.hidden_size) + copies
    )
    if compiled_loss:
        per_logit = 2 * FACTORS["compiled_loss"]
    else:
        per_logit = FACTORS["eager_loss"]
    loss = tokens * model.vocab_size * per_logit
    # The last layer is recomputed after the logits are freed.
    activations = kept_bytes + max(0.0, once * tokens * compute - loss)
    gradients = width * total
    reused = 0.0
    if recipe.accumulation == 1:
        reused = min(gradients, activations)
        for block in (loss / 2, loss / 2):
            reused += block if block <= gradients - reused else 0.0
    states = {"weights": width * total, "gradients": gradients, "optimizer": 2 * width * total}
    return Memory(**states, unsharded=cast, activations=activations, loss=loss, reused=reused)


def _selective(recipe: Recipe, model: Architecture, layer: float, *, compiled: bool) -> float:
    # It keeps all of every n-th layer, or every second product.
    if recipe.find(_SELECTIVE, "2") != "op":
        return layer - (layer - model.hidden_size) * _recomputed_layers(recipe)
    queries = model.heads * model.head_size
    values = model.kv_heads * model.head_size
    # The layer's input, the products wq, wv, w1 and (unless a compiler drops it) w2, and the output
    # of attention. Experts' grouped products are recomputed.
    saved = 2.0 * model.hidden_size + queries + values + terms.ffn_width(model, routed=False)
    if compiled:
        return saved * 1.05
    return saved + model.hidden_size


def _recomputed_layers(recipe: Recipe) -> float:
    # The share of layers of which something is recomputed by selective checkpointing.
    option = recipe.find(_SELECTIVE, "2")
    if option.isdecimal() and int(option):
        return 1 / int(option)
    return 1.0
