"""The keys of fine-tuning, and the check that weights are those of the recipe's model."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from primus_images.errors import InputError
from primus_images.files import read_bytes
from primus_images.recipes import tensors
from primus_images.recipes.architecture import Architecture
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.setting import bounded
from primus_images.recipes.weights import FILES, HUB, config_of, downloaded, model_of
from primus_images.training.run.processes import clean
from primus_images.turbo.optimizations import importable


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters of rank ``rank``, scaled by ``alpha`` ÷ ``rank``, for linear layers.

    They are those named in ``targets``. If it is empty, all linear layers except the output layer
    get adapters; Mixtral's experts are no linear layers. Used in mode ``lora`` only.
    """

    rank: int = bounded(16, "[1, 65536]")
    alpha: float = bounded(32.0, "(0, inf)")
    dropout: float = bounded(0.0, "[0, 1)")
    targets: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """The settings of fine-tuning.

    ``weights`` are the initial weights: "random" (from the seed), a folder of safetensors files
    with Hugging Face's names, or ``hf:OWNER/NAME``. ``attention`` is Hugging Face's name of an
    implementation, where "sdpa" is "eager" for models that have no sdpa. Logits are computed for
    ``loss_chunk`` tokens at a time, except by models of no family. ``packing`` fills each sample
    with whole documents, which do not see each other. ``save_weights`` exports the trained weights,
    or adapters, to a folder ``weights`` that Hugging Face's libraries can load; with ``export``
    "merged", adapters are added to the weights that they were trained on.
    """

    weights: str = "random"
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    loss_chunk: int = bounded(2048, "[1, inf)")
    packing: bool = False
    save_weights: bool = False
    export: Literal["trained", "merged"] = "trained"
    lora: LoraConfig = field(default_factory=LoraConfig)


def source_of(name: str, *, offline: bool) -> Path | None:
    """Return the folder of initial weights, None if they are random.

    Those of the hub are downloaded once.
    """
    if name == "random":
        return None
    if name.startswith(HUB):
        return downloaded(name, *FILES, offline=offline)
    return Path(name)


def check_weights(recipe: Recipe) -> None:
    """Raise InputError if the recipe's initial weights are missing, damaged or of another model."""
    source = source_of(recipe.find(f"{recipe.backend}.weights", "random"), offline=False)
    if source is None:
        return
    _, config = config_of(source)
    targets = None
    if recipe.mode == "lora":
        targets = recipe.section(recipe.backend).get("lora.targets", [])
    check(source, recipe.architecture, targets)
    export = recipe.find(f"{recipe.backend}.export", "trained")
    if "text_config" in config and recipe.mode == "lora" and export != "merged":
        raise InputError(
            "these weights have several parts, and adapters of the language model alone fit no "
            "such model",
            where=source,
            hint="export=merged",
        )


def check(folder: Path, model: Architecture, targets: object = None) -> None:
    """Raise InputError, with file and tensor, unless ``folder`` has the weights of ``model``.

    With ``targets``, a list of names that may be empty, it must also take adapters there.

    They do if transformers loads them without a change. Damaged and quantized files are found from
    their headers. Then transformers itself builds the model of the folder's ``config.json`` and
    loads the headers' shapes into it, in a process of its own.
    """
    model_of(folder, model.family)
    _check_generation(folder / "generation_config.json")
    _check_headers(folder)
    if not importable("transformers"):
        return  # the check of the backend's packages, which comes next, names it
    objection = _objection_of_transformers(folder, model, targets)
    if objection:
        where = objection["where"] or f"{folder}/config.json"
        raise InputError(objection["why"], where=where, hint=objection["hint"])


def _check_generation(file: Path) -> None:
    with suppress(OSError, ValueError):
        if not isinstance(json.loads(read_bytes(file)), dict):
            raise InputError(
                "generation_config.json is not a mapping", where=str(file), hint="remove it"
            )


def _objection_of_transformers(
    folder: Path, model: Architecture, targets: object
) -> dict[str, str] | None:
    """Return the first of :mod:`primus_images.training.backends.finetune.objections`."""
    module = "primus_images.training.backends.finetune.objections"
    words = [str(folder), json.dumps(asdict(model)), json.dumps(targets)]
    command = [sys.executable, "-P", "-m", module, *words]
    variables = clean(os.environ)
    variables["HF_HUB_OFFLINE"] = "1"
    variables["TRANSFORMERS_VERBOSITY"] = "error"
    variables["OMP_NUM_THREADS"] = "1"
    ended = subprocess.run(
        command, env=variables, capture_output=True, errors="replace", check=False
    )
    try:
        objection: dict[str, str] | None = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise InputError(
            f"transformers cannot load these weights: {lines[-1][:300]}", where=str(folder)
        ) from None
    return objection


def _check_headers(folder: Path) -> None:
    names: dict[str, str] = {}
    for file in tensors.tensor_files(folder):
        for name, dtype in tensors.header(file).dtypes.items():
            _check_dtype(name, dtype, file)
            if not tensors.is_for_text(name):
                continue
            first = names.setdefault(tensors.canonical_name(name), name)
            if first != name:
                raise InputError(
                    f"{name} and {first} are the same weight", where=file, hint="remove one of them"
                )
    _check_pairs(set(names.values()), folder)


def _check_pairs(names: set[str], folder: Path) -> None:
    """Raise InputError for values in MXFP4 without their scales, or scales without values."""
    for name in sorted(names):
        for end, other in (tensors.MXFP4, tensors.MXFP4[::-1]):
            partner = name.removesuffix(end) + other
            if name.endswith(end) and partner not in names:
                raise InputError(
                    f"{name} has no {partner}: a weight in MXFP4 is both",
                    where=folder,
                    hint="fetch the weights again",
                )


def _check_dtype(name: str, dtype: str, file: Path) -> None:
    packed = dtype == "U8" and name.endswith(tensors.MXFP4)
    if dtype not in tensors.PLAIN and not packed:
        raise InputError(
            f"{name} is {dtype}, and only plain weights ({', '.join(tensors.PLAIN)}) are trained",
            where=file,
            hint="name the weights that these were quantized from, or dequantize them",
        )
