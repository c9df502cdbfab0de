"""The rules of our own loop on FSDP2, which are the defaults of every backend, and its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from primus.recipes import memory as terms
from primus.recipes.architecture import size
from primus.recipes.faults import Fault
from primus.recipes.memory import Memory
from primus.recipes.recipe import Recipe
from primus.turbo.optimizations import chosen

# The precision of matrix products in a dtype of torch.
DTYPES: Mapping[str, str] = {"float32": "fp32", "bfloat16": "bf16"}
# Elements per token and hidden unit that one layer of FLUX keeps for its backward pass (fitted).
_FLUX_LAYER = 20


class Rules:
    """The rules of a backend that trains text with our own loop. Other backends override what differs.

    With ``divides_documents``, every data-parallel rank needs a document of its own.
    """

    divides_documents = False

    def precision(self, recipe: Recipe) -> str:
        """Return the precision of the linear layers' matrix products, derived from the backend's own settings."""
        if recipe.find(f"{recipe.backend}.training.fp8", "none") != "none":
            return "fp8"
        dtype = recipe.find(f"{recipe.backend}.training.dtype", "bfloat16")
        return DTYPES.get(dtype, dtype)

    def compiled(self, recipe: Recipe) -> bool:
        """Return whether torch.compile compiles the model's blocks."""
        return recipe.find(f"{recipe.backend}.training.compile", False)

    def faults(self, recipe: Recipe) -> Iterable[Fault]:
        """Return what the recipe asks for and the backend does not compute: key, reason and remedy."""
        return ()

    def unjudged(self, recipe: Recipe) -> str | None:
        """Return why the reference cannot repeat such a run of this backend, in a sentence, or None."""
        return None

    def blocks_judged(self, recipe: Recipe) -> bool:
        """Whether the reference can repeat what each block computes."""
        return not self.compiled(recipe) and recipe.degree("cp") == 1

    def layout(self, recipe: Recipe) -> Mapping[str, Any]:
        """Return the fields of the ranks' layout that a resumed run must share with the one that saved."""
        return {}

    def memory(self, recipe: Recipe, batch: int) -> Memory:
        """Predict the peak of one rank, in bytes, with micro-batches of ``batch``."""
        head, model = recipe.backend, recipe.architecture
        tokens, total = batch * recipe.seq_len, float(size(model).total)
        width = terms.width_of(recipe.find(f"{head}.training.master_dtype", "float32"))
        compute = terms.width_of(recipe.find(f"{head}.training.dtype", "bfloat16"))
        compiled = recipe.find(f"{head}.training.compile", False)
        recomputed = recipe.find(f"{head}.training.recompute", "none") == "full"
        shard = total * recipe.degree("replicas") / recipe.world_size
        trained = 0.0 if recipe.mode == "lora" else 1.0
        if model.of_images:
            layers, layer = model.dit.double_layers + model.dit.single_layers, float(_FLUX_LAYER * model.hidden_size)
        else:
            layers = model.layers
            # Adapters need the inputs of layers in the computing precision.
            eight = recipe.precision == "fp8" and trained > 0
            layer = terms.layer_elements(model, eight=eight) * (1 if compiled else terms.EAGER)
        saved = layers * model.hidden_size + layer * terms.RECOMPUTED if recomputed else layers * layer
        # Every rank has all weights, in the computing precision.
        whole = "frozen-weights" in chosen(recipe)
        # Weights that never change stay in FP8 in both layouts, others in that of the backward pass.
        layouts = 2 if whole else int(not recomputed)
        copies = layouts * terms.copies_in_eight(model) if recipe.precision == "fp8" else 0.0
        chunk = min(tokens, recipe.find(f"{head}.loss_chunk", 2048))
        # One rank gathers nothing, and reads the rows of a frozen embedding in place.
        ends = 2 if trained or recipe.world_size > 1 else 1
        stay = not recipe.find(f"{head}.sharding.reshard_after_forward", True)
        gathered = terms.unsharded(recipe, compute, alone=not trained, ends=ends, cast=width != compute)
        activations = saved * tokens * compute + copies
        reused = 0.0
        if whole:
            width, shard, gathered = compute, total, 0.0
        elif stay and recipe.world_size == 1 and not trained:
            # All weights but the embedding, including the output layer and the blocks, stay in the computing precision.
            gathered = compute * (total - model.vocab_size * model.hidden_size)
        elif stay:
            gathered += compute * total
        if recipe.world_size == 1 and trained and recipe.accumulation == 1:
            # The gradient of the embedding is computed last, in the memory of activations, in both precisions.
            reused = min(activations, model.vocab_size * model.hidden_size * float(compute + terms.FLOAT32))
        loss: float = chunk * model.vocab_size * terms.EAGER_LOSS
        if "linear-cross-entropy" in chosen(recipe):
            loss = terms.fused_loss(model, tokens)
        return Memory(
            weights=width * shard,
            gradients=trained * width * shard,
            optimizer=trained * 2 * width * shard,
            unsharded=gathered,
            activations=activations,
            reused=reused,
            loss=loss,
        )
