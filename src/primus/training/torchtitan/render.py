"""Rendering a job for torchtitan 0.2.2: its TOML file, and its model's arguments from the recipe's sizes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from primus.recipes.architecture import Architecture
from primus.recipes.family import family
from primus.recipes.setting import Value

if TYPE_CHECKING:
    from primus.training.job import Job

_FILE = "torchtitan.toml"
# The names under which torchtitan finds the recipe's model and corpus.
# Start from the weights in the folder of the tokenizer.
INITIAL = "torchtitan.checkpoint.initial_load_in_hf"
FLAVOR, DATASET = "recipe", "recipe_corpus"


def model_arguments(model: Architecture, precision: str) -> dict[str, Any]:
    """Return the arguments of torchtitan's model class; ``moe_args`` and ``rope_scaling_args`` as mappings."""
    common = {
        "dim": model.hidden_size,
        "n_layers": model.layers,
        "n_heads": model.heads,
        "vocab_size": model.vocab_size,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        **({"max_seq_len": model.max_seq_len} if model.max_seq_len else {}),
    }
    return {**common, **_ARGUMENTS[model_name(model)](model, precision)}


def model_name(model: Architecture) -> str:
    """Return torchtitan's name of the model's class."""
    return family(model.family).backends["torchtitan"].model


def _llama(model: Architecture, _precision: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "n_kv_heads": model.kv_heads,
        # The width is multiplier × 8/3 × dim, rounded up to a multiple. With a small multiple, it is the width itself.
        "multiple_of": model.ffn_size,
        "ffn_dim_multiplier": 0.01,
    }
    scaling = model.rope_scaling
    if scaling.kind == "llama3":
        arguments["rope_scaling_args"] = {
            "scaling_factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    else:
        # Its model always scales; a factor of 1 changes nothing.
        arguments["rope_scaling_args"] = {"scaling_factor": 1.0}
    return arguments


def _qwen(model: Architecture, precision: str) -> dict[str, Any]:
    experts = {"moe_enabled": True, "moe_inter_dim": model.moe.ffn_size, "moe_args": _experts(model, precision)}
    return {
        "n_kv_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_dim": model.ffn_size,
        "qk_norm": model.qk_norm,
        "enable_weight_tying": model.tied_embeddings,
        **(experts if model.moe.experts else {}),
    }


def _experts(model: Architecture, precision: str) -> dict[str, Any]:
    moe = model.moe
    return {
        "num_experts": moe.experts,
        "num_shared_experts": moe.shared_experts,
        "top_k": moe.top_k,
        "score_func": moe.score,
        "route_norm": moe.normalize_top_k,
        "route_scale": moe.route_scale,
        "score_before_experts": False,
        "load_balance_coeff": moe.auxiliary_loss or None,
        # On a GPU, torchtitan's product of all experts computes in bfloat16, whatever the precision of the run.
        "use_grouped_mm": precision != "fp32",
        **({"num_expert_groups": moe.groups, "num_limited_groups": moe.top_groups} if moe.groups > 1 else {}),
    }


def _deepseek(model: Architecture, precision: str) -> dict[str, Any]:
    moe, mla, scaling = model.moe, model.mla, model.rope_scaling
    return {
        "inter_dim": model.ffn_size,
        "moe_inter_dim": moe.ffn_size,
        "n_dense_layers": moe.dense_layers,
        "moe_args": _experts(model, precision),
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        **(
            {
                "original_seq_len": scaling.original_max_position,
                "rope_factor": scaling.factor,
                "beta_fast": int(scaling.beta_fast),
                "beta_slow": int(scaling.beta_slow),
                "mscale": scaling.mscale,
            }
            if scaling.kind == "yarn"
            else {"rope_factor": 1.0}
        ),
    }


_ARGUMENTS = {"llama3": _llama, "qwen3": _qwen, "deepseek_v3": _deepseek}


def files(job: Job) -> dict[str, str]:
    """Return the file that the ranks read: name → text."""
    return {_FILE: toml(job)}


def arguments(job: Job) -> list[str]:
    """Return the command-line arguments of each rank."""
    return ["--job.config_file", str(job.output / _FILE)]


def toml(job: Job) -> str:
    """Return the text of ``torchtitan.toml``."""
    settings: dict[str, Value] = {**job.recipe.section("torchtitan"), **_owned(job)}
    # JSON's lists, text, numbers and booleans are valid TOML.
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in settings.items() if value is not None}
    return "".join(f"{key} = {text}\n" for key, text in texts.items())


def _owned(job: Job) -> dict[str, Value]:
    recipe = job.recipe
    owned: dict[str, Value] = {
        "job.dump_folder": str(job.output),
        "job.description": recipe.name,
        "model.name": model_name(recipe.architecture),
        "model.flavor": FLAVOR,
        "model.hf_assets_path": str(recipe.asset("tokenizer") or ""),
        "training.dataset": DATASET,
        "training.dataset_path": str(recipe.asset("corpus") or recipe.get("assets.corpus", str)),
        "metrics.log_freq": 1,
        "metrics.disable_color_printing": True,
        "checkpoint.enable": recipe.find("torchtitan.checkpoint.interval", 0) > 0,
    }
    if "torchtitan.checkpoint.last_save_model_only" not in recipe.settings:
        # By default, torchtitan 0.2.2 saves only weights after the last step, and no run can resume from those.
        owned["checkpoint.last_save_model_only"] = False
    if job.resume_from is None and recipe.find(INITIAL, False):
        # Otherwise, torchtitan trains random weights without a word if no checkpoint is saved.
        owned |= {"checkpoint.load_only": not owned["checkpoint.enable"], "checkpoint.enable": True}
    if job.resume_from is not None:
        owned |= {
            "checkpoint.initial_load_in_hf": False,
            "checkpoint.load_only": not owned["checkpoint.enable"],
            "checkpoint.enable": True,
            "checkpoint.initial_load_path": str(job.resume_from),
            "checkpoint.initial_load_model_only": False,
        }
    return owned
