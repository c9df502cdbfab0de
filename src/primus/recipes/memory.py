"""How much of its GPU's memory a rank takes at its peak, predicted from the recipe alone.

The terms are those of *Reducing Activation Recomputation in Large Transformer Models* (arXiv:2205.05198), for FSDP2 and
for Megatron's distributed optimizer. What a layer keeps for its backward pass is counted tensor by tensor; the few
factors below that no counting gives were fitted to runs on H200s. docs/benchmarks/h200-memory.md compares every
prediction with what was measured. One *element* below is one value per token; GiB are 2³⁰ bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from primus.gpus.table import generation
from primus.recipes.architecture import Architecture
from primus.recipes.choose import CPU
from primus.recipes.recipe import Recipe
from primus.recipes.rules import memory_of
from primus.recipes.size import size
from primus.turbo.optimizations import chosen

# The share of a GPU's memory that training can use: the rest goes to the context, to NCCL and to fragmentation.
USABLE = 0.95

FLOAT32, BFLOAT16 = 4, 2
# Tokens per chunk of the optimization linear-cross-entropy.
_FUSED_CHUNK = 8192
# Without a compiler, layers also keep intermediate results of norms, RoPE and SiLU (fitted).
EAGER = 1.4
# Bytes per logit without a compiler: in BF16 and float32, with gradients in both.
EAGER_LOSS = 14
# While a layer is recomputed, its tensors and their gradients exist at the same time (fitted).
RECOMPUTED = 1.6
_MOST = 4096


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank, by what they hold.

    ``weights``, ``gradients`` and ``optimizer`` are the rank's shards. ``unsharded`` are the gathered weights of the
    layers at work, and their gradients before they are reduced. ``activations`` are kept for the backward pass,
    ``loss`` are the logits and their gradients. ``reused`` is memory of gradients that activations and logits take
    before the gradients exist.
    """

    weights: float
    gradients: float
    optimizer: float
    unsharded: float
    activations: float
    loss: float
    reused: float = 0.0

    @property
    def peak(self) -> float:
        """What the allocator reserves when it never has to give memory back.

        Sharded gradients count in full although they do not exist while activations are at their largest: they are
        allocated on the stream of the collectives, and what is freed there is not used again elsewhere.
        """
        return sum(self.terms.values())

    @property
    def terms(self) -> dict[str, float]:
        """Name → bytes of what adds up to ``peak``. What is reused counts negative, and only where there is any."""
        found = asdict(self)
        reused = found.pop("reused")
        return found | ({"reused": -reused} if reused else {})

    @property
    def least(self) -> float:
        """What must fit in any case: the start of the backward pass, or its end. Below ``peak``, training is slower."""
        states = self.weights + self.optimizer
        return max(states + self.activations + self.loss, states + self.gradients) + self.unsharded


def predict(recipe: Recipe, micro_batch: int | None = None) -> Memory:
    """Predict the peak of one rank of ``recipe``; ``micro_batch`` replaces the recipe's.

    With pipeline stages, this is the first stage. It holds the activations of as many micro-batches as there are
    stages.
    """
    return memory_of(recipe).predict(recipe, recipe.local_batch if micro_batch is None else micro_batch)


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


def chunked_loss(recipe: Recipe) -> bool:
    """Whether the optimization linear-cross-entropy computes the loss in chunks."""
    return "linear-cross-entropy" in chosen(recipe)


def fused_loss(model: Architecture, tokens: float) -> float:
    """Return the bytes of one chunk's logits. Their gradient overwrites them."""
    return min(tokens, _FUSED_CHUNK) * model.vocab_size * BFLOAT16


def layer_elements(model: Architecture, *, eight: bool) -> float:
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
    inner = ffn_width(model)
    if eight:
        return 0.893 * (2 * width + attention + 2 * inner)
    return 0.987 * (3 * width + attention + 3 * inner)


def ffn_width(model: Architecture, *, routed: bool = True) -> float:
    """Width of the feed-forward part as one token sees it, averaged over the layers.

    ``routed``: with the copies of it that experts work on.
    """
    moe = model.moe
    if not moe.experts:
        return float(model.ffn_size)
    sparse = (model.layers - moe.dense_layers) / model.layers
    copies = moe.top_k * (moe.ffn_size + 2 * model.hidden_size / 3) if routed else 0
    return sparse * (copies + moe.shared_experts * moe.ffn_size) + (1 - sparse) * model.ffn_size


def copies_in_eight(model: Architecture) -> float:
    """Bytes of the weights of all layers in FP8, transposed for the backward pass. Compiled layers keep them from the
    forward pass on, whatever the number of tokens; selective and full recomputation make them again.
    """
    return float(size(model).active - model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2))


def gathered_experts(recipe: Recipe, model: Architecture) -> float:
    """Experts of one layer that a rank gathers beyond those that one token meets.

    Expert parallelism shares the experts out first. What is left is sharded over the other ranks, if there are any.
    """
    moe, parts = model.moe, recipe.degree("ep")
    if not moe.experts or recipe.world_size // recipe.degree("replicas") <= parts:
        return 0.0
    here = moe.experts / parts - moe.top_k
    return max(0.0, here) * 3 * model.hidden_size * moe.ffn_size


def unsharded(
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
    whole = ends * head * compute + reduced * head * (compute + FLOAT32) + block * (3 * compute + FLOAT32)
    return (whole + converted) / tensor


def width_of(dtype: str) -> int:
    """Return the bytes of one value of ``dtype``."""
    return FLOAT32 if dtype in ("float32", "fp32") else BFLOAT16
