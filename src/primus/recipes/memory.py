"""How much of its GPU's memory a rank takes at its peak, predicted from the recipe alone.

The terms are those of *Reducing Activation Recomputation in Large Transformer Models* (arXiv:2205.05198), for FSDP2 and
for Megatron's distributed optimizer. What a layer keeps for its backward pass is counted tensor by tensor; the few
factors below that no counting gives were fitted to runs on H200s. docs/benchmarks/h200-memory.md compares every
prediction with what was measured. One *element* below is one value per token; GiB are 2³⁰ bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from primus.gpus.table import generation
from primus.recipes.architecture import Architecture
from primus.recipes.choose import CPU
from primus.recipes.recipe import Recipe
from primus.recipes.size import size

__all__ = ["ERROR_BAND", "USABLE", "Memory", "gpu_bytes", "largest_batch", "predict"]

# The share of a GPU's memory that training can use: the rest goes to the context, to NCCL and to fragmentation.
USABLE = 0.95
# The largest error of the predictions that docs/benchmarks/h200-memory.md lists, by backend.
ERROR_BAND: Mapping[str, float] = {"torchtitan": 0.07, "megatron": 0.07, "fsdp": 0.06, "finetune": 0.04, "flux": 0.03}

_FLOAT32, _BFLOAT16 = 4, 2
# Tokens per chunk of the optimization linear-cross-entropy.
_FUSED_CHUNK = 8192
# Without a compiler to fuse them, intermediate results of norms, RoPE and SiLU are kept, too (fitted). Megatron has
# fused kernels for some of them.
_EAGER, _MEGATRON_EAGER = 1.4, 1.08
# Logits: BF16 alone where the loss is compiled; else also in float32, with their gradients in both.
_COMPILED_LOSS, _EAGER_LOSS, _MEGATRON_LOSS = 2, 14, 10
# While one layer is computed again, its tensors and their gradients are there together (fitted).
_RECOMPUTED = 1.6
_FLUX_LAYER = 20
_MOST = 4096


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank, by what they hold.

    ``weights``, ``gradients`` and ``optimizer`` are the rank's shards. ``unsharded`` are the gathered weights of the
    layers at work, and their gradients before they are reduced. ``activations`` are kept for the backward pass,
    ``loss`` are the logits and their gradients.
    """

    weights: float
    gradients: float
    optimizer: float
    unsharded: float
    activations: float
    loss: float

    @property
    def peak(self) -> float:
        """What the allocator reserves when it never has to give memory back.

        Gradients count in full although they do not exist while activations are at their largest: they are allocated
        on the stream of the collectives, and what is freed there is not used again elsewhere.
        """
        states = self.weights + self.gradients + self.optimizer
        return states + self.unsharded + self.activations + self.loss

    @property
    def least(self) -> float:
        """What must fit in any case: the start of the backward pass, or its end. Below ``peak``, training is slower."""
        states = self.weights + self.optimizer
        return max(states + self.activations + self.loss, states + self.gradients) + self.unsharded


def predict(recipe: Recipe, micro_batch: int | None = None) -> Memory:
    """The peak of one rank of ``recipe``; ``micro_batch`` replaces the recipe's.

    With pipeline stages, the first stage is meant: it holds the activations of as many micro batches as there are
    stages.
    """
    batch = recipe.local_batch if micro_batch is None else micro_batch
    model = recipe.architecture
    tokens = batch * recipe.seq_len / recipe.degree("cp")
    total = float(size(model).total)
    if recipe.backend == "megatron":
        return _megatron(recipe, model, total, tokens)
    if recipe.backend == "torchtitan":
        return _torchtitan(recipe, model, total, batch)
    return _own(recipe, model, total, tokens)


def largest_batch(recipe: Recipe, available: float) -> int:
    """The largest micro batch whose peak is within ``available`` bytes; 0 where one does not fit."""
    if predict(recipe, 1).peak > available:
        return 0
    low, high = 1, 2
    while high <= _MOST and predict(recipe, high).peak <= available:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if predict(recipe, middle).peak <= available else (low, middle)
    return low


def gpu_bytes(name: str) -> float | None:
    """Memory of one GPU of a generation as software sees it, or None for a CPU."""
    return None if name == CPU else generation(name).memory.gb * 2**30


def _torchtitan(recipe: Recipe, model: Architecture, total: float, batch: int) -> Memory:
    tokens = batch * recipe.seq_len / recipe.degree("cp")
    width = _width(recipe.find("torchtitan.training.dtype", "float32"))
    compute = _width(recipe.find("torchtitan.training.mixed_precision_param", "bfloat16"))
    tensor, stages, replicas = recipe.degree("tp"), recipe.degree("pp"), recipe.degree("replicas")
    shard = total * replicas / recipe.world_size
    components = recipe.section("torchtitan.compile").get("components", ["model", "loss"])
    enabled = recipe.find("torchtitan.compile.enable", False) and isinstance(components, list)
    compiled, fused = (enabled and isinstance(components, list) and part in components for part in ("model", "loss"))
    mode = recipe.find("torchtitan.activation_checkpoint.mode", "none")
    offloaded = recipe.find("torchtitan.training.enable_cpu_offload", False)
    early = recipe.find("torchtitan.optimizer.early_step_in_backward", False)
    eight = recipe.precision in ("fp8", "mxfp8")
    layer = _layer(model, eight=eight) * (1 if compiled else _EAGER)
    if mode == "full":
        kept, once = float(model.hidden_size), layer * _RECOMPUTED
    elif mode == "selective":
        kept, once = _selective(recipe, model, layer, compiled=compiled), 0.0
    else:
        kept, once = layer, 0.0
    copies = _copies_in_eight(model) / tensor / stages if eight and mode == "none" else 0.0
    if stages > 1:
        # A pipeline splits the local batch into micro batches of its own.
        part = recipe.find("torchtitan.parallelism.pipeline_parallel_microbatch_size", 1)
        in_flight = min(stages, max(1, batch // part))
        tokens *= min(1.0, part / batch)
    else:
        in_flight = 1
    activations = (model.layers / stages * kept * in_flight + once) * tokens * compute / tensor + copies
    # In FP8, weights are gathered, and stay, with one byte each.
    narrow = eight and recipe.find("torchtitan.quantize.linear.float8.enable_fsdp_float8_all_gather", False)
    gathered = 1 if narrow else compute
    never = recipe.find("torchtitan.parallelism.fsdp_reshard_after_forward", "default") == "never"
    return Memory(
        weights=0 if offloaded else width * shard,
        gradients=0 if offloaded or early else width * shard,
        optimizer=0 if offloaded else 2 * width * shard,
        unsharded=_unsharded(
            model,
            compute,
            tensor,
            alone=recipe.world_size == 1,
            world=recipe.world_size // recipe.degree("replicas"),
            cast=width != compute,
            experts=_gathered_experts(recipe, model),
        )
        + (gathered * total / tensor / stages if never else 0),
        activations=activations,
        loss=_fused_loss(model, tokens)
        if _chunked(recipe)
        else tokens * model.vocab_size * (_COMPILED_LOSS if fused else _EAGER_LOSS) / tensor,
    )


def _chunked(recipe: Recipe) -> bool:
    return "turbo" in recipe.settings and "linear-cross-entropy" in str(recipe.settings["turbo"].value)


def _fused_loss(model: Architecture, tokens: float) -> float:
    """One chunk's logits, over which their gradient is written."""
    return min(tokens, _FUSED_CHUNK) * model.vocab_size * _BFLOAT16


def _selective(recipe: Recipe, model: Architecture, layer: float, *, compiled: bool) -> float:
    """torchtitan's selective checkpointing: every n-th layer, or by operation, which keeps every second product."""
    option = recipe.find("torchtitan.activation_checkpoint.selective_ac_option", "2")
    if option != "op":
        every = int(option) if option.isdigit() and int(option) else 1
        return layer - (layer - model.hidden_size) / every
    queries, values = model.heads * model.head_size, model.kv_heads * model.head_size
    # The layer's input, the products wq, wv, w1 and (where no compiler drops it) w2, and the output of attention.
    # Experts' grouped products are computed again.
    kept = 2.0 * model.hidden_size + queries + values + _ffn(model, routed=False)
    return kept * 1.05 if compiled else kept + model.hidden_size


def _own(recipe: Recipe, model: Architecture, total: float, tokens: float) -> Memory:
    """The trainers of this package: FSDP2, each block gathered alone, the logits made in chunks."""
    head = recipe.backend
    width = _width(recipe.find(f"{head}.training.master_dtype", "float32"))
    compute = _width(recipe.find(f"{head}.training.dtype", "bfloat16"))
    compiled = recipe.find(f"{head}.training.compile", False)
    recomputed = recipe.find(f"{head}.training.recompute", "none") == "full"
    shard = total * recipe.degree("replicas") / recipe.world_size
    trained = 0.0 if recipe.mode == "lora" else 1.0
    if model.family == "flux":
        layers, layer = model.dit.double_layers + model.dit.single_layers, float(_FLUX_LAYER * model.hidden_size)
    else:
        layers = model.layers
        eight = recipe.precision == "fp8"
        layer = _layer(model, eight=eight) * (1 if compiled else _EAGER)
    kept = layers * model.hidden_size + layer * _RECOMPUTED if recomputed else layers * layer
    copies = _copies_in_eight(model) if recipe.precision == "fp8" and not recomputed else 0.0
    chunk = min(tokens, recipe.find(f"{head}.loss_chunk", 2048))
    # One rank gathers nothing, and reads the rows of a frozen embedding from where they are.
    ends = 2 if trained or recipe.world_size > 1 else 1
    stay = not recipe.find(f"{head}.sharding.reshard_after_forward", True)
    return Memory(
        weights=width * shard,
        gradients=trained * width * shard,
        optimizer=trained * 2 * width * shard,
        unsharded=_unsharded(
            model,
            compute,
            1,
            alone=not trained,
            ends=ends,
            world=recipe.world_size // recipe.degree("replicas"),
            cast=width != compute,
        )
        + (compute * total if stay else 0),
        activations=kept * tokens * compute + copies,
        loss=_fused_loss(model, tokens) if _chunked(recipe) else chunk * model.vocab_size * _EAGER_LOSS,
    )


def _megatron(recipe: Recipe, model: Architecture, total: float, tokens: float) -> Memory:
    """Weights and gradients are whole on every data-parallel rank; the optimizer's float32 copies are shared out."""
    width = _width(recipe.find("megatron.training.dtype", "bfloat16"))
    reduced = _FLOAT32 if recipe.find("megatron.ddp.grad_reduce_in_fp32", False) else width
    tensor, stages = recipe.degree("tp"), recipe.degree("pp")
    parts = tensor * stages * recipe.degree("ep")
    states = 2 * _FLOAT32 + (_FLOAT32 if width == _BFLOAT16 else 0)
    sharded = recipe.find("megatron.ddp.use_distributed_optimizer", True)
    fully = recipe.find("megatron.torch_fsdp2", False)
    layers = model.layers / stages
    again = min(layers, recipe.find("megatron.model.recompute_num_layers", 0))
    if recipe.find("megatron.model.recompute_granularity", "none") != "full":
        again = 0
    layer = _layer(model, eight=False) * _MEGATRON_EAGER
    kept = (layers - again) * layer + again * model.hidden_size + (layer * _RECOMPUTED if again else 0)
    in_flight = min(stages, max(1, recipe.accumulation))
    return Memory(
        weights=width * total / (recipe.world_size if fully else parts),
        gradients=reduced * total / (recipe.world_size if fully else parts),
        optimizer=states * total / (recipe.world_size if sharded or fully else parts),
        unsharded=_unsharded(model, width, tensor, world=recipe.world_size) if fully else 0,
        activations=kept * in_flight * tokens * width / tensor,
        loss=tokens * model.vocab_size * _MEGATRON_LOSS / tensor,
    )


def _layer(model: Architecture, *, eight: bool) -> float:
    """Elements per token that one compiled layer keeps for its backward pass.

    Its input, queries, keys and values (grouped heads are repeated before attention), attention's output, the sum after
    it, the second norm's output; gate, up and their product of the feed-forward part. In FP8 the inputs of products
    are computed again from what precedes them.
    """
    width, mla = model.hidden_size, model.mla
    queries = model.heads * model.head_size
    if mla.kv_lora_rank:
        query = model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        attention = 2 * query + 2 * model.heads * mla.v_head_dim + 2 * mla.kv_lora_rank + mla.q_lora_rank
    else:
        attention = 4 * queries
    inner = _ffn(model)
    if eight:
        return 0.893 * (2 * width + attention + 2 * inner)
    return 0.987 * (3 * width + attention + 3 * inner)


def _ffn(model: Architecture, *, routed: bool = True) -> float:
    """Width of the feed-forward part as one token sees it, averaged over the layers.

    ``routed``: with the copies of it that experts work on.
    """
    moe = model.moe
    if not moe.experts:
        return float(model.ffn_size)
    sparse = (model.layers - moe.dense_layers) / model.layers
    copies = moe.top_k * (moe.ffn_size + 2 * model.hidden_size / 3) if routed else 0
    return sparse * (copies + moe.shared_experts * moe.ffn_size) + (1 - sparse) * model.ffn_size


def _copies_in_eight(model: Architecture) -> float:
    """Bytes of the weights of all layers in FP8, transposed for the backward pass. Compiled layers keep them from the
    forward pass on, whatever the number of tokens; selective and full recomputation make them again.
    """
    return float(size(model).active - model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2))


def _gathered_experts(recipe: Recipe, model: Architecture) -> float:
    """Experts of one layer that a rank gathers beyond those that one token meets.

    Expert parallelism shares the experts out first. What is left is sharded over the other ranks, if there are any.
    """
    moe, parts = model.moe, recipe.degree("ep")
    if not moe.experts or recipe.world_size // recipe.degree("replicas") <= parts:
        return 0.0
    here = moe.experts / parts - moe.top_k
    return max(0.0, here) * 3 * model.hidden_size * moe.ffn_size


def _unsharded(
    model: Architecture,
    compute: int,
    tensor: int,
    *,
    alone: bool = False,
    ends: int = 1,
    world: int = 1,
    cast: bool = False,
    experts: float = 0.0,
) -> float:
    """What is whole at once: the output layer and two blocks in the computing precision, and gradients of one of each.

    ``ends`` is 2 where the embedding is gathered together with the output layer. ``alone``: nothing is reduced, for
    there is one rank or no gradient. ``cast``: each of ``world`` ranks converts its shard before it is gathered.
    ``experts`` are parameters of experts that a block gathers in addition.
    """
    count = size(model)
    if model.family == "flux":
        head, block = 0.0, 1.5 * count.total / (model.dit.double_layers + model.dit.single_layers)
    else:
        head = float(model.vocab_size * model.hidden_size)
        every = count.active if model.moe.experts else count.total
        block = (every - head * (1 if model.tied_embeddings else 2)) / max(1, model.layers) + experts
    converted = (ends * head + block) * compute / world if cast and world > 1 else 0.0
    if alone:
        return ((ends * head + 2 * block) * compute + converted) / tensor
    # Gradients exist in the computing precision, and in float32 while they are reduced. Those of the output layer are
    # reduced and gone before those of the embedding exist; one rank reduces nothing, and keeps both.
    reduced = ends if world == 1 else 1
    whole = ends * head * compute + reduced * head * (compute + _FLOAT32) + block * (3 * compute + _FLOAT32)
    return (whole + converted) / tensor


def _width(dtype: str) -> int:
    return _FLOAT32 if dtype in ("float32", "fp32") else _BFLOAT16
