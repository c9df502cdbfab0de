"""What a backend computes from a recipe: one module per backend that differs.

It also predicts whether a recipe fits the memory of its GPU, from the recipe alone.

Rules need no torch. What starts a run of a backend is in ``primus_images.training``, which imports
this; never the reverse.
"""

from bisect import bisect_right
from collections.abc import Mapping

from primus_images.gpus.table import generation
from primus_images.recipes.choose import CPU
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules.loop import Memory, Rules
from primus_images.recipes.rules.megatron import Megatron
from primus_images.recipes.rules.torchtitan import Torchtitan
from primus_images.recipes.schema import backends

RULES: Mapping[str, Rules] = {
    **dict.fromkeys(backends(), Rules()),
    "torchtitan": Torchtitan(),
    "megatron": Megatron(),
}
# The share of a GPU's memory that training can use. The rest is for the context, NCCL and
# fragmentation.
USABLE = 0.95
_MOST = 8192


def rules_of(recipe: Recipe) -> Rules:
    """Return the rules of the recipe's backend."""
    return RULES[recipe.backend]


def predict(recipe: Recipe, micro_batch: int | None = None) -> Memory:
    """Predict the peak of one rank of ``recipe``. ``micro_batch`` replaces the recipe's.

    With pipeline stages, this is the first stage, which keeps the activations of as many
    micro-batches as there are stages.
    """
    if micro_batch is None:
        micro_batch = recipe.local_batch
    return rules_of(recipe).memory(recipe, micro_batch)


def fits(memory: Memory, available: float) -> bool:
    """Whether a run with this memory starts on a GPU of which ``available`` bytes are usable.

    If the peak does not fit but the least does, the allocator has to release memory in every step,
    which costs speed. Gradients that are always there leave it nothing to release.
    """
    if memory.standing:
        return memory.peak <= available
    return memory.least <= available / USABLE


def largest_batch(recipe: Recipe, available: float) -> int:
    """Return the largest micro batch whose peak is within ``available`` bytes, or 0."""
    return bisect_right(range(1, _MOST), available, key=lambda batch: predict(recipe, batch).peak)


def gpu_bytes(name: str) -> float | None:
    """Return the bytes of one GPU's memory as PyTorch reports them; None for a CPU."""
    if name == CPU:
        return None
    return generation(name).memory.gib * 2**30


def holds(recipe: Recipe) -> bool:
    """Whether a run with some micro batch starts on the recipe's GPU; on a CPU, always."""
    total = gpu_bytes(recipe.gpu)
    return total is None or fits(predict(recipe, 1), USABLE * total)
