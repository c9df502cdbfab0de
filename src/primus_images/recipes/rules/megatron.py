"""The rules of Megatron (megatron-core 0.16.1), and its memory."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from primus_images.gpus.table import arch_of, generation
from primus_images.recipes.architecture import Architecture
from primus_images.recipes.choose import CPU
from primus_images.recipes.faults import Fault
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import loop as terms
from primus_images.recipes.rules.loop import BFLOAT16, FACTORS, FLOAT32, Memory, Rules
from primus_images.recipes.rules.stages import (
    Share,
    Stage,
    chunks_of_a_stage,
    products,
    replicas,
    share,
    stage_faults,
    stages,
)

_FSDP2 = "megatron.torch_fsdp2"
_EIGHT = ("fp8", "mxfp8")
# The bytes of a value that the optimizer keeps, by the names that Megatron gives its types.
_BYTES: Mapping[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


class Megatron(Rules):
    """The rules of Megatron. A checkpoint fits no other layout than its own."""

    unverified = (
        "Megatron adds gradients in buffers of its own, where those of one rank cannot be compared"
    )

    def precision(self, recipe: Recipe) -> str:
        """Return the precision: ``model.fp8`` enables Transformer Engine's FP8.

        ``model.fp8_recipe`` is its MX form.
        """
        if not recipe.section("megatron").get("model.fp8"):
            return super().precision(recipe)
        if recipe.find("megatron.model.fp8_recipe", "") == "mxfp8":
            return "mxfp8"
        return "fp8"

    def unjudged(self, recipe: Recipe) -> str | None:
        """Return why the reference, which has two balancing losses, cannot repeat such a run."""
        kind = recipe.section("megatron").get("model.moe_router_load_balancing_type", "none")
        if kind not in ("aux_loss", "seq_aux_loss", "none"):
            return f"the reference does not balance experts by {kind}"
        return None

    def layout(self, recipe: Recipe) -> Mapping[str, Any]:
        """Return the whole layout: a checkpoint has each rank's tensors as in memory."""
        layout: dict[str, Any] = {}
        for kind in ("tp", "pp", "ep"):
            layout[f"layout.{kind}"] = recipe.degree(kind)
        stages_key = "megatron.model.virtual_pipeline_model_parallel_size"
        layout["layout.virtual_pp"] = recipe.find(stages_key, 1)
        if recipe.find("megatron.ddp.use_distributed_optimizer", True):
            layout["layout.ranks"] = recipe.world_size
        layout["layout.dtype"] = recipe.find("megatron.training.dtype", "bfloat16")
        return layout

    def faults(self, recipe: Recipe) -> Iterable[Fault]:
        """Yield what the recipe asks for and Megatron does not compute."""
        model = recipe.architecture
        if model.moe.score == "sigmoid" and not model.moe.normalize_top_k:
            why = "Megatron always normalizes the chosen sigmoid scores"
            yield "model.moe.score", why, "model.moe.normalize_top_k=true"
        if recipe.degree("cp") > 1:
            why = "Megatron splits sequences in Transformer Engine alone"
            yield _degree_key(recipe, "cp"), why, "use TP"
        yield from super().faults(recipe)
        yield from stage_faults(recipe)
        # A file's number may be of the whole model, of which the command line takes fewer layers.
        key = "megatron.model.recompute_num_layers"
        recomputed = recipe.settings.get(key)
        if recomputed and recomputed.typed and int(str(recomputed.value)) > model.layers:
            why = f"{recomputed.value} is more than the model's {model.layers} layers"
            yield key, why, f"model.recompute_num_layers={model.layers} at most"
        if recipe.find(_FSDP2, False):
            yield from _fsdp2_faults(recipe)
        if recipe.degree("tp") > 1:
            yield from _tensor_faults(recipe)

    def memory(self, recipe: Recipe, batch: int) -> Memory:
        """Predict the peak of one rank: of the pipeline stage that needs most."""
        rows = [stage_memory(recipe, stage, batch) for stage in stages(recipe)]
        return max(rows, key=lambda row: row.peak)


def stage_memory(recipe: Recipe, stage: Stage, batch: int) -> Memory:
    """Predict the peak of one rank of ``stage``, with micro-batches of ``batch``."""
    model = recipe.architecture
    tokens = batch * recipe.seq_len / recipe.degree("cp")
    width = terms.width_of(recipe.find("megatron.training.dtype", "bfloat16"))
    tensor = recipe.degree("tp")
    here = share(recipe, stage)
    # Megatron's own buffers of gradients exist from the start of a run to its end.
    has_buffers = not recipe.find(_FSDP2, False)
    if has_buffers:
        weights = width * here.total
        gradients = _reduced(recipe, width) * here.total
        optimized = _optimized(recipe, here)
        gathered = 0.0
    else:
        # Gradients are reduced in float32, and kept in the precision of the weights.
        optimized = here.total / recipe.world_size
        weights = gradients = width * optimized
        gathered = terms.unsharded(recipe, width)
    loss = 0.0
    if stage.is_last:
        loss = tokens * model.vocab_size * _per_logit(recipe) / tensor
    saved = _saved(recipe, stage)
    copies = 0.0
    if recipe.precision in _EIGHT:
        # Transformer Engine keeps weights in FP8, as they are and transposed.
        copies = 2 * products(recipe, stage) * _share_in_eight(recipe, stage)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=_states(recipe, width) * optimized,
        unsharded=gathered,
        activations=saved * tokens * width / tensor + copies,
        loss=loss,
        standing=has_buffers or recipe.accumulation > 1,
    )


def _share_in_eight(recipe: Recipe, stage: Stage) -> float:
    """Return for how many of a stage's layers weights are kept in FP8, as a share of them."""
    if not recipe.find("megatron.model.disable_parameter_transpose_cache", False):
        return 1.0
    # Each pass converts them again, and keeps them until it is computed backward.
    layers = len(stage.layers)
    recomputed, group = _recomputed(recipe, layers)
    kept = (layers - recomputed) * stage.in_flight
    if recomputed:
        kept += group
    return kept / max(1, layers)


def _reduced(recipe: Recipe, width: int) -> int:
    """Return the bytes of a gradient in Megatron's buffers."""
    if recipe.find("megatron.ddp.grad_reduce_in_fp32", True):
        return FLOAT32
    return width


def _optimized(recipe: Recipe, here: Share) -> float:
    """Return the parameters of which this rank keeps the optimizer's states."""
    if not recipe.find("megatron.ddp.use_distributed_optimizer", True):
        return here.total
    parts = replicas(recipe)
    instances = recipe.find("megatron.ddp.num_distributed_optimizer_instances", 1)
    return instances * (here.dense / parts.dense + here.experts / parts.experts)


def _per_logit(recipe: Recipe) -> float:
    if not recipe.find("megatron.model.cross_entropy_loss_fusion", False):
        return FACTORS["megatron_plain_loss"]
    if recipe.find("megatron.model.cross_entropy_fusion_impl", "native") == "te":
        return FACTORS["megatron_te_loss"]
    return FACTORS["megatron_loss"]


def _degree_key(recipe: Recipe, kind: str) -> str:
    return f"megatron.{recipe.knows.degrees[kind]}"


def _fsdp2_faults(recipe: Recipe) -> Iterator[Fault]:
    for kind in ("tp", "pp", "cp", "ep"):
        if recipe.degree(kind) > 1:
            why = "torch_fsdp2 shares out the whole model over all ranks"
            yield _degree_key(recipe, kind), why, f"{kind}=1"
    for key, value in recipe.section("megatron.ddp").items():
        if value and key != "grad_reduce_in_fp32":
            why = "is about Megatron's own buffers, and torch_fsdp2 has none"
            yield f"megatron.ddp.{key}", why, f"ddp.{key}=false"


def _tensor_faults(recipe: Recipe) -> Iterator[Fault]:
    if recipe.architecture.mla.kv_lora_rank and not recipe.knows.latent_tp:
        # megatron-core 0.16.1 without Transformer Engine, as the reference found: gradients are
        # off by 1 to 3 %.
        why = (
            "latent attention shared by Megatron's ranks gets wrong gradients of kv_a_proj_with_mqa"
        )
        yield _degree_key(recipe, "tp"), why, "tp=1"
    if recipe.gpu == CPU and recipe.degree("ep") > 1:
        why = "gloo, which connects ranks on a CPU, cannot gather the unequal shares of TP with EP"
        yield _degree_key(recipe, "ep"), why, "tp=1 or ep=1"


def _states(recipe: Recipe, width: int) -> float:
    """Return the bytes of the optimizer's states of one parameter that stay on the GPU."""
    states: float = 0
    for moment in ("exp_avg", "exp_avg_sq"):
        kept = recipe.find(f"megatron.optimizer.{moment}_dtype", "fp32")
        states += _BYTES.get(kept, FLOAT32)
    if width == BFLOAT16:
        states += _master(recipe)
    if recipe.find("megatron.optimizer.optimizer_cpu_offload", False):
        states *= 1 - recipe.find("megatron.optimizer.optimizer_offload_fraction", 0.0)
    return states


def _master(recipe: Recipe) -> int:
    """Return the bytes of what the optimizer keeps of a weight beside its BF16 value."""
    is_aware = recipe.find("megatron.optimizer.use_precision_aware_optimizer", False)
    if is_aware and recipe.find("megatron.optimizer.store_param_remainders", True):
        # The lower half of a float32 value, of which the weight is the upper half.
        return BFLOAT16
    return FLOAT32


def _saved(recipe: Recipe, stage: Stage) -> float:
    """Return the elements per token that a stage keeps, of all its micro-batches in flight."""
    model = recipe.architecture
    layers = len(stage.layers)
    recomputed, group = _recomputed(recipe, layers)
    layer = terms.layer_elements(model, eight=False) * FACTORS["megatron_eager"]
    if _has_engine(recipe):
        layer -= _unsaved_by_engine(model)
    if recipe.precision in _EIGHT:
        layer -= _inputs_in_eight(model) / 2
    kept = (layers - recomputed) * layer + recomputed / group * model.hidden_size
    saved = kept * stage.in_flight
    if recomputed:
        # One group at a time is computed again, whatever is in flight.
        saved += group * layer * FACTORS["recomputed"]
    return saved


def _has_engine(recipe: Recipe) -> bool:
    """Return whether Transformer Engine computes the layers.

    It always does in FP8, and the images for Instinct GPUs have it. The runs in BF16 on H200s, to
    which the factors were fitted, did without.
    """
    if recipe.gpu == CPU:
        return False
    return recipe.precision in _EIGHT or arch_of(generation(recipe.gpu)).vendor == "amd"


def _unsaved_by_engine(model: Architecture) -> float:
    """Return the elements per token that a layer saves only without Transformer Engine."""
    moe = model.moe
    # What experts return: their activation is weighted, and not this.
    outputs = 0.0
    if moe.experts:
        outputs = moe.top_k * model.hidden_size * model.sparse_layers / model.layers
    if model.sinks:
        # Its attention has none, so PyTorch's computes them.
        return outputs
    # Repeated keys and values: its attention reads a head of them once for its heads of queries.
    repeated = (model.heads - model.kv_heads) * (model.query_size + model.value_size)
    return outputs + repeated


def _inputs_in_eight(model: Architecture) -> float:
    """Return the elements per token of products' inputs, which FP8 keeps in half the bytes.

    Attention keeps what it returns, so the copy in FP8 is one more.
    """
    inputs = 2 * model.hidden_size + terms.ffn_width(model, routed=False)
    routed = model.moe.top_k * (model.moe.ffn_size + model.hidden_size)
    inputs += routed * model.sparse_layers / model.layers
    return inputs - model.heads * model.value_size


def _recomputed(recipe: Recipe, layers: int) -> tuple[int, int]:
    # How many of a stage's layers are recomputed in full, and how many at a time.
    if recipe.find("megatron.training.recompute", "none") == "full":
        return layers, 1
    if recipe.find("megatron.model.recompute_granularity", "none") != "full":
        return 0, 1
    number = recipe.find("megatron.model.recompute_num_layers", 0)
    # "block" recomputes that many layers of each chunk one by one; "uniform" recomputes all layers
    # in groups of that many.
    if recipe.find("megatron.model.recompute_method", "") == "block":
        return min(layers, number * chunks_of_a_stage(recipe)), 1
    return layers, max(1, number)
