"""The terms of the memory that one rank uses, from which the rules of each backend predict its peak.

Tensors that a layer keeps for its backward pass are counted one by one, as in arXiv:2205.05198. Factors that cannot be
counted were fitted to runs on H200s (benchmarks/reports/h200-memory.md). An *element* is one value per token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from primus.recipes.architecture import Architecture, size
from primus.recipes.recipe import Recipe

FLOAT32, BFLOAT16 = 4, 2
# Tokens per chunk of the optimization linear-cross-entropy.
_FUSED_CHUNK = 8192
# Without a compiler, layers also keep intermediate results of norms, RoPE and SiLU (fitted).
EAGER = 1.4
# Bytes per logit without a compiler: in BF16 and float32, with gradients in both.
EAGER_LOSS = 14
# While a layer is recomputed, its tensors and their gradients exist at the same time (fitted).
RECOMPUTED = 1.6


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one rank in bytes: shards of weights, gradients and optimizer states, and what a step adds.

    ``unsharded``: gathered weights and gradients before they are reduced. ``loss``: logits and their gradients.
    ``reused``: memory of gradients that activations and logits use before the gradients exist.
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
        """What the allocator reserves if it never has to release memory."""
        # Sharded gradients count although they do not exist while activations are at their largest: what the stream of
        # the collectives frees is not reused elsewhere.
        return sum(self.terms.values())

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer states: what a run needs with any batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def terms(self) -> dict[str, float]:
        """Return name → bytes of the terms of ``peak``. Reused memory is negative, and left out if there is none."""
        terms = asdict(self)
        reused = terms.pop("reused")
        return terms | ({"reused": -reused} if reused else {})

    @property
    def least(self) -> float:
        """The memory required at the start or end of the backward pass. Below ``peak``, training is slower."""
        states = self.weights + self.optimizer
        return max(states + self.activations + self.loss, states + self.gradients) + self.unsharded


def fused_loss(model: Architecture, tokens: float) -> float:
    """Return the bytes of one chunk's logits. Their gradient overwrites them."""
    return min(tokens, _FUSED_CHUNK) * model.vocab_size * BFLOAT16


def layer_elements(model: Architecture, *, eight: bool) -> float:
    """Return the elements per token that one compiled layer keeps for its backward pass, with ``eight`` in FP8."""
    width, mla, inner = model.hidden_size, model.mla, ffn_width(model)
    # Queries, keys, values and the output. Grouped heads are repeated before attention.
    attention = 2 * model.heads * (model.query_size + model.value_size) + 2 * mla.kv_lora_rank + mla.q_lora_rank
    # Inputs of products in FP8 are computed again from the tensors before them.
    return 0.893 * (2 * width + attention + 2 * inner) if eight else 0.987 * (3 * width + attention + 3 * inner)


def ffn_width(model: Architecture, *, routed: bool = True) -> float:
    """Return the mean width of the feed-forward part for one token, with its copies in experts if ``routed``."""
    moe = model.moe
    if not moe.experts:
        return float(model.ffn_size)
    sparse = (model.layers - moe.dense_layers) / model.layers
    copies = moe.top_k * (moe.ffn_size + 2 * model.hidden_size / 3) if routed else 0
    return sparse * (copies + moe.shared_experts * moe.ffn_size) + (1 - sparse) * model.ffn_size


def copies_in_eight(model: Architecture) -> float:
    """Return the bytes of all layers' weights in FP8, transposed, which layers keep unless they are recomputed."""
    return float(size(model).active - model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2))


def gathered_experts(recipe: Recipe) -> float:
    """Return the parameters of a layer's experts that a rank gathers in addition to those that one token uses."""
    model, parts = recipe.architecture, recipe.degree("ep")
    moe = model.moe
    if not moe.experts or recipe.world_size // recipe.degree("replicas") <= parts:
        return 0.0
    here = moe.experts / parts - moe.top_k
    return max(0.0, here) * 3 * model.hidden_size * moe.ffn_size


def unsharded(
    recipe: Recipe, compute: int, *, alone: bool = False, ends: int = 1, cast: bool = False, experts: float = 0.0
) -> float:
    """Return the bytes that are gathered at once: the output layer and two blocks, and gradients of one of each.

    ``ends`` is 2 if the embedding is gathered together with the output layer. ``alone``: nothing is reduced. ``cast``:
    each rank converts its shard before it is gathered. ``experts``: further parameters that a block gathers.
    """
    model, tensor, world = recipe.architecture, recipe.degree("tp"), recipe.world_size // recipe.degree("replicas")
    count = size(model)
    if model.of_images:
        head, block = 0.0, 1.5 * count.total / (model.dit.double_layers + model.dit.single_layers)
    else:
        head = float(model.vocab_size * model.hidden_size)
        every = count.active if model.moe.experts else count.total
        block = (every - head * (1 if model.tied_embeddings else 2)) / max(1, model.layers) + experts
    converted = (ends * head + block) * compute / world if cast and world > 1 else 0.0
    if alone:
        return ((ends * head + 2 * block) * compute + converted) / tensor
    # Gradients exist in the computing precision, and in float32 while they are reduced. Those of the output layer are
    # freed before those of the embedding exist. One rank reduces nothing, and keeps both.
    reduced = ends if world == 1 else 1
    whole = ends * head * compute + reduced * head * (compute + FLOAT32) + block * (3 * compute + FLOAT32)
    return (whole + converted) / tensor


def width_of(dtype: str) -> int:
    """Return the bytes of one value of ``dtype``."""
    return FLOAT32 if dtype in ("float32", "fp32") else BFLOAT16
