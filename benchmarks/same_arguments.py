"""Compare, key by key, what a recipe makes a backend compute with what Primus would compute, under Primus's names.

This independently checks ``primus.compat``: it starts from the backends' arguments (``render``), and uses the names
that Megatron-LM's arguments and Megatron Core's classes share.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primus.recipes.architecture import built
from primus.recipes.recipe import Recipe
from primus.training.job import Job
from primus.training.loop.config import LoopConfig
from primus.training.megatron import render
from primus.training.torchtitan import render as titan

# Megatron-LM's argument ← the name in Megatron Core or in our loop.
_MEGATRON = {
    "num_experts": "num_moe_experts", "norm_epsilon": "layernorm_epsilon", "train_iters": "steps",
    "seq_length": "seq_len", "lr_decay_style": "lr_schedule", "lr_warmup_iters": "warmup_steps",
    "use_rope_scaling": "rope_scaling", "use_torch_fsdp2": "torch_fsdp2",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage", "swiglu": "gated_linear_unit",
    "lr_decay_iters": "decay_steps", "ddp_bucket_size": "bucket_size",
}  # fmt: skip
# Pairs of values with the same meaning in Megatron-LM and in the arguments of Megatron Core.
_ALIKE: dict[str, tuple[Any, ...]] = {
    "moe_router_topk_scaling_factor": (None, 1.0), "lr_decay_iters": (None, 0), "rope_type": (None, "yarn", "rope"),
    "num_virtual_stages_per_pipeline_rank": (None, 1), "q_lora_rank": (None, 0),
    "moe_router_num_groups": (None, 1), "moe_router_group_topk": (None, 1),
}  # fmt: skip


def ours(recipe: Recipe) -> dict[str, Any]:
    """Return the backend's arguments for ``recipe``, under Primus's names."""
    if recipe.backend == "torchtitan":
        text = titan.toml(Job(name="measure", recipe=recipe, output=Path("measure")))
        return dict(_flat(tomllib.loads(text)))
    config = recipe.section("megatron")
    training = built(LoopConfig, render.section(config, "training"))
    model = recipe.architecture
    found = {
        "sequence_parallel": recipe.degree("tp") > 1,
        **vars(training),
        **render.own(config),
        **render.optimizer(training, True),
        **render.ddp(config),
        **render.transformer(model, training),
        **render.gpt(model, training.seq_len),
        **render.section(config, "model"),
    }
    found["untie_embeddings_and_output_weights"] = not found["share_embeddings_and_output_weights"]
    found["grad_reduce_in_bf16"] = not found["grad_reduce_in_fp32"]
    found["mock_data"] = recipe.get("assets.corpus", str) == "mock"
    for theirs, name in _MEGATRON.items():
        if name in found:
            found[theirs] = found[name]
    # FP8 of our own loop, which is not Megatron's.
    found["fp8"] = config.get("model.fp8")
    return found


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Any:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def compared(primus: Mapping[str, Any], recipe: Recipe) -> tuple[int, dict[str, tuple[Any, Any]]]:
    """Return how many keys both sides have, and the differing keys with their values: Primus's and ours.

    Keys that primus sets regardless of the recipe (``owned`` in ``recipes/backends.yaml``) are left out.
    """
    found = ours(recipe)
    owned = {*recipe.knows.owned, "job.description"} if recipe.backend == "torchtitan" else set()
    both = {key: (value, found[key]) for key, value in primus.items() if key in found and key not in owned}
    return len(both), {key: pair for key, pair in both.items() if not _same(key, *pair, primus)}


def _same(key: str, one: Any, other: Any, primus: Mapping[str, Any]) -> bool:
    if one is None and (expected := _filled_in(key, primus)) is not None:
        return bool(other == expected)
    if _is_moot(key, primus):
        return True
    if key == "sequence_parallel" and primus["tensor_model_parallel_size"] == 1:
        # Megatron-LM disables it.
        return not other
    if key == "model.converters":
        # A name of v25.7, and a name for experts, which `import-exp` uses if the model has any.
        one = ["quantize.linear.float8" if name == "float8" else name for name in one if "grouped_mm" not in name]
    if isinstance(one, bool) or isinstance(other, bool):
        return bool(one) == bool(other)
    if key == "moe_layer_freq":
        return bool(_layers(one, len(other)) == other)
    alike = _ALIKE.get(key, ())
    return bool(one == other) or (one in alike and other in alike)


def _filled_in(key: str, primus: Mapping[str, Any]) -> Any:
    """Return the value that Megatron-LM's ``validate_args`` uses for a null, or None."""
    if key in ("kv_channels", "ffn_hidden_size", "num_query_groups", "moe_ffn_hidden_size", "vocab_size"):
        hidden, heads = primus["hidden_size"], primus["num_attention_heads"]
        ffn = primus["ffn_hidden_size"] or int(4 * hidden * 2 / 3) // 64 * 64
        filled = {"kv_channels": hidden // heads, "ffn_hidden_size": ffn, "moe_ffn_hidden_size": ffn}
        return {**filled, "num_query_groups": heads}.get(key)
    return None


def _is_moot(key: str, primus: Mapping[str, Any]) -> bool:
    """Return whether other keys make a key ineffective: no experts, or a vocabulary size taken from the tokenizer."""
    if key.startswith("moe_") and not primus.get("num_experts"):
        return True
    if key == "rope_scaling_factor" and not primus.get("use_rope_scaling"):
        return True
    if key == "kv_channels" and primus.get("multi_latent_attention"):
        return True
    if key.startswith("recompute_") and primus.get("recompute_num_layers") == 0:
        return True
    return key == "vocab_size" and primus["vocab_size"] is None


def _layers(pattern: Any, layers: int) -> list[int]:
    """Megatron-LM evaluates the text. A number n means that every n-th layer has experts."""
    if isinstance(pattern, str):
        found = eval(pattern, {"__builtins__": {}})
        return list(found) if isinstance(found, list) else _layers(found, layers)
    return [1 if layer % pattern == 0 else 0 for layer in range(layers)]
