"""The weights to start from: their folder, and the model that their ``config.json`` describes."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primus_images.errors import HostError, InputError
from primus_images.files import read_bytes, require_readable
from primus_images.recipes.architecture import architecture, size
from primus_images.recipes.family import (
    AS_OTHER,
    OTHER,
    Family,
    described,
    families_of,
    family,
    usual_names,
)
from primus_images.recipes.load import Entry, entries
from primus_images.recipes.schema import backends, model_rules
from primus_images.recipes.setting import Setting
from primus_images.recipes.tensors import header, plain_shapes, tensor_files
from primus_images.yamlfile import section

HUB = "hf:"
_MODES = ("full", "lora")
# What describes a model in a repository on the hub, and what the ranks and the checks before them
# read.
_DESCRIBING = ("*.json", "*.jinja", "*.model", "*.txt")
FILES = ("*.safetensors", *_DESCRIBING)
# Copies of the same weights in the vendor's own format.
_COPIES = ("consolidated*", "original/*")
# Without these sizes there is no model.
_NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


def downloaded(name: str, *patterns: str, offline: bool = False) -> Path:
    """Return the folder of ``hf:OWNER/NAME`` with the files that match ``patterns``.

    They are downloaded once. The token is in HF_TOKEN. Raises HostError if the hub does not give
    them; ``offline`` asks only the cache.
    """
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            name.removeprefix(HUB),
            allow_patterns=list(patterns),
            ignore_patterns=list(_COPIES),
            local_files_only=offline,
        )
    except ImportError:
        raise HostError(
            f"{name}: huggingface_hub is not installed",
            hint="run this inside a primus image, or name a folder",
        ) from None
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:300]
        kind = type(error).__name__
        raise HostError(
            f"{name} cannot be downloaded: {kind}: {reason}",
            hint="check the name hf:OWNER/NAME, the network and HF_ENDPOINT; HF_TOKEN opens "
            "what is not public; a folder needs none",
        ) from error
    return Path(folder)


def folder_of(name: str, *, whole: bool) -> Path:
    """Return the folder of the weights ``name``.

    Those of the hub lack the tensors, unless ``whole`` or of no family.
    """
    if not name.startswith(HUB):
        return Path(name)
    folder = downloaded(name, *_DESCRIBING)
    if whole or other_family(folder):
        return downloaded(name, *FILES)
    return folder


def config_of(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file ``config.json`` of a folder of weights, and its contents.

    Raises InputError if it is not that of a whole, unquantized model. MXFP4 counts as unquantized.
    """
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}",
            hint="name a folder of safetensors files with their config.json, or hf:OWNER/NAME",
        )
    if (folder / "adapter_config.json").is_file():  # transformers would add them to their own base
        raise InputError(
            f"{folder} contains LoRA adapters, not a whole model",
            hint="merge them into their base weights with PEFT, and name the folder of the result",
        )
    file = folder / "config.json"
    config = _json_of(file)
    if not isinstance(config.get("model_type"), str):
        raise InputError(
            "config.json names no type of model",
            where=f"{file}: model_type",
            hint="copy it from the source of the weights",
        )
    # Of a model of several parts, the language model is trained.
    text = config.get("text_config")
    if isinstance(text, dict) and "model_type" in text:
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = config | text | tied
    for key in ("quantization_config", "compression_config"):
        _refuse_quantized(key, config.get(key), file)
    return file, config


def _json_of(file: Path) -> dict[str, Any]:
    folder = file.parent
    require_readable(file)
    try:
        # By default, json would read a byte order mark, which transformers does not.
        config = json.loads(read_bytes(file).decode())
    except FileNotFoundError:
        if (folder / "weights").is_dir():
            raise InputError(
                f"{folder} is a folder of a run, not of weights", hint=f"name {folder}/weights"
            ) from None
        raise InputError(
            f"the weights in {folder} have no config.json, so their model is unknown",
            hint="copy it from the source of the weights",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            "config.json cannot be read, or is not JSON",
            where=file,
            hint="copy it from the source of the weights",
        ) from error
    if not isinstance(config, dict):
        raise InputError("config.json is not a mapping", where=file)
    return config


def _refuse_quantized(key: str, quantization: Any, file: Path) -> None:
    method = quantization
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "")
    # Weights in MXFP4 are dequantized as they are read.
    if quantization is None or method == "mxfp4":
        return
    raise InputError(
        f"the weights are quantized ({method or key}), and only plain weights are trained",
        where=f"{file}: {key}",
        hint="name the weights that they were made from, or dequantize them",
    )


def model_of(folder: Path, name: str) -> dict[str, Setting]:
    """Return a recipe's ``model`` section from the ``config.json`` of weights.

    It lacks ``hf_repo`` and ``moe.auxiliary_loss``. ``name`` is the recipe's family. Raises
    InputError, with file and field, if the weights are of another one.
    """
    file, config = config_of(folder)
    known = family(name)
    config = usual_names(known, config)
    _require_family(known, config, file)
    settings = {"model.family": Setting(value=name, origin=f"{file}: model_type")}
    rules = model_rules()
    for key, values in known.values.items():
        if values[0] != rules[key].default:
            settings[f"model.{key}"] = Setting(value=values[0], origin=f"{file}: model_type")
    for key, field, value in described(known, config, file):
        objection = rules[key].objection(value)
        if objection is not None:
            hint = None
            if name != OTHER:
                hint = AS_OTHER
            raise InputError(f"model.{key} {objection}", where=f"{file}: {field}", hint=hint)
        settings[f"model.{key}"] = Setting(value=value, origin=f"{file}: {field}")
    if name == OTHER:
        parameters = Setting(value=_parameters(folder), origin=f"{folder}: the tensors")
        settings["model.parameters"] = parameters
    return settings


def _require_family(known: Family, config: Mapping[str, Any], file: Path) -> None:
    kind = config["model_type"]
    if known.name not in (*families_of(kind), *fitting_families(kind), OTHER):
        raise InputError(
            f"the weights are of type {kind}, and the recipe's family is {known.name}",
            where=f"{file}: model_type",
            hint="`primus finetune WEIGHTS DATA` picks a recipe for the weights",
        )
    for key in _NEEDED:
        if key not in config and key not in known.defaults:
            hint = "copy it from the weights' source"
            if known.aliases:
                hint = (
                    "take weights of a model for text; if it has another name for it, add "
                    f"{key} to a copy of config.json"
                )
            raise InputError(f"config.json has no {key}", where=file, hint=hint)


def _parameters(folder: Path) -> int:
    count = 0
    for file in tensor_files(folder):
        for shape in plain_shapes(header(file)).values():
            count += math.prod(shape)
    return count


def fitting_families(kind: str) -> list[str]:
    """Return the families with which weights of transformers' ``model_type`` are fine-tuned."""
    tuning = {name for name, backend in backends().items() if set(_MODES) <= set(backend.modes)}
    return [name for name in families_of(kind) if tuning & set(family(name).backends)] or [OTHER]


def other_family(folder: Path) -> dict[str, str]:
    """Return the setting with which weights of no family are fine-tuned; empty for all others."""
    _, config = config_of(folder)
    if fitting_families(config["model_type"]) == [OTHER]:
        return {"model.family": OTHER}
    return {}


def nearest_recipe(folder: Path, mode: str | None = None, *, other: bool = False) -> Entry:
    """Return the recipe that fine-tunes a model of the weights' family, nearest to theirs in size.

    For a model of no family, or of an ``other`` one than its type has, it is any recipe. ``mode``
    is ``full`` or ``lora``; None: either. Raises InputError if there is none.
    """
    if mode not in (None, *_MODES):
        raise InputError(
            f"mode {mode!r} does not fine-tune", hint=f"the modes are {' and '.join(_MODES)}"
        )
    _, config = config_of(folder)
    kind = config["model_type"]
    fitting = fitting_families(kind)
    if other:
        fitting = [OTHER]
    candidates = []
    for entry in entries():
        fits = fitting == [OTHER] or entry.architecture.family in fitting
        if fits and not entry.only_proxy and entry.mode in ((mode,) if mode else _MODES):
            candidates.append(entry)
    if not candidates:
        how = ""
        if mode:
            how = f" in mode {mode}"
        raise InputError(
            f"no recipe fine-tunes models of type {kind}{how}", hint="see `primus list`"
        )
    return min(candidates, key=lambda entry: (_distance(entry, folder, fitting), entry.recipe))


def _distance(entry: Entry, folder: Path, fitting: list[str]) -> float:
    name = entry.architecture.family
    if fitting == [OTHER]:
        name = OTHER
    settings = section(model_of(folder, name), "model")
    model = architecture({key: setting.value for key, setting in settings.items()})
    try:
        return abs(math.log(size(model).total / entry.size.total))
    except (ValueError, ArithmeticError):
        return math.inf  # an impossible size, which the resolution names
