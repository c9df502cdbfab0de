"""Rendering a job for torchtitan 0.2.2: its TOML file, and its model's arguments from the recipe's
sizes.
"""

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
    """Return the arguments of torchtitan's model class; ``moe_args`` and ``rope_scaling_args`` as
    mappings.
    """
    values = arguments_of(model, _ARGUMENTS, "model")
    if model.max_seq_len:
        values["max_seq_len"] = model.max_seq_len
    name = model_name(model)
    if name == "llama3":
        scaled = model.rope_scaling.kind == "llama3"
        # Its model always scales; a factor of 1 changes nothing.
        if scaled:
            turned = arguments_of(model, _ARGUMENTS, "llama_rope")
        else:
            turned = {"scaling_factor": 1.0}
        # The width is multiplier × 8/3 × dim, rounded up to a multiple. With a small multiplier, it
        # is the multiple.
        return (
            values
            | arguments_of(model, _ARGUMENTS, name)
            | {"ffn_dim_multiplier": 0.01, "rope_scaling_args": turned}
        )
    values |= arguments_of(model, _ARGUMENTS, name)
    if name == "deepseek_v3":
        scaling = model.rope_scaling
        rope = {"rope_factor": 1.0}
        if scaling.kind == "yarn":
            betas = {"beta_fast": int(scaling.beta_fast), "beta_slow": int(scaling.beta_slow)}
            rope = arguments_of(model, _ARGUMENTS, "yarn") | betas
        return values | rope | {"moe_args": _experts(model, precision)}
    if model.moe.experts:
        values |= {
            "moe_enabled": True,
            "moe_inter_dim": model.moe.ffn_size,
            "moe_args": _experts(model, precision),
        }
    return values


def model_name(model: Architecture) -> str:
    """Return torchtitan's name of the model's class."""
    return family(model.family).backends["torchtitan"].model


def _experts(model: Architecture, precision: str) -> dict[str, Any]:
    return {
        **arguments_of(model, _ARGUMENTS, "experts", *(["groups"] if model.moe.groups > 1 else [])),
        "score_before_experts": False,
        "load_balance_coeff": model.moe.auxiliary_loss or None,
        # On a GPU, torchtitan's product of all experts computes in bfloat16, whatever the precision
        # of the run.
        "use_grouped_mm": precision != "fp32",
    }


def toml(job: Job) -> str:
    """Return the text of ``torchtitan.toml``."""
    recipe = job.recipe
    enabled = recipe.find("torchtitan.checkpoint.interval", 0) > 0
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
    if job.resume_from is not None or recipe.find(INITIAL, False):
        # Otherwise, torchtitan trains random weights without a word if no checkpoint is saved.
        settings |= {"checkpoint.load_only": not enabled, "checkpoint.enable": True}
    if job.resume_from is not None:
        settings |= {**tables["resuming"], "checkpoint.initial_load_path": str(job.resume_from)}
    # JSON's lists, text, numbers and booleans are valid TOML.
    texts = {
        key: json.dumps(value, ensure_ascii=False)
        for key, value in settings.items()
        if value is not None
    }
    return "".join(f"{key} = {text}\n" for key, text in texts.items())
