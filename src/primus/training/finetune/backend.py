"""The keys and checks of fine-tuning. Initial weights of Hugging Face must be those of the recipe's model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from primus.errors import InputError
from primus.files import read_bytes
from primus.recipes.architecture import Architecture
from primus.recipes.recipe import Recipe
from primus.recipes.setting import bounded
from primus.training import identity
from primus.training.corpus import TOKENIZER_FILES


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters of rank ``rank``, scaled by ``alpha`` ÷ ``rank``, for the linear layers in ``targets``.

    If ``targets`` is empty, all linear layers except the output layer get adapters. Used in mode ``lora`` only.
    """

    rank: int = bounded(16, "[1, 65536]")
    alpha: float = bounded(32.0, "(0, inf)")
    dropout: float = bounded(0.0, "[0, 1)")
    targets: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """The settings of fine-tuning.

    ``weights`` are the initial weights: "random" (from the seed), a folder of safetensors files with Hugging Face's
    names, or ``hf:OWNER/NAME``. ``attention`` is Hugging Face's name of an implementation. Logits are computed for
    ``loss_chunk`` tokens at a time. ``save_weights`` exports the trained weights, or adapters, to a folder ``weights``
    that Hugging Face's libraries can load.
    """

    weights: str = "random"
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    loss_chunk: int = bounded(2048, "[1, inf)")
    save_weights: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)


# transformers' model types, by the recipe's families.
TYPES = {"llama2": "llama", "llama3": "llama", "mistral": "mistral", "mixtral": "mixtral", "qwen2": "qwen2"}
# The defaults of transformers for keys that a config.json omits.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
}  # fmt: skip


def check(folder: Path, model: Architecture, seq_len: int, where: str | None = None) -> None:
    """Raise InputError if the weights in ``folder`` are damaged, not of ``model``, or support fewer than ``seq_len``.

    ``where`` is the place of the setting that names the folder.
    """
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}", where=where,
            hint="name a folder of safetensors files with their config.json, or hf:OWNER/NAME",
        )  # fmt: skip
    file = folder / "config.json"
    try:
        config = json.loads(read_bytes(file))
    except FileNotFoundError:
        if (folder / "adapter_config.json").is_file():
            raise InputError(
                f"{folder} contains LoRA adapters, not a whole model", where=where,
                hint="merge them into their base weights with PEFT, and name the folder of the result",
            ) from None  # fmt: skip
        if (folder / "weights").is_dir():
            raise InputError(
                f"{folder} is a folder of a run, not of weights", where=where, hint=f"name {folder / 'weights'}"
            ) from None
        raise InputError(
            f"the weights in {folder} have no config.json, so their model is unknown", where=where,
            hint="copy it from the source of the weights",
        ) from None  # fmt: skip
    except (OSError, ValueError, RecursionError) as error:
        hint = "copy it from the source of the weights"
        raise InputError("config.json cannot be read, or is not JSON", where=str(file), hint=hint) from error
    if not isinstance(config, dict):
        raise InputError("config.json is not a mapping", where=str(file))
    for part in identity.tensor_files(folder):
        identity.header(part)
    mismatches = differences(model, config)
    if mismatches:
        listed = "; ".join(
            f"model.{key} is {_shown(mine)}, the weights have {_shown(theirs)}" for key, mine, theirs in mismatches
        )
        words = " ".join(f"model.{key}={_shown(theirs)}" for key, _, theirs in mismatches)
        raise InputError(
            f"the recipe does not match these weights: {listed}",
            where=str(file),
            hint=f"use the settings of the weights: {words}",
        )
    longest = config.get("max_position_embeddings", seq_len)
    if seq_len > longest:
        raise InputError(
            f"seq_len is {seq_len}, but the weights support at most {longest} tokens", where=str(file),
            hint=f"training.seq_len={longest}",
        )  # fmt: skip


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def differences(model: Architecture, config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the differences as (key of the recipe's ``model``, the recipe's value, the value in ``config``)."""
    kind = config.get("model_type")
    if kind != TYPES.get(model.family):
        fitting = [family for family, name in TYPES.items() if name == kind]
        return [("family", model.family, fitting[0] if fitting else kind)]
    return [(key, mine, theirs) for key, mine, theirs in _pairs(model, config, str(kind)) if not _same(mine, theirs)]


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and isinstance(theirs, int | float):
        return abs(mine - theirs) <= 1e-9 * max(abs(mine), abs(theirs))
    return bool(mine == theirs)


def _pairs(model: Architecture, config: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Any, Any]]:
    settings = {**_DEFAULTS[kind], **config}
    heads = settings.get("num_attention_heads")
    yield "layers", model.layers, settings.get("num_hidden_layers")
    yield "hidden_size", model.hidden_size, settings.get("hidden_size")
    yield "heads", model.heads, heads
    yield "kv_heads", model.kv_heads, settings.get("num_key_value_heads") or heads
    if settings.get("head_dim"):
        yield "head_dim", model.head_size, settings["head_dim"]
    if kind == "mixtral":
        yield "moe.ffn_size", model.moe.ffn_size or model.ffn_size, settings.get("intermediate_size")
        yield "moe.experts", model.moe.experts, settings["num_local_experts"]
        yield "moe.top_k", model.moe.top_k, settings["num_experts_per_tok"]
    else:
        yield "ffn_size", model.ffn_size, settings.get("intermediate_size")
    yield "vocab_size", model.vocab_size, settings.get("vocab_size")
    yield "norm_eps", model.norm_eps, settings.get("rms_norm_eps", 1e-6)
    yield "tied_embeddings", model.tied_embeddings, bool(settings.get("tie_word_embeddings", False))
    if kind in ("llama", "qwen2"):
        yield "qkv_bias", model.qkv_bias, True if kind == "qwen2" else bool(settings.get("attention_bias", False))
    yield "window", model.window, _window(settings, kind)
    yield from _rotary(model, settings)


def _window(settings: Mapping[str, Any], kind: str) -> int:
    if kind == "qwen2" and (
        not settings.get("use_sliding_window") or settings["max_window_layers"] >= settings.get("num_hidden_layers", 0)
    ):
        return 0
    return int(settings.get("sliding_window") or 0) if kind != "llama" else 0


def _rotary(model: Architecture, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    # transformers 5 has one mapping for what used to be two keys.
    rope: Mapping[str, Any] = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or settings.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    mine = model.rope_scaling
    yield "rope_theta", float(model.rope_theta), float(theta)
    yield "rope_scaling.kind", mine.kind, "none" if kind == "default" else kind
    if mine.kind == "none" or mine.kind != kind:
        return
    yield "rope_scaling.factor", float(mine.factor), float(rope.get("factor", 1.0))
    original = rope.get("original_max_position_embeddings") or settings.get("max_position_embeddings")
    yield "rope_scaling.original_max_position", mine.original_max_position, original
    names = (
        {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {"beta_fast": 32.0, "beta_slow": 1.0}
    )
    for name, usual in names.items():
        yield f"rope_scaling.{name}", float(getattr(mine, name)), float(rope.get(name) or usual)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer unchanged to the folder of exported weights."""
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def check_weights(recipe: Recipe) -> None:
    """Raise InputError if the recipe's initial weights are missing, damaged or of another model."""
    if recipe.weights is not None:
        where = recipe.settings["finetune.weights"].origin
        check(recipe.weights, recipe.architecture, recipe.seq_len, where)
