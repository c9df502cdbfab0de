"""A job for torchtitan 0.2.2: its TOML file, and the arguments of its model."""

import json
from pathlib import Path
from typing import Any

from primus_images.recipes.architecture import Architecture, arguments as arguments_of
from primus_images.recipes.family import family
from primus_images.recipes.setting import Value
from primus_images.training.run.job import Job
from primus_images.yamlfile import read_values

FILE = "torchtitan.toml"
_ARGUMENTS = Path(__file__).with_name("arguments.yaml")
# Start from the weights in the folder of the tokenizer.
INITIAL = "torchtitan.checkpoint.initial_load_in_hf"
# The names under which torchtitan finds the recipe's model and corpus.
FLAVOR = "recipe"
DATASET = "recipe_corpus"


def model_arguments(model: Architecture, precision: str) -> dict[str, Any]:
    """Return the arguments of torchtitan's model class.

    ``moe_args`` and ``rope_scaling_args`` are mappings.
    """
    name = model_name(model)
    values = arguments_of(model, _ARGUMENTS, "model", name)
    if model.max_seq_len:
        values["max_seq_len"] = model.max_seq_len
    if name == "llama3":
        return values | _of_llama(model)
    if name == "deepseek_v3":
        return values | _rope_of_deepseek(model) | {"moe_args": _experts(model, precision)}
    if name == "llama4":
        return values | _of_llama4(model) | {"moe_args": _experts(model, precision)}
    if model.moe.experts:
        values["moe_enabled"] = True
        values["moe_inter_dim"] = model.moe.ffn_size
        values["moe_args"] = _experts(model, precision)
    return values


def _of_llama(model: Architecture) -> dict[str, Any]:
    # Its model always scales; a factor of 1 changes nothing.
    rope: dict[str, Any] = {"scaling_factor": 1.0}
    if model.rope_scaling.kind == "llama3":
        rope = arguments_of(model, _ARGUMENTS, "llama_rope")
    # The width is multiplier × 8/3 × dim, rounded up to a multiple. With a small multiplier, it is
    # the multiple.
    return {"ffn_dim_multiplier": 0.01, "rope_scaling_args": rope}


def _of_llama4(model: Architecture) -> dict[str, Any]:
    # Its dense layers have int(multiplier × int(8/3 × dim)) units, of which an expert has an equal
    # share with the others of its token. Half a unit more keeps the product above the number.
    parts = model.moe.top_k + model.moe.shared_experts
    width = int(2 * 4 * model.hidden_size / 3)
    multiplier = (parts * model.moe.ffn_size + 0.5) / width
    values: dict[str, Any] = {"ffn_dim_multiplier": multiplier, "multiple_of": 1}
    if model.rope_scaling.kind == "llama3":
        values["rope_scaling_args"] = arguments_of(model, _ARGUMENTS, "llama_rope")
    return values


def _rope_of_deepseek(model: Architecture) -> dict[str, Any]:
    scaling = model.rope_scaling
    if scaling.kind != "yarn":
        return {"rope_factor": 1.0}
    rope = arguments_of(model, _ARGUMENTS, "yarn")
    rope["beta_fast"] = int(scaling.beta_fast)
    rope["beta_slow"] = int(scaling.beta_slow)
    return rope


def model_name(model: Architecture) -> str:
    """Return torchtitan's name of the model's class."""
    return family(model.family).backends["torchtitan"].model


def _experts(model: Architecture, precision: str) -> dict[str, Any]:
    values = arguments_of(model, _ARGUMENTS, "experts")
    if model.moe.groups > 1:
        values |= arguments_of(model, _ARGUMENTS, "groups")
    values["score_before_experts"] = model.moe.weighted_inputs
    values["load_balance_coeff"] = model.moe.auxiliary_loss or None
    # On a GPU, torchtitan's product of all experts computes in bfloat16, whatever the precision of
    # the run.
    values["use_grouped_mm"] = precision != "fp32"
    return values


def files(job: Job) -> dict[str, str]:
    """Return name → text of the files that the ranks read."""
    return {FILE: toml(job)}


def toml(job: Job) -> str:
    """Return the text of ``torchtitan.toml``."""
    recipe = job.recipe
    by_time = "saving.minutes" in recipe.settings
    evaluates = bool(recipe.section("eval"))
    enabled = by_time or evaluates or recipe.find("torchtitan.checkpoint.interval", 0) > 0
    tables: Any = read_values(_ARGUMENTS).data
    settings: dict[str, Value] = {
        **tables["usual"],
        **recipe.section("torchtitan"),
        **tables["fixed"],
        "job.dump_folder": str(job.output),
        "job.description": recipe.name,
        "model.name": model_name(recipe.architecture),
        "model.flavor": FLAVOR,
        "model.hf_assets_path": str(recipe.asset("tokenizer") or ""),
        "training.dataset": DATASET,
        "training.dataset_path": str(recipe.asset("corpus") or recipe.get("assets.corpus", str)),
        "checkpoint.enable": enabled,
    }
    if by_time or evaluates:
        # Any step can be saved; the trainer says which is.
        settings["checkpoint.interval"] = 1
    if "saving.keep" in recipe.settings:
        settings["checkpoint.keep_latest_k"] = recipe.get("saving.keep", int)
    if job.resume_from is not None or recipe.find(INITIAL, False):
        # Otherwise, torchtitan trains random weights without a word if no checkpoint is saved.
        settings["checkpoint.load_only"] = not enabled
        settings["checkpoint.enable"] = True
    if job.resume_from is not None:
        settings |= tables["resuming"]
        settings["checkpoint.initial_load_path"] = str(job.resume_from)
    lines = []
    for key, value in settings.items():
        if value is not None:
            # JSON's lists, text, numbers and booleans are valid TOML.
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}\n")
    return "".join(lines)
