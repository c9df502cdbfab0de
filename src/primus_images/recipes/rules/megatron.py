"""The rules of Megatron (megatron-core 0.16.1), and its memory."""

from collections.abc import Iterable, Mapping
from typing import Any

from primus_images.recipes.architecture import size
from primus_images.recipes.choose import CPU
from primus_images.recipes.faults import Fault
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import loop as terms
from primus_images.recipes.rules.loop import BFLOAT16, FACTORS, FLOAT32, Memory, Rules


class Megatron(Rules):
    """The rules of Megatron. A checkpoint fits no other layout than its own."""

    unverified = (
        "Megatron adds gradients in buffers of its own, where those of one rank cannot be compared"
    )

    def precision(self, recipe: Recipe) -> str:
        """Return the precision. ``model.fp8`` enables FP8 (Transformer Engine),
        ``model.fp8_recipe`` its MX form.
        """
        if recipe.section("megatron").get("model.fp8"):
            if recipe.find("megatron.model.fp8_recipe", "") == "mxfp8":
                return "mxfp8"
            return "fp8"
        return super().precision(recipe)

    def unjudged(self, recipe: Recipe) -> str | None:
        """Return the reason. The reference has two of Megatron's balancing losses."""
        kind = recipe.section("megatron").get("model.moe_router_load_balancing_type", "none")
        if kind not in ("aux_loss", "seq_aux_loss", "none"):
            return f"the reference does not balance experts by {kind}"
        return None

    def layout(self, recipe: Recipe) -> Mapping[str, Any]:
        """Return the whole layout. A checkpoint has each rank's tensors as in memory, so it fits no
        other one.
        """
        sharded = recipe.find("megatron.ddp.use_distributed_optimizer", True)
        return {
            **{f"layout.{kind}": recipe.degree(kind) for kind in ("tp", "pp", "ep")},
            "layout.virtual_pp": recipe.find(
                "megatron.model.virtual_pipeline_model_parallel_size", 1
            ),
            **({"layout.ranks": recipe.world_size} if sharded else {}),
            "layout.dtype": recipe.find("megatron.training.dtype", "bfloat16"),
        }

    def faults(self, recipe: Recipe) -> Iterable[Fault]:
        """Return what the recipe asks for and Megatron does not compute."""
        model = recipe.architecture
        latent = recipe.architecture.mla.kv_lora_rank > 0
        keys = {kind: f"megatron.{key}" for kind, key in recipe.knows.degrees.items()}
        if model.moe.score == "sigmoid" and not model.moe.normalize_top_k:
            why = "Megatron always normalizes the chosen sigmoid scores"
            yield "model.moe.score", why, "model.moe.normalize_top_k=true"
        if recipe.degree("cp") > 1:
            yield keys["cp"], "Megatron splits sequences in Transformer Engine alone", "use TP"
        yield from super().faults(recipe)
        # A file's number may be of the whole model, of which the command line takes fewer layers.
        again = recipe.settings.get("megatron.model.recompute_num_layers")
        if again and again.origin.startswith("command") and int(str(again.value)) > model.layers:
            why = f"{again.value} is more than the model's {model.layers} layers"
            yield (
                "megatron.model.recompute_num_layers",
                why,
                f"model.recompute_num_layers={model.layers} at most",
            )
        if recipe.find("megatron.torch_fsdp2", False):
            for kind in ("tp", "pp", "cp", "ep"):
                if recipe.degree(kind) > 1:
                    yield (
                        keys[kind],
                        "torch_fsdp2 shares out the whole model over all ranks",
                        f"{kind}=1",
                    )
            for key, value in recipe.section("megatron.ddp").items():
                if value and key != "grad_reduce_in_fp32":
                    why = "is about Megatron's own buffers, and torch_fsdp2 has none"
                    yield f"megatron.ddp.{key}", why, f"ddp.{key}=false"
        if latent and recipe.degree("tp") > 1 and not recipe.knows.latent_tp:
            # megatron-core 0.16.1 without Transformer Engine, as the reference found: gradients are
            # off by 1 to 3 %.
            why = (
                "latent attention shared by Megatron's ranks gets wrong gradients of "
                "kv_a_proj_with_mqa"
            )
            yield keys["tp"], why, "tp=1"
        if recipe.gpu == CPU and recipe.degree("tp") > 1 and recipe.degree("ep") > 1:
            why = (
                "gloo, which connects ranks on a CPU, cannot gather the unequal shares of TP "
                "with EP"
            )
            yield keys["ep"], why, "tp=1 or ep=1"

    def memory(self, recipe: Recipe, batch: int) -> Memory:
        """Predict the peak of one rank. Only the optimizer's float32 copies are sharded."""
        model = recipe.architecture
        tokens = batch * recipe.seq_len / recipe.degree("cp")
        total = float(size(model).total)
        width = terms.width_of(recipe.find("megatron.training.dtype", "bfloat16"))
        if recipe.find("megatron.ddp.grad_reduce_in_fp32", True):
            reduced = FLOAT32
        else:
            reduced = width
        tensor = recipe.degree("tp")
        stages = recipe.degree("pp")
        parts = tensor * stages * recipe.degree("ep")
        states: float = 2 * FLOAT32 + (FLOAT32 if width == BFLOAT16 else 0)
        if recipe.find("megatron.optimizer.optimizer_cpu_offload", False):
            states *= 1 - recipe.find("megatron.optimizer.optimizer_offload_fraction", 0.0)
        sharded = recipe.find("megatron.ddp.use_distributed_optimizer", True)
        fully = recipe.find("megatron.torch_fsdp2", False)
        layers = model.layers / stages
        again, group = _recomputed(recipe, layers)
        layer = terms.layer_elements(model, eight=False) * FACTORS["megatron_eager"]
        once = 0
        if again:
            once = group * layer * FACTORS["recomputed"]
        saved = (layers - again) * layer + again / group * model.hidden_size + once
        in_flight = min(stages, max(1, recipe.accumulation))
        return Memory(
            weights=width * total / (recipe.world_size if fully else parts),
            gradients=reduced * total / (recipe.world_size if fully else parts),
            optimizer=states * total / (recipe.world_size if sharded or fully else parts),
            unsharded=terms.unsharded(recipe, width) if fully else 0,
            activations=saved * in_flight * tokens * width / tensor,
            loss=tokens * model.vocab_size * FACTORS["megatron_loss"] / tensor,
        )


def _recomputed(recipe: Recipe, layers: float) -> tuple[float, int]:
    # How many of a stage's layers are recomputed in full, and how many at a time.
    if recipe.find("megatron.training.recompute", "none") == "full":
        return layers, 1
    if recipe.find("megatron.model.recompute_granularity", "none") != "full":
        return 0.0, 1
    named = recipe.find("megatron.model.recompute_num_layers", 0)
    # "block" recomputes that many layers one by one; "uniform" recomputes all layers in groups of
    # that many.
    block = recipe.find("megatron.model.recompute_method", "") == "block"
    if block:
        return (min(layers, named), 1)
    return (layers, max(1, named))
