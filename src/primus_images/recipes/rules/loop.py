"""The rules of our own loop on FSDP2, which are the defaults of every backend, and the terms of a
rank's memory.

Tensors that a layer keeps for its backward pass are counted one by one, as in arXiv:2205.05198.
Factors that cannot be counted were fitted to runs on H200s (benchmarks/reports/h200-memory.md). An
*element* is one value per token.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from primus_images.recipes.architecture import Architecture, size
from primus_images.recipes.faults import Fault
from primus_images.recipes.recipe import Recipe
from primus_images.turbo.optimizations import chosen
from primus_images.yamlfile import read_values

# The precision of matrix products in a dtype of torch.
DTYPES: Mapping[str, str] = {"float32": "fp32", "bfloat16": "bf16"}
FLOAT32 = 4
BFLOAT16 = 2
FACTORS = cast(Mapping[str, float], read_values(Path(__file__).with_name("memory.yaml")).data)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one rank in bytes: shards of weights, gradients and optimizer states, and what
    a step adds.

    ``unsharded``: gathered weights and gradients before they are reduced. ``loss``: logits and
    their gradients. ``reused``: memory of gradients that activations and logits use before the
    gradients exist.
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
        # Sharded gradients count although they do not exist while activations are at their largest:
        # what the stream of the collectives frees is not reused elsewhere.
        return sum(self.terms.values())

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer states: what a run needs with any batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def terms(self) -> dict[str, float]:
        """Return name → bytes of the terms of ``peak``. Reused memory is negative, and left out if
        there is none.
        """
        terms = asdict(self)
        reused = terms.pop("reused")
        return terms | ({"reused": -reused} if reused else {})

    @property
    def least(self) -> float:
        """The memory required at the start or end of the backward pass. Below ``peak``, training is
        slower.
        """
        states = self.weights + self.optimizer
        return max(states + self.activations + self.loss, states + self.gradients) + self.unsharded


def fused_loss(model: Architecture, tokens: float) -> float:
    """Return the bytes of one chunk's logits. Their gradient overwrites them."""
    return min(tokens, FACTORS["fused_chunk"]) * model.vocab_size * BFLOAT16


def layer_elements(model: Architecture, *, eight: bool, routed: bool = True) -> float:
    """Return the elements per token that a compiled layer keeps, with ``eight`` in FP8, with
    experts if ``routed``.
    """
    width = model.hidden_size
    mla = model.mla
    inner = ffn_width(model, routed=routed)
    # Queries, keys, values and the output. Grouped heads are repeated before attention.
    attention = (
        2 * model.heads * (model.query_size + model.value_size)
        + 2 * mla.kv_lora_rank
        + mla.q_lora_rank
    )
    if eight:
        # Inputs of products in FP8 are computed again from the tensors before them.
        return 0.893 * (2 * width + attention + 2 * inner)
    # The compiler keeps tanh, which it does not compute again.
    return 0.987 * (3 * width + attention + (4 if model.activation == "gelu_tanh" else 3) * inner)


def ffn_width(model: Architecture, *, routed: bool = True) -> float:
    """Return the mean width of the feed-forward part for one token, with its copies in experts if
    ``routed``.
    """
    moe = model.moe
    if not moe.experts:
        return float(model.ffn_size)
    sparse = (model.layers - moe.dense_layers) / model.layers
    copies = 0
    if routed:
        copies = moe.top_k * (moe.ffn_size + 2 * model.hidden_size / 3)
    return sparse * (copies + moe.shared_experts * moe.ffn_size) + (1 - sparse) * model.ffn_size


def copies_in_eight(model: Architecture) -> float:
    """Return the bytes of all layers' weights in FP8, transposed, which layers keep unless they are
    recomputed.
    """
    return float(
        size(model).active
        - model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    )


def gathered_experts(recipe: Recipe) -> float:
    """Return the parameters of a layer's experts that a rank gathers in addition to those that one
    token uses.
    """
    model = recipe.architecture
    parts = recipe.degree("ep")
    moe = model.moe
    if not moe.experts or recipe.world_size // recipe.degree("replicas") <= parts:
        return 0.0
    here = moe.experts / parts - moe.top_k
    return max(0.0, here) * 3 * model.hidden_size * moe.ffn_size


def unsharded(
    recipe: Recipe, compute: int, *, alone: bool = False, ends: int = 1, cast: bool = False
) -> float:
    """Return the bytes that are gathered at once: the output layer and two blocks, and gradients of
    one of each.

    ``ends`` is 2 if the embedding is gathered together with the output layer. ``alone``: nothing is
    reduced. ``cast``: each rank converts its shard before it is gathered.
    """
    model = recipe.architecture
    tensor = recipe.degree("tp")
    world = recipe.world_size // recipe.degree("replicas")
    count = size(model)
    if model.of_images:
        head = 0.0
        block = 1.5 * count.total / (model.dit.double_layers + model.dit.single_layers)
    else:
        head = float(model.vocab_size * model.hidden_size)
        if model.moe.experts:
            every = count.active
        else:
            every = count.total
        block = (every - head * (1 if model.tied_embeddings else 2)) / max(
            1, model.layers
        ) + gathered_experts(recipe)
    converted = 0.0
    if cast and world > 1:
        converted = (ends * head + block) * compute / world
    if alone:
        return ((ends * head + 2 * block) * compute + converted) / tensor
    # Gradients exist in the computing precision, and in float32 while they are reduced. Those of
    # the output layer are freed before those of the embedding exist. One rank reduces nothing, and
    # keeps both.
    reduced = 1
    if world == 1:
        reduced = ends
    # The optimization peer-copies reduces them as they are.
    if "peer-copies" in chosen(recipe):
        summed = 0
    else:
        summed = FLOAT32
    whole = (
        ends * head * compute
        + reduced * head * (compute + FLOAT32)
        + block * (3 * compute + summed)
    )
    return (whole + converted) / tensor


def width_of(dtype: str) -> int:
    """Return the bytes of one value of ``dtype``."""
    if dtype in ("float32", "fp32"):
        return FLOAT32
    return BFLOAT16


class Rules:
    """The rules of a backend that trains text with our own loop. Other backends override what
    differs.

    With ``divides_documents``, every data-parallel rank needs a document of its own. ``unverified``
    says why the gradients of one rank cannot be compared, if they cannot.
    """

    divides_documents = False
    unverified = ""

    def precision(self, recipe: Recipe) -> str:
        """Return the precision of the linear layers' matrix products, derived from the backend's
        own settings.
        """
        if recipe.find(f"{recipe.backend}.training.fp8", "none") != "none":
            return "fp8"
        dtype = recipe.find(f"{recipe.backend}.training.dtype", "bfloat16")
        return DTYPES.get(dtype, dtype)

    def compiled(self, recipe: Recipe) -> bool:
        """Return whether torch.compile compiles the model's blocks."""
        return recipe.find(f"{recipe.backend}.training.compile", False)

    def faults(self, recipe: Recipe) -> Iterable[Fault]:
        """Yield what the recipe asks for and the backend does not compute: key, reason and remedy."""
        for key, row in recipe.knows.refused.items():
            if recipe.find(full := f"{recipe.backend}.{key}", row["but"]) != row["but"]:
                yield full, row["why"], row.get("remedy")

    def unjudged(self, recipe: Recipe) -> str | None:
        """Return why the reference cannot repeat such a run of this backend, in a sentence, or
        None.
        """
        balanced = recipe.architecture.moe.auxiliary_loss > 0
        if balanced:
            return "the reference does not balance experts as transformers does"
        return None

    def blocks_judged(self, recipe: Recipe) -> bool:
        """Whether the reference can repeat what each block computes."""
        return not self.compiled(recipe) and recipe.degree("cp") == 1

    def layout(self, recipe: Recipe) -> Mapping[str, Any]:
        """Return the fields of the ranks' layout that a resumed run must share with the one that
        saved.
        """
        return {}

    def memory(self, recipe: Recipe, batch: int) -> Memory:
        """Predict the peak of one rank, in bytes, with micro-batches of ``batch``."""
        head = recipe.backend
        model = recipe.architecture
        tokens = batch * recipe.seq_len
        total = float(size(model).total)
        width = width_of(recipe.find(f"{head}.training.master_dtype", "float32"))
        compute = width_of(recipe.find(f"{head}.training.dtype", "bfloat16"))
        compiled = recipe.find(f"{head}.training.compile", False)
        recomputed = recipe.find(f"{head}.training.recompute", "none") == "full"
        shard = total * recipe.degree("replicas") / recipe.world_size
        trained = 1.0
        if recipe.mode == "lora":
            trained = 0.0
        if model.of_images:
            layers = model.dit.double_layers + model.dit.single_layers
            layer = FACTORS["flux_layer"] * model.hidden_size
        else:
            layers = model.layers
            # Adapters need the inputs of layers in the computing precision.
            eight = recipe.precision == "fp8" and trained > 0
            frozen = model.moe.experts > 0 and not trained
            layer = layer_elements(model, eight=eight, routed=not frozen) * (
                1 if compiled else FACTORS["eager"]
            )
            if frozen:  # a gradient passes their activation and the weighting of their outputs, which no adapter reads
                rows = model.moe.top_k * (1 - model.moe.dense_layers / model.layers)
                layer += rows * (3 * model.moe.ffn_size + model.hidden_size)
            if (
                model.sinks
            ):  # only transformers' eager attention computes them, which keeps its scores
                layer += FACTORS["scores"] * model.heads * recipe.seq_len
        if recomputed:
            saved = layers * model.hidden_size + layer * FACTORS["recomputed"]
        else:
            saved = layers * layer
        # Every rank has all weights, in the computing precision.
        whole = "frozen-weights" in chosen(recipe)
        # Weights that never change stay in FP8 in both layouts, others in that of the backward
        # pass.
        if whole:
            layouts = 2
        else:
            layouts = int(not recomputed)
        copies = 0.0
        if recipe.precision == "fp8":
            copies = layouts * copies_in_eight(model)
        if model.has_formula:
            chunk = min(tokens, recipe.find(f"{head}.loss_chunk", 2048))
        else:
            chunk = tokens
        # One rank gathers nothing, and reads the rows of a frozen embedding in place.
        ends = 1
        if (trained or recipe.world_size > 1) and not model.tied_embeddings:
            ends = 2
        stay = not recipe.find(f"{head}.sharding.reshard_after_forward", True)
        gathered = unsharded(recipe, compute, alone=not trained, ends=ends, cast=width != compute)
        activations = saved * tokens * compute + copies
        reused = 0.0
        if whole:
            width = compute
            shard = total
            gathered = 0.0
        elif stay and recipe.world_size == 1 and not trained:
            # All weights but the embedding, including the output layer and the blocks, stay in the
            # computing precision.
            gathered = compute * (total - model.vocab_size * model.hidden_size)
        elif stay:
            gathered += compute * total
        if recipe.world_size == 1 and trained and recipe.accumulation == 1:
            # The gradient of the embedding is computed last, in the memory of activations, in both
            # precisions.
            reused = min(
                activations, model.vocab_size * model.hidden_size * float(compute + FLOAT32)
            )
        loss: float = chunk * model.vocab_size * FACTORS["eager_loss"]
        if "linear-cross-entropy" in chosen(recipe):
            loss = fused_loss(model, tokens)
        return Memory(
            weights=width * shard,
            gradients=trained * width * shard,
            optimizer=trained * 2 * width * shard,
            unsharded=gathered,
            activations=activations,
            reused=reused,
            loss=loss,
        )
