"""The model of a folder of weights: its ``config.json`` as settings of a recipe, and the nearest recipe."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from primus.errors import HostError, InputError
from primus.files import read_bytes
from primus.recipes import catalogue
from primus.recipes.architecture import architecture, size
from primus.recipes.family import described, families, family
from primus.recipes.schema import model_rules
from primus.recipes.setting import Setting

HUB = "hf:"
_MODES = ("full", "lora")
# What the ranks and the checks before them read of a repository on the hub.
FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt")


def downloaded(name: str, *patterns: str, offline: bool = False) -> Path:
    """Return the folder of ``hf:OWNER/NAME`` with the files that match ``patterns``, downloaded once.

    The token is in HF_TOKEN. Raises HostError if the hub does not give them; ``offline`` asks only the cache.
    """
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            name.removeprefix(HUB), allow_patterns=list(patterns), local_files_only=offline,
            ignore_patterns=["consolidated*", "original/*"],  # copies of the same weights in the vendor's own format
        )  # fmt: skip
    except Exception as error:
        why = str(error).strip().partition("\n")[0][:300]
        raise HostError(f"{name} cannot be downloaded: {type(error).__name__}: {why}") from error
    return Path(folder)


def config_of(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file ``config.json`` of a folder of weights, and its contents.

    Raises InputError if there is none, or if it is not that of a whole, unquantized model that can be fine-tuned.
    """
    if not folder.is_dir():
        hint = "name a folder of safetensors files with their config.json, or hf:OWNER/NAME"
        raise InputError(f"there is no folder {folder}", hint=hint)
    file, source = folder / "config.json", "copy it from the source of the weights"
    try:
        config = json.loads(read_bytes(file))
    except FileNotFoundError:
        why, hint = f"the weights in {folder} have no config.json, so their model is unknown", source
        if (folder / "adapter_config.json").is_file():
            why = f"{folder} contains LoRA adapters, not a whole model"
            hint = "merge them into their base weights with PEFT, and name the folder of the result"
        elif (folder / "weights").is_dir():
            why, hint = f"{folder} is a folder of a run, not of weights", f"name {folder / 'weights'}"
        raise InputError(why, hint=hint) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("config.json cannot be read, or is not JSON", where=str(file), hint=source) from error
    if not isinstance(config, dict):
        raise InputError("config.json is not a mapping", where=str(file))
    tuned = dict.fromkeys(family(name).transformers for name in families() if family(name).tuned)
    if (kind := config.get("model_type")) not in tuned:
        why, hint = f"primus has no recipe for models of type {kind!r}", f"there are recipes for {', '.join(tuned)}"
        raise InputError(why, where=f"{file}: model_type", hint=hint)
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            method = config[key].get("quant_method", "") if isinstance(config[key], dict) else config[key]
            why = f"the weights are quantized ({method or key}), and only plain weights are trained"
            hint = "name the weights that they were made from, or dequantize them"
            raise InputError(why, where=f"{file}: {key}", hint=hint)
    return file, config


def model_of(folder: Path, name: str) -> dict[str, Setting]:
    """Return a recipe's ``model`` section, without ``hf_repo`` and ``moe.auxiliary_loss``, from ``config.json``.

    ``name`` is the recipe's family. Raises InputError, with file and field, if the weights are of another one.
    """
    file, config = config_of(folder)
    kind, known = config["model_type"], family(name)
    if kind != known.transformers:
        why = f"the weights are of type {kind}, and the recipe's family is {name}"
        hint = "`primus finetune WEIGHTS DATA` picks a recipe for the weights"
        raise InputError(why, where=f"{file}: model_type", hint=hint)
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        if field not in config:
            raise InputError(f"config.json has no {field}", where=str(file), hint="copy it from the weights' source")
    settings = {"model.family": Setting(value=name, origin=f"{file}: model_type")}
    fixed = [
        (key, "model_type", only[0]) for key, only in known.values.items() if only[0] != model_rules()[key].default
    ]
    for key, field, value in (*fixed, *described(known, config, file)):
        if (objection := model_rules()[key].objection(value)) is not None:
            raise InputError(f"model.{key} {objection}", where=f"{file}: {field}")
        settings[f"model.{key}"] = Setting(value=value, origin=f"{file}: {field}")
    return settings


def nearest_recipe(folder: Path, mode: str | None = None) -> catalogue.Entry:
    """Return the recipe that fine-tunes a model of the weights' family, and of the size nearest to theirs.

    ``mode`` is ``full`` or ``lora``; None: either. Raises InputError if there is none.
    """
    if mode not in (None, *_MODES):
        raise InputError(f"mode {mode!r} does not fine-tune", hint=f"the modes are {' and '.join(_MODES)}")
    _, config = config_of(folder)
    distances: list[tuple[float, str, catalogue.Entry]] = []
    for entry in catalogue.entries():
        name = entry.architecture.family
        fits = entry.mode in ((mode,) if mode else _MODES) and not entry.only_proxy
        if fits and family(name).transformers == config["model_type"]:
            model = {key.removeprefix("model."): s.value for key, s in model_of(folder, name).items()}
            try:
                distance = abs(math.log(size(architecture(model)).total / entry.size.total))
            except (ValueError, ArithmeticError):
                distance = math.inf  # an impossible size, which the resolution names
            distances.append((distance, entry.recipe, entry))
    if not distances:
        how = f" in mode {mode}" if mode else ""
        raise InputError(f"no recipe fine-tunes models of type {config['model_type']}{how}", hint="see `primus list`")
    return min(distances, key=lambda row: row[:2])[2]
