"""The rules of our own loop on FSDP2, the defaults of every backend, and a rank's memory.

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
    """The memory of one rank in bytes.

    ``weights``, ``gradients`` and ``optimizer`` are shards; the other terms are what a step adds.
    ``unsharded``: gathered weights and gradients before they are reduced. ``loss``: logits and
    their gradients. ``reused``: memory of gradients that activations and logits use before the
    gradients exist. ``standing``: gradients exist while activations are at their largest, in
    buffers that are never freed or because micro-batches add to them.
    """

    weights: float
    gradients: float
    optimizer: float
    unsharded: float
    activations: float
    loss: float
    reused: float = 0.0
    standing: bool = False

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
        """Name → bytes of the terms of ``peak``. Reused memory is negative; 0 is left out."""
        terms = asdict(self)
        del terms["standing"]
        reused = terms.pop("reused")
        if reused:
            terms["reused"] = -reused
        return terms

    @property
    def least(self) -> float:
        """What the backward pass requires at its start or end. With so little, it is slower."""
        if self.standing:
            return self.peak
        states = self.weights + self.optimizer
        return max(states + self.activations + self.loss, states + self.gradients) + self.unsharded


def fused_loss(model: Architecture, tokens: float) -> float:
    """Return the bytes of one chunk's logits. Their gradient overwrites them."""
    return min(tokens, FACTORS["fused_chunk"]) * model.vocab_size * BFLOAT16


def layer_elements(
    model: Architecture, *, eight: bool, routed: bool = True, inputs: bool = True
) -> float:
    """Return the elements per token that a compiled layer keeps.

    ``eight``: products are in FP8. ``routed``: experts keep theirs. ``inputs``: results of norms
    and activation functions are kept, which products read.
    """
    width = model.hidden_size
    mla = model.mla
    inner = ffn_width(model, routed=routed)
    # Queries, keys, values and the output. Grouped heads are repeated before attention.
    attention = 2 * model.heads * (model.query_size + model.value_size)
    attention += 2 * mla.kv_lora_rank + mla.q_lora_rank
    if eight:
        # Inputs of products in FP8 are computed again from the tensors before them.
        return 0.893 * (2 * width + attention + 2 * inner)
    inners = 3
    if model.activation == "gelu_tanh":
        # The compiler keeps tanh, which it does not compute again.
        inners = 4
    if inputs:
        return 0.987 * (3 * width + attention + inners * inner)
    return 0.987 * (width + attention + (inners - 1) * inner)


def ffn_width(model: Architecture, *, routed: bool = True) -> float:
    """Return the mean width of the feed-forward part for one token.

    Its copies in experts count if ``routed``.
    """
    moe = model.moe
    if not moe.experts:
        return float(model.ffn_size)
    sparse = model.sparse_layers / model.layers
    copies = 0.0
    if routed:
        copies = moe.top_k * (moe.ffn_size + 2 * model.hidden_size / 3)
    return sparse * (copies + moe.shared_experts * moe.ffn_size) + (1 - sparse) * model.ffn_size


def embedding(model: Architecture) -> int:
    """Return the parameters of the embedding, which are as many as those of the output layer."""
    return model.vocab_size * model.hidden_size


def _ends(model: Architecture) -> int:
    """Return the number of matrices with the vocabulary."""
    if model.tied_embeddings:
        return 1
    return 2


def copies_in_eight(model: Architecture) -> float:
    """Return the bytes of all layers' weights in FP8, transposed.

    Layers keep them unless they are recomputed.
    """
    return float(size(model).active - embedding(model) * _ends(model))


def gathered_experts(recipe: Recipe) -> float:
    """Return the parameters of a layer's experts that a rank gathers and a token does not use."""
    model = recipe.architecture
    parts = recipe.degree("ep")
    moe = model.moe
    if not moe.experts or recipe.world_size // recipe.degree("replicas") <= parts:
        return 0.0
    here = moe.experts / parts - moe.top_k
    return max(0.0, here) * 3 * model.hidden_size * moe.ffn_size


def _block(recipe: Recipe) -> float:
    """Return the parameters of a block that are gathered at once."""
    model = recipe.architecture
    count = size(model)
    if model.of_images:
        return 1.5 * count.total / (model.dit.double_layers + model.dit.single_layers)
    parameters = count.total
    if model.moe.experts:
        parameters = count.active
    in_blocks = parameters - embedding(model) * _ends(model)
    return in_blocks / max(1, model.layers) + gathered_experts(recipe)


def unsharded(
    recipe: Recipe, compute: int, *, alone: bool = False, ends: int = 1, cast: bool = False
) -> float:
    """Return the bytes that are gathered at once.

    They are the output layer and two blocks, and gradients of one of each. ``ends`` is 2 if the
    embedding is gathered together with the output layer. ``alone``: nothing is reduced. ``cast``:
    each rank converts its shard before it is gathered.
    """
    model = recipe.architecture
    tensor = recipe.degree("tp")
    world = recipe.world_size // recipe.degree("replicas")
    head = 0.0
    if not model.of_images:
        head = float(embedding(model))
    block = _block(recipe)
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
    summed = FLOAT32
    if "peer-copies" in chosen(recipe):
        # The optimization reduces gradients as they are.
        summed = 0
    gathered = ends * head * compute
    gathered += reduced * head * (compute + FLOAT32)
    gathered += block * (3 * compute + summed)
    return (gathered + converted) / tensor


def width_of(dtype: str) -> int:
    """Return the bytes of one value of ``dtype``."""
    if dtype in ("float32", "fp32"):
        return FLOAT32
    return BFLOAT16


class Rules:
    """The rules of a backend that trains text with our own loop. Other backends override what
    differs.

    With ``trains_every_token``, it cannot train answers only. ``unverified`` says why the gradients
    of one rank cannot be compared, if they cannot.
    """

    trains_every_token = False
    unverified = ""

    def precision(self, recipe: Recipe) -> str:
        """Return the precision of linear layers' products, by the backend's own settings."""
        if recipe.find(f"{recipe.backend}.training.fp8", "none") != "none":
            return "fp8"
        dtype = recipe.find(f"{recipe.backend}.training.dtype", "bfloat16")
        return DTYPES.get(dtype, dtype)

    def compiled(self, recipe: Recipe) -> bool:
        """Return whether torch.compile compiles the model's blocks."""
        return recipe.find(f"{recipe.backend}.training.compile", False)

    def faults(self, recipe: Recipe) -> Iterable[Fault]:
        """Yield what the recipe asks for and the backend does not compute."""
        for key, row in recipe.knows.refused.items():
            full = f"{recipe.backend}.{key}"
            if recipe.find(full, row["but"]) != row["but"]:
                yield full, row["why"], row.get("remedy")

    def unjudged(self, recipe: Recipe) -> str | None:
        """Return why the reference cannot repeat such a run, in a sentence, or None."""
        if recipe.architecture.moe.auxiliary_loss > 0:
            return "the reference does not balance experts as transformers does"
        return None

    def blocks_judged(self, recipe: Recipe) -> bool:
        """Whether the reference can repeat what each block computes."""
        dropout = recipe.mode == "lora" and recipe.find(f"{recipe.backend}.lora.dropout", 0.0)
        return not (self.compiled(recipe) or dropout) and recipe.degree("cp") == 1

    def layout(self, recipe: Recipe) -> Mapping[str, Any]:
        """Return what a resumed run must share with the layout of the one that saved."""
        return {}

    def memory(self, recipe: Recipe, batch: int) -> Memory:
        """Predict the peak of one rank, in bytes, with micro-batches of ``batch``."""
        head = recipe.backend
        model = recipe.architecture
        tokens = batch * recipe.seq_len
        total = float(size(model).total)
        trained = recipe.mode != "lora"
        width = width_of(recipe.find(f"{head}.training.master_dtype", "float32"))
        compute = width_of(recipe.find(f"{head}.training.dtype", "bfloat16"))
        weights = width * total * recipe.degree("replicas") / recipe.world_size
        gathered = _gathered(recipe, compute, cast=width != compute)
        if "frozen-weights" in chosen(recipe):
            # Every rank has all weights, in the computing precision.
            weights = compute * total
            gathered = 0.0
        gradients = 0.0
        if trained:
            gradients = weights
        activations = _saved(recipe) * tokens * compute + _copies_in_eight(recipe)
        reused = 0.0
        if recipe.world_size == 1 and trained and recipe.accumulation == 1:
            # The gradient of the embedding is computed last, in the memory of activations, in both
            # precisions.
            reused = min(activations, embedding(model) * float(compute + FLOAT32))
        return Memory(
            weights=weights,
            gradients=gradients,
            optimizer=2 * gradients,
            unsharded=gathered,
            activations=activations,
            reused=reused,
            loss=_loss(recipe, tokens),
            standing=recipe.accumulation > 1,
        )


def _gathered(recipe: Recipe, compute: int, *, cast: bool) -> float:
    """Return the bytes of gathered weights, which stay if they are not sharded again."""
    model = recipe.architecture
    total = float(size(model).total)
    frozen = recipe.mode == "lora"
    alone = recipe.world_size == 1
    stay = not recipe.find(f"{recipe.backend}.sharding.reshard_after_forward", True)
    if stay and alone and frozen:
        # All weights but the embedding stay in the computing precision.
        return compute * (total - embedding(model))
    ends = _ends(model)
    if alone and frozen:
        # One rank gathers nothing, and reads the rows of a frozen embedding in place.
        ends = 1
    gathered = unsharded(recipe, compute, alone=frozen, ends=ends, cast=cast)
    if stay:
        gathered += compute * total
    return gathered


def _saved(recipe: Recipe) -> float:
    """Return the elements per token that all layers keep for the backward pass."""
    model = recipe.architecture
    if model.of_images:
        layers = model.dit.double_layers + model.dit.single_layers
        layer = FACTORS["flux_layer"] * model.hidden_size
    else:
        layers = model.layers
        layer = _layer(recipe)
    if recipe.find(f"{recipe.backend}.training.recompute", "none") == "full":
        return layers * model.hidden_size + layer * FACTORS["recomputed"]
    return layers * layer


def _layer(recipe: Recipe) -> float:
    model = recipe.architecture
    adapted = recipe.mode == "lora"
    # Adapters need the inputs of layers in the computing precision.
    eight = recipe.precision == "fp8" and not adapted
    frozen_experts = model.moe.experts > 0 and adapted
    routed = not frozen_experts
    elements = layer_elements(model, eight=eight, routed=routed, inputs=_keeps_inputs(recipe))
    if not recipe.find(f"{recipe.backend}.training.compile", False):
        elements *= FACTORS["eager"]
    if frozen_experts:
        # A gradient passes their activation and the weighting of their outputs, which no adapter
        # reads.
        rows = model.moe.top_k * model.sparse_layers / model.layers
        elements += rows * (3 * model.moe.ffn_size + model.hidden_size)
    if model.sinks:
        # Only transformers' eager attention computes them, which keeps its scores.
        elements += FACTORS["scores"] * model.heads * recipe.seq_len
    return elements


def _keeps_inputs(recipe: Recipe) -> bool:
    # Compiled layers of fine-tuning compute norms and activation functions again.
    return recipe.backend != "finetune" or not recipe.find("finetune.training.compile", False)


def _copies_in_eight(recipe: Recipe) -> float:
    if recipe.precision != "fp8":
        return 0.0
    copies = copies_in_eight(recipe.architecture)
    if "frozen-weights" in chosen(recipe):
        # Weights that never change stay in both layouts.
        return 2 * copies
    if recipe.find(f"{recipe.backend}.training.recompute", "none") == "full":
        return 0.0
    # Others stay in the layout of the backward pass.
    return copies


def _loss(recipe: Recipe, tokens: float) -> float:
    model = recipe.architecture
    if "linear-cross-entropy" in chosen(recipe):
        return fused_loss(model, tokens)
    if model.has_formula:
        tokens = min(tokens, recipe.find(f"{recipe.backend}.loss_chunk", 2048))
    return tokens * model.vocab_size * FACTORS["eager_loss"]
