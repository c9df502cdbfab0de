"""The keys and checks of fine-tuning. Initial weights of Hugging Face must be those of the recipe's
model.
"""

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
from primus_images.recipes.architecture import Architecture, architecture, shapes
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.setting import bounded
from primus_images.recipes.weights import FILES, HUB, config_of, downloaded, model_of
from primus_images.refusals import refusal
from primus_images.training.run.processes import clean
from primus_images.turbo.optimizations import importable


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters of rank ``rank``, scaled by ``alpha`` ÷ ``rank``, for the linear layers in
    ``targets``.

    If ``targets`` is empty, all linear layers except the output layer get adapters; Mixtral's
    experts are no linear layers. Used in mode ``lora`` only.
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


_HEAD = "lm_head.weight"
# Tensors that are no parameters. transformers reports them where its model has no such buffer.
_BUFFERS = ("rotary_emb.inv_freq", "mlp.gate.e_score_correction_bias")


def check(folder: Path, model: Architecture) -> None:
    """Raise InputError, with file and tensor, unless transformers would load ``folder`` as
    ``model`` without a change.

    Damaged and quantized files are found from their headers. Then transformers itself builds the
    model of the folder's ``config.json`` and loads the headers' shapes into it, in a process of its
    own.
    """
    sizes = {
        key.removeprefix("model."): setting.value
        for key, setting in model_of(folder, model.family).items()
    }
    generation = folder / "generation_config.json"
    with suppress(OSError, ValueError):
        if not isinstance(json.loads(read_bytes(generation)), dict):
            raise InputError(
                "generation_config.json is not a mapping", where=str(generation), hint="remove it"
            )
    with suppress(ArithmeticError):  # of sizes that transformers refuses
        _check_headers(folder, architecture(sizes))
    if not importable("transformers"):
        return  # the check of the backend's packages, which comes next, names it
    words = [
        sys.executable,
        "-P",
        "-m",
        "primus_images.training.backends.finetune.objections",
        str(folder),
        json.dumps(asdict(model)),
    ]
    variables = clean(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(words, env=variables, capture_output=True, errors="replace", check=False)
    try:
        objection = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        raise InputError(
            f"transformers cannot load these weights: {last[:300]}", where=str(folder)
        ) from None
    if objection:
        raise InputError(objection.pop("why"), **{"where": f"{folder}/config.json", **objection})


def _check_headers(folder: Path, model: Architecture) -> None:
    if model.has_formula:
        expected = shapes(model)
    else:
        expected = {}
    places = dict[str, str]()
    strange = dict[str, Path]()
    for part in tensors.tensor_files(folder):
        head = tensors.header(part)
        for name, dtype in head.dtypes.items():
            if dtype not in tensors.PLAIN and not (dtype == "U8" and name.endswith(tensors.MXFP4)):
                plain_text = ", ".join(tensors.PLAIN)
                raise InputError(
                    f"{name} is {dtype}, and only plain weights ({plain_text}) are trained",
                    where=part,
                    hint="name the weights that these were quantized from, or dequantize them",
                )
            if not tensors.is_for_text(name):
                continue
            plain = tensors.canonical_name(name)
            if plain not in expected:
                strange |= {} if plain == _HEAD or plain.endswith(_BUFFERS) else {name: part}
            elif places.setdefault(plain, name) != name:
                other = places[plain]
                raise InputError(
                    f"{name} and {other} are the same weight", where=part, hint="remove one of them"
                )
            elif (shape := head.shapes[name]) != expected[plain]:
                sizes = {"shape": [*shape], "expected": [*expected[plain]]}
                raise refusal("other_shape", part, name=name, **sizes, way=tensors.OTHER_MODEL)
    if not model.has_formula or (
        model.moe.experts and any(".experts." in name for name in strange)
    ):
        return  # transformers stacks the matrices of all experts, also in files
    what = "the weights lack"
    if strange:
        what = f"primus's model of the family {model.family} has no place for"
    names = sorted(strange or expected.keys() - places.keys())
    if names:
        more = ""
        if len(names) > 1:
            more = f" and {len(names) - 1} more tensors"
        where = str(strange.get(names[0], folder))
        if strange:
            hint = f"unless config.json asks for it, {tensors.OTHER_MODEL}"
        else:
            hint = tensors.OTHER_MODEL
        raise InputError(f"{what} {names[0]}{more}", where=where, hint=hint)


def source_of(name: str, *, offline: bool) -> Path | None:
    """Return the folder of initial weights, None if they are random; those of the hub are
    downloaded once.
    """
    if name == "random":
        return None
    if name.startswith(HUB):
        return downloaded(name, *FILES, offline=offline)
    return Path(name)


def check_weights(recipe: Recipe) -> None:
    """Raise InputError if the recipe's initial weights are missing, damaged or of another model."""
    source = source_of(recipe.find(f"{recipe.backend}.weights", "random"), offline=False)
    if source:
        part = "text_config" in config_of(source)[1]
        if (
            part
            and recipe.mode == "lora"
            and recipe.find(f"{recipe.backend}.export", "trained") != "merged"
        ):
            raise InputError(
                "these weights have several parts, and adapters of the language model alone "
                "fit no such model",
                where=source,
                hint="export=merged",
            )
        check(source, recipe.architecture)
