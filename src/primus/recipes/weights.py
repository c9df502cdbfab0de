"""The model of a folder of weights: its ``config.json`` as settings of a recipe, and the nearest recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from primus.errors import HostError, InputError
from primus.files import read_bytes
from primus.recipes import catalogue, load
from primus.recipes.architecture import architecture, size
from primus.recipes.schema import model_rules
from primus.recipes.setting import Setting

HUB = "hf:"
_MODES = ("full", "lora")
# What the ranks and the checks before them read of a repository on the hub.
FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt")
# transformers' model types, by the recipe's families.
TYPES = {"llama2": "llama", "llama3": "llama", "mistral": "mistral", "mixtral": "mixtral", "qwen2": "qwen2"}
# The defaults of transformers for keys that published files omit.
_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048, "attention_bias": False}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "mixtral": {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 131072,
    },
    "qwen2": {
        "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768
    },
}  # fmt: skip
_SIZES = {
    "layers": "num_hidden_layers", "hidden_size": "hidden_size", "heads": "num_attention_heads",
    "vocab_size": "vocab_size", "max_seq_len": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
_STRETCH = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0},
}


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

    Raises InputError if there is none, or if it is not that of a whole, unquantized model of a family in :data:`TYPES`.
    """
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}",
            hint="name a folder of safetensors files with their config.json, or hf:OWNER/NAME",
        )  # fmt: skip
    file, source = folder / "config.json", "copy it from the source of the weights"
    try:
        config = json.loads(read_bytes(file))
    except FileNotFoundError:
        if (folder / "adapter_config.json").is_file():
            raise InputError(
                f"{folder} contains LoRA adapters, not a whole model",
                hint="merge them into their base weights with PEFT, and name the folder of the result",
            ) from None
        if (folder / "weights").is_dir():
            raise InputError(
                f"{folder} is a folder of a run, not of weights", hint=f"name {folder / 'weights'}"
            ) from None
        why = f"the weights in {folder} have no config.json, so their model is unknown"
        raise InputError(why, hint=source) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("config.json cannot be read, or is not JSON", where=str(file), hint=source) from error
    if not isinstance(config, dict):
        raise InputError("config.json is not a mapping", where=str(file))
    if config.get("model_type") not in TYPES.values():
        raise InputError(
            f"primus has no recipe for models of type {config.get('model_type')!r}",
            where=f"{file}: model_type", hint=f"there are recipes for {', '.join(dict.fromkeys(TYPES.values()))}",
        )  # fmt: skip
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            method = config[key].get("quant_method", "") if isinstance(config[key], dict) else config[key]
            raise InputError(
                f"the weights are quantized ({method or key}), and only plain weights are trained",
                where=f"{file}: {key}", hint="name the weights that they were made from, or dequantize them",
            )  # fmt: skip
    return file, config


def model_of(folder: Path, family: str) -> dict[str, Setting]:
    """Return a recipe's ``model`` section, without ``hf_repo`` and ``moe.auxiliary_loss``, from ``config.json``.

    ``family`` is the recipe's. Raises InputError, with file and field, if the weights are of another one.
    """
    file, config = config_of(folder)
    kind = config["model_type"]
    if kind != TYPES.get(family):
        raise InputError(
            f"the weights are of type {kind}, and the recipe's family is {family}",
            where=f"{file}: model_type", hint="`primus finetune WEIGHTS DATA` picks a recipe for the weights",
        )  # fmt: skip
    values = {**_COMMON, **_DEFAULTS[kind], **config}
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        if field not in values:
            raise InputError(f"config.json has no {field}", where=str(file), hint="copy it from the weights' source")
    settings = {"model.family": Setting(value=family, origin=f"{file}: model_type")}
    for key, field, value in _values(file, values, kind):
        if (objection := model_rules()[key].objection(value)) is not None:
            raise InputError(f"model.{key} {objection}", where=f"{file}: {field}")
        settings[f"model.{key}"] = Setting(value=value, origin=f"{file}: {field}")
    return settings


def _values(file: Path, config: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str, Any]]:
    """Yield key of the recipe's model, field of ``config.json`` and value."""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    for key, field in _SIZES.items():
        yield key, field, config[field]
    groups = config.get("num_key_value_heads")
    yield "kv_heads", "num_key_value_heads", heads if groups is None else groups
    head = config.get("head_dim")
    if head is not None and not (isinstance(heads, int) and isinstance(head, int) and heads * head == width):
        yield "head_dim", "head_dim", head
    if kind == "mixtral":
        yield "moe.ffn_size", "intermediate_size", config["intermediate_size"]
        yield "moe.experts", "num_local_experts", config["num_local_experts"]
        yield "moe.top_k", "num_experts_per_tok", config["num_experts_per_tok"]
        yield "moe.normalize_top_k", "model_type", True
    yield "ffn_size", "intermediate_size", config["intermediate_size"]
    if kind in ("llama", "qwen2"):
        yield "qkv_bias", "attention_bias", True if kind == "qwen2" else config["attention_bias"]
    window = config.get("sliding_window") if kind != "llama" else None
    if kind == "qwen2" and (not config.get("use_sliding_window") or config["max_window_layers"]):
        window = None
    yield "window", "sliding_window", 0 if window is None else window
    # transformers 5 has one mapping for what used to be two keys.
    field = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = config.get(field)
    rope = {} if rope is None else rope
    if not isinstance(rope, dict):
        raise InputError(f"{field} is not a mapping", where=f"{file}: {field}")
    scaling = rope.get("rope_type", rope.get("type", "default"))
    yield "rope_theta", "rope_theta", rope.get("rope_theta", config.get("rope_theta", 10000.0))
    yield "rope_scaling.kind", f"{field}.rope_type", "none" if scaling == "default" else scaling
    if scaling not in _STRETCH:
        return
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    yield "rope_scaling.original_max_position", f"{field}.original_max_position_embeddings", original
    yield "rope_scaling.factor", f"{field}.factor", rope.get("factor", 1.0)
    for name, usual in _STRETCH[scaling].items():
        yield f"rope_scaling.{name}", f"{field}.{name}", rope.get(name, usual)


def nearest_recipe(folder: Path, mode: str | None = None) -> catalogue.Entry:
    """Return the recipe that fine-tunes a model of the weights' family, and of the size nearest to theirs.

    ``mode`` is ``full`` or ``lora``; None: either. Raises InputError if there is none.
    """
    if mode not in (None, *_MODES):
        raise InputError(f"mode {mode!r} does not fine-tune", hint=f"the modes are {' and '.join(_MODES)}")
    _, config = config_of(folder)
    found: list[tuple[float, str, catalogue.Entry]] = []
    for entry in catalogue.entries():
        family = str(load.read(entry.path).settings["model.family"].value)
        if entry.mode not in ((mode,) if mode else _MODES) or entry.only_proxy:
            continue
        if TYPES.get(family) == config["model_type"]:
            model = {key.removeprefix("model."): s.value for key, s in model_of(folder, family).items()}
            try:
                apart = abs(math.log(size(architecture(model)).total / entry.size.total))
            except (ValueError, ArithmeticError):
                apart = math.inf  # an impossible size, which the resolution names
            found.append((apart, entry.recipe, entry))
    if not found:
        how = f" in mode {mode}" if mode else ""
        raise InputError(f"no recipe fine-tunes models of type {config['model_type']}{how}", hint="see `primus list`")
    return min(found, key=lambda row: row[:2])[2]
