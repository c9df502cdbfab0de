"""The keys and checks of fine-tuning. Initial weights of Hugging Face must be those of the recipe's model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from primus.errors import InputError
from primus.recipes.architecture import Architecture
from primus.recipes.family import family
from primus.recipes.recipe import Recipe
from primus.recipes.setting import bounded
from primus.recipes.weights import FILES, HUB, config_of, downloaded
from primus.training import identity
from primus.training.launch import clean
from primus.turbo.optimizations import importable


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters of rank ``rank``, scaled by ``alpha`` ÷ ``rank``, for the linear layers in ``targets``.

    If ``targets`` is empty, all linear layers except the output layer get adapters; Mixtral's experts are no linear
    layers. Used in mode ``lora`` only.
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
    ``loss_chunk`` tokens at a time. ``packing`` fills each sample with whole documents, which do not see each other.
    ``save_weights`` exports the trained weights, or adapters, to a folder ``weights`` that Hugging Face's libraries can
    load; with ``export`` "merged", adapters are added to the weights that they were trained on.
    """

    weights: str = "random"
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    loss_chunk: int = bounded(2048, "[1, inf)")
    packing: bool = False
    save_weights: bool = False
    export: Literal["trained", "merged"] = "trained"
    lora: LoraConfig = field(default_factory=LoraConfig)


_PLAIN = ("F64", "F32", "F16", "BF16")


def check(folder: Path, model: Architecture) -> None:
    """Raise InputError, with file and tensor, unless transformers would load ``folder`` as ``model`` without a change.

    Damaged and quantized files are found from their headers. Then transformers itself builds the model of the folder's
    ``config.json`` and loads the headers' shapes into it, in a process of its own.
    """
    file, config = config_of(folder)
    if config["model_type"] != (kind := family(model.family).transformers):
        why = f"the weights are of type {config['model_type']}, and the recipe's model is of type {kind}"
        raise InputError(why, where=f"{file}: model_type")
    for part in identity.tensor_files(folder):
        for name, dtype in identity.header(part).dtypes.items():
            if dtype not in _PLAIN:
                raise InputError(
                    f"{name} is {dtype}, and only plain weights ({', '.join(_PLAIN)}) are trained", where=str(part),
                    hint="name the weights that these were quantized from, or dequantize them",
                )  # fmt: skip
    if not importable("transformers"):
        return  # the check of the backend's packages, which comes next, names it
    command = [sys.executable, "-P", "-m", "primus.training.finetune.models", str(folder), json.dumps(asdict(model))]
    variables = clean(os.environ) | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace", check=False)
    try:
        objection = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        raise InputError(f"transformers cannot load these weights: {last[:300]}", where=str(folder)) from None
    if objection:
        raise InputError(objection["why"], where=objection.get("where", str(file)), hint=objection.get("hint"))


def source_of(name: str, *, offline: bool) -> Path | None:
    """Return the folder of initial weights, None if they are random; those of the hub are downloaded once."""
    if name == "random":
        return None
    return downloaded(name, *FILES, offline=offline) if name.startswith(HUB) else Path(name)


def check_weights(recipe: Recipe) -> None:
    """Raise InputError if the recipe's initial weights are missing, damaged or of another model."""
    if source := source_of(recipe.find("finetune.weights", "random"), offline=False):
        check(source, recipe.architecture)
