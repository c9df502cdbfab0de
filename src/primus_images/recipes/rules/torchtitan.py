"""The rules of torchtitan 0.2.2, and its memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from primus_images.recipes.architecture import size
from primus_images.recipes.choose import CPU
from primus_images.recipes.family import family
from primus_images.recipes.faults import Fault
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import loop as terms
from primus_images.recipes.rules.loop import DTYPES, FACTORS, Memory, Rules
from primus_images.turbo.optimizations import chosen

_DTYPE = "torchtitan.training.dtype"
_CHECKPOINTING = "torchtitan.activation_checkpoint.mode"
_SELECTIVE = "torchtitan.activation_checkpoint.selective_ac_option"
# Precisions of one byte a value.
_EIGHT = ("fp8", "mxfp8")


class Torchtitan(Rules):
    """The rules of torchtitan, which reads a TOML file of its own keys."""

    trains_every_token = True

    def precision(self, recipe: Recipe) -> str:
        """Return the precision of linear layers, which a converter may have replaced.

        Without one, it is that of FSDP or autocast. If all ranks share layers and none is left for
        FSDP, torchtitan computes in ``training.dtype``.
        """
        converters = recipe.section("torchtitan").get("model.converters")
        names = converters if isinstance(converters, list) else []
        if any(str(name).endswith("linear.mx") for name in names):
            kind = recipe.find("torchtitan.quantize.linear.mx.recipe_name", "mxfp8")
            return kind.partition("_")[0]
        if any(str(name).endswith("linear.float8") for name in names):
            return "fp8"
        dtype = recipe.find("torchtitan.training.mixed_precision_param", "bfloat16")
        if recipe.unsharded:
            dtype = recipe.find(_DTYPE, "float32")
        return DTYPES.get(dtype, dtype)

    def compiled(self, recipe: Recipe) -> bool:
        """Return whether the compiled parts include the model."""
        return self._compiles(recipe, "model")

    def _compiles(self, recipe: Recipe, part: str) -> bool:
        if not recipe.find("torchtitan.compile.enable", False):
            return False
        parts = recipe.section("torchtitan").get("compile.components", ["model", "loss"])
        return isinstance(parts, list) and part in parts

    def faults(self, recipe: Recipe) -> Iterable[Fault]:
        """Yield what the recipe asks for and torchtitan does not compute."""
        yield from _layout_faults(recipe)
        yield from _llama4_faults(recipe)
        in_float32 = recipe.find(_DTYPE, "float32") == "float32"
        if recipe.unsharded and recipe.precision in _EIGHT and in_float32:
            why = (
                "where ranks share layers and none shards them, all but the FP8 products would be "
                "in float32"
            )
            yield "precision", why, "leave ranks to data or context parallelism"
        yield from super().faults(recipe)
        key = "training.enable_cpu_offload"
        if recipe.gpu == CPU and recipe.find(f"torchtitan.{key}", False):
            yield f"torchtitan.{key}", "the weights are on the CPU already", f"{key}=false"
        key = "checkpoint.async_mode"
        mode = recipe.find(f"torchtitan.{key}", "")
        if recipe.gpu == CPU and mode == "async_with_pinned_mem":
            yield f"torchtitan.{key}", "only a GPU copies to pinned memory", f"{key}=async"

    def unjudged(self, recipe: Recipe) -> str | None:
        """Return why the reference cannot repeat such a run.

        It reads one rank's weights of one pipeline stage, and scales FP8 by tensor.
        """
        if recipe.degree("pp") > 1:
            return "the run has pipeline stages"
        kind = recipe.find("torchtitan.quantize.linear.float8.recipe_name", "tensorwise")
        if recipe.precision == "fp8" and kind not in ("", "tensorwise"):
            return f"the reference rounds to FP8 by tensors, not {kind}"
        return None

    def blocks_judged(self, recipe: Recipe) -> bool:
        """Whether the reference can repeat what each block computes.

        Without FSDP, one rank uses autocast, which keeps what blocks pass on in float32.
        """
        below_float32 = recipe.world_size == 1 and recipe.precision != "fp32"
        autocast = below_float32 and recipe.find(_DTYPE, "float32") == "float32"
        return super().blocks_judged(recipe) and not autocast

    def memory(self, recipe: Recipe, batch: int) -> Memory:
        """Predict the peak of one rank with local batches of ``batch``."""
        model = recipe.architecture
        tokens = batch * recipe.seq_len / recipe.degree("cp")
        kept = self._kept(recipe)
        # Two runs with experts on one rank agree with the sum of all terms within 2 %; they were
        # not examined further.
        if recipe.world_size == 1 and not model.moe.experts:
            return _alone(recipe, tokens, kept)
        width, compute = _widths(recipe)
        tensor = recipe.degree("tp")
        stages = recipe.degree("pp")
        in_flight = micro_batches = 1
        if stages > 1:
            # A pipeline splits the local batch into micro batches of its own.
            part = recipe.find("torchtitan.parallelism.pipeline_parallel_microbatch_size", 1)
            micro_batches = max(1, batch // part)
            in_flight = min(stages, micro_batches)
            tokens *= min(1.0, part / batch)
        elements = model.layers / stages * kept.saved * in_flight + kept.once
        weights = width * float(size(model).total) * recipe.degree("replicas") / recipe.world_size
        if recipe.find("torchtitan.training.enable_cpu_offload", False):
            weights = 0.0
        loss = tokens * model.vocab_size * kept.per_logit / tensor
        if "linear-cross-entropy" in chosen(recipe):
            loss = terms.fused_loss(model, tokens)
        return Memory(
            weights=weights,
            gradients=weights,
            optimizer=2 * weights,
            unsharded=_gathered(recipe, width, compute),
            activations=elements * tokens * compute / tensor + kept.copies,
            loss=loss,
            standing=recipe.accumulation > 1 or micro_batches > 1,
        )

    def _kept(self, recipe: Recipe) -> "_Kept":
        model = recipe.architecture
        compiled = self._compiles(recipe, "model")
        eight = recipe.precision in _EIGHT
        layer = terms.layer_elements(model, eight=eight)
        if not compiled:
            layer *= FACTORS["eager"]
        if "fp8-linear" in chosen(recipe):
            layer += FACTORS["fp8_inputs"] * model.hidden_size
        mode = recipe.find(_CHECKPOINTING, "none")
        saved = layer
        once = 0.0
        # Layers of which nothing is recomputed keep their weights in FP8.
        whole = 1.0
        if mode == "full":
            saved = float(model.hidden_size)
            once = layer * FACTORS["recomputed"]
            whole = 0.0
        elif mode == "selective":
            saved = _selective(recipe, layer, compiled=compiled)
            whole = 1 - _recomputed_layers(recipe)
        elif mode != "none":
            whole = 0.0
        copies = 0.0
        if eight:
            shared = recipe.degree("tp") * recipe.degree("pp")
            copies = whole * terms.copies_in_eight(model) / shared
        per_logit = FACTORS["eager_loss"]
        if self._compiles(recipe, "loss"):
            per_logit = FACTORS["compiled_loss"]
        return _Kept(saved=saved, once=once, copies=copies, per_logit=per_logit)


def _layout_faults(recipe: Recipe) -> Iterator[Fault]:
    keys = {kind: f"torchtitan.{key}" for kind, key in recipe.knows.degrees.items()}
    replicas = recipe.degree("replicas")
    context = recipe.degree("cp")
    if replicas > 1 and recipe.data_parallel // replicas * context == 1:
        # github.com/pytorch/torchtitan/pull/2323. FSDP does not divide them.
        why = (
            "without FSDP, torchtitan 0.2.2 divides gradients by the number of replicas once too "
            "often"
        )
        yield keys["replicas"], why, "replicas=1, or more ranks than replicas"
    model = family(recipe.architecture.family).backends["torchtitan"].model
    if recipe.degree("pp") > 1 and model == "qwen3":
        yield keys["pp"], "torchtitan 0.2.2 cannot cut Qwen 3 into stages", "pp=1"
    if context > 1 and (recipe.gpu == CPU or recipe.precision == "fp32"):
        where = "in float32"
        if recipe.gpu == CPU:
            where = "on the CPU"
        why = f"PyTorch's attention {where} cannot split sequences over ranks"
        yield keys["cp"], why, "cp=1"


def _llama4_faults(recipe: Recipe) -> Iterator[Fault]:
    model = recipe.architecture
    moe = model.moe
    if not moe.experts or family(model.family).backends["torchtitan"].model != "llama4":
        return
    dense = moe.every - 1
    if moe.dense_layers != dense:
        why = f"the first experts of torchtitan's Llama 4 are in layer {dense}, counted from 0"
        yield "model.moe.dense_layers", why, f"model.moe.dense_layers={dense}"
    width = moe.ffn_size * (moe.top_k + moe.shared_experts)
    if moe.every > 1 and model.ffn_size != width:
        why = f"dense layers of torchtitan's Llama 4 are as wide as a token's experts, {width}"
        yield "model.ffn_size", why, f"model.ffn_size={width}"


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """What is kept for the backward pass.

    ``saved`` are the elements per token of a layer, and ``once`` those of the one that is
    recomputed. ``copies`` are the bytes of weights in FP8, and ``per_logit`` those of a logit.
    """

    saved: float
    once: float
    copies: float
    per_logit: float


def _widths(recipe: Recipe) -> tuple[int, int]:
    """Return the bytes of a weight, and of a value in the computing precision."""
    compute = recipe.find("torchtitan.training.mixed_precision_param", "bfloat16")
    return terms.width_of(recipe.find(_DTYPE, "float32")), terms.width_of(compute)


def _gathered(recipe: Recipe, width: int, compute: int) -> float:
    alone = recipe.world_size == 1
    gathered = terms.unsharded(recipe, compute, alone=alone, cast=width != compute)
    if recipe.find("torchtitan.parallelism.fsdp_reshard_after_forward", "default") != "never":
        return gathered
    kept_width = compute
    key = "torchtitan.quantize.linear.float8.enable_fsdp_float8_all_gather"
    if recipe.precision in _EIGHT and recipe.find(key, False):
        # In FP8, weights are gathered and kept with one byte each.
        kept_width = 1
    shared = recipe.degree("tp") * recipe.degree("pp")
    return gathered + kept_width * float(size(recipe.architecture).total) / shared


def _alone(recipe: Recipe, tokens: float, kept: _Kept) -> Memory:
    # Autocast replaces FSDP: the residual stream is float32, and without recomputation the BF16
    # copies of all weights are kept. Activations use the memory of gradients that do not exist yet.
    # Logits and their gradients are two large blocks, which fit there only as a whole. The
    # allocator's history of such runs shows all this.
    model = recipe.architecture
    total = float(size(model).total)
    width, compute = _widths(recipe)
    recomputed = recipe.find(_CHECKPOINTING, "none") != "none"
    cast = terms.unsharded(recipe, compute, alone=True)
    if width != compute and not recomputed and not kept.copies:
        cast = max(cast, compute * (total - terms.embedding(model)))
    saved = kept.saved
    if recipe.precision in _EIGHT and not recipe.find("torchtitan.compile.enable", False):
        # Each FP8 layer casts and keeps its own input: three times for queries, keys and values,
        # twice for gate and up.
        saved += 3 * model.hidden_size
    residual = (width - compute) * model.hidden_size
    kept_bytes = model.layers * tokens * (saved * compute + residual) + kept.copies
    loss = tokens * model.vocab_size * kept.per_logit
    if kept.per_logit == FACTORS["compiled_loss"]:
        loss *= 2
    # The last layer is recomputed after the logits are freed.
    activations = kept_bytes + max(0.0, kept.once * tokens * compute - loss)
    gradients = width * total
    reused = 0.0
    if recipe.accumulation == 1:
        reused = min(gradients, activations)
        for block in (loss / 2, loss / 2):
            if block <= gradients - reused:
                reused += block
    return Memory(
        weights=gradients,
        gradients=gradients,
        optimizer=2 * gradients,
        unsharded=cast,
        activations=activations,
        loss=loss,
        reused=reused,
        standing=recipe.accumulation > 1,
    )


def _selective(recipe: Recipe, layer: float, *, compiled: bool) -> float:
    # It keeps all of every n-th layer, or every second product.
    model = recipe.architecture
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
