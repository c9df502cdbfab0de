"""Why transformers would not load a folder of weights as a model without changing a tensor.

``python -m primus_images.training.backends.finetune.objections FOLDER MODEL TARGETS`` prints the
first objection as JSON, or null. MODEL are the sizes as JSON, and TARGETS the layers that get
adapters, or null if there are none.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from primus_images.files import json_if_readable
from primus_images.recipes.architecture import Architecture, architecture
from primus_images.recipes.family import AS_OTHER
from primus_images.recipes.tensors import OTHER_MODEL, header, plain_shapes, tensor_files, text_name
from primus_images.training.backends.finetune.backend import LoraConfig
from primus_images.training.backends.finetune.initial import stored
from primus_images.training.backends.finetune.models import (
    adapted,
    config_of,
    config_of_weights,
)
from primus_images.training.backends.loop import weights
from primus_images.yamlfile import read_values

_CONFIG: Any = read_values(Path(__file__).with_name("config.yaml")).data


@dataclass(frozen=True, kw_only=True)
class Objection:
    """One reason. Without ``where``, it concerns the folder's config.json."""

    why: str
    where: str | None = None
    hint: str | None = None


def objections(
    folder: Path, model: Architecture, targets: Sequence[str] | None = None
) -> Iterator[Objection]:
    """Yield what prevents a strict load of ``folder`` as ``model``, or adapters of ``targets``."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, __version__

    file = folder / "config.json"
    kind = json_if_readable(file).get("model_type")
    if kind not in CONFIG_MAPPING:
        yield Objection(
            why=f"transformers {__version__} has no models of type {kind}",
            where=f"{file}: model_type",
            hint="take weights of a type that it has: primus runs no code that comes with weights",
        )
        return
    config = config_of_weights(folder)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        yield Objection(
            why=f"transformers has no model of type {config.model_type} that continues text alone",
            where=f"{file}: model_type",
            hint="take weights of a model for text",
        )
        return
    if _sees_what_follows(config):
        yield Objection(
            why=f"a model of type {config.model_type} with this config sees the words that follow, "
            "so it does not learn to predict them",
            where=f"{file}: model_type",
            hint="take weights of a model that continues text",
        )
    if model.has_formula:
        yield from _other_settings(file, config_of(model, "sdpa").to_dict(), config)
    files = _names_of_files(folder)
    if isinstance(files, Objection):
        yield files
        return
    built, report = _loaded(folder, config)
    yield from _reported(report, folder, files)
    tensors = weights.Files(folder)
    head, embedding = _outer_names(built)
    if config.tie_word_embeddings and _differ(tensors, head, embedding):
        yield Objection(
            why=f"config.json ties the output layer to the embedding, but {head} differs "
            f"from {embedding}",
            where=str(files.get(head, folder)),
            hint="set tie_word_embeddings to false in config.json",
        )
    if model.has_formula:
        yield from _unread(tensors, built)
    if targets is not None:
        yield from _without_adapters(built, folder, targets)


def _without_adapters(built: Any, folder: Path, targets: Sequence[str]) -> Iterator[Objection]:
    """Yield why a model cannot have adapters of ``targets``."""
    try:
        adapted(built, LoraConfig(targets=list(targets)))
    except SystemExit as error:
        yield Objection(why=str(error), where=str(folder))
    except ImportError:
        return  # the check of the backend's packages, which comes next, names it


def _sees_what_follows(config: Any) -> bool:
    """Return whether a model is an encoder, which has a causal mask only if its config asks."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    asks = any(getattr(config, key, False) for key in ("is_decoder", "causal"))
    kinds = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, *_CONFIG["sees_all"]}
    return config.model_type in kinds and not asks


def _names_of_files(folder: Path) -> dict[str, Path] | Objection:
    """Return the file of each tensor, by its name in the language model."""
    from safetensors import SafetensorError, safe_open

    files = {}
    for file in tensor_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                names = tensors.keys()
        except SafetensorError as error:
            return Objection(
                why=f"the file is damaged: {error}", where=str(file), hint="fetch it again"
            )
        for name in names:
            files[text_name(name)] = file
    return files


def _loaded(folder: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """Return the model of ``config`` without memory, and transformers' report of a load into it."""
    from transformers import AutoModelForCausalLM

    shapes = {}
    for file in tensor_files(folder):
        for name, shape in plain_shapes(header(file)).items():
            shapes[name] = torch.empty(shape, device="meta")
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    model, report = kind.from_pretrained(
        None,
        config=config,
        state_dict=shapes,
        device_map={"": "meta"},
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    return model, report


def _reported(
    report: Mapping[str, Any], folder: Path, files: Mapping[str, Path]
) -> Iterator[Objection]:
    """Yield what transformers reports of a load into the model of config.json."""
    for name, shape, expected in sorted(report["mismatched_keys"]):
        yield Objection(
            why=f"{name} is {[*shape]} in the file, and {[*expected]} in the model of config.json",
            where=str(files.get(name, folder)),
            hint=OTHER_MODEL,
        )
    unexpected = sorted(report["unexpected_keys"])
    if unexpected:
        yield Objection(
            why=f"transformers' model has no place for {_with_count(unexpected)}",
            where=str(files.get(unexpected[0], folder)),
            hint=f"unless config.json asks for it, {OTHER_MODEL}",
        )
    missing = sorted(report["missing_keys"])
    if missing:
        yield Objection(
            why=f"the weights lack {_with_count(missing)}", where=str(folder), hint=OTHER_MODEL
        )


def _with_count(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more tensors"


def _outer_names(model: Any) -> list[str]:
    """Return the names of the weights of the output layer and of the embedding."""
    outer = (model.get_output_embeddings(), model.get_input_embeddings())
    names = {module: name for name, module in model.named_modules() if module in outer}
    return [f"{names.get(module)}.weight" for module in outer]


def _differ(tensors: weights.Files, *names: str) -> bool:
    if not all(name in tensors for name in names):
        return False
    first, second = map(tensors.whole, names)
    return not torch.equal(first, second)


def _unread(tensors: weights.Files, model: Any) -> Iterator[Objection]:
    """Yield the parameters of ``model`` that primus itself does not find."""
    hint = "load them with transformers, and save_pretrained"
    for name, _ in model.named_parameters():
        try:
            stored(tensors, name)
        except SystemExit as error:
            yield Objection(why=str(error), hint=hint)


def _other_settings(file: Path, ours: dict[str, Any], config: Any) -> Iterator[Objection]:
    theirs = config.to_dict()
    rope = dict(theirs["rope_parameters"] or {})
    rope.pop("type", None)
    theirs["rope_parameters"] = _CONFIG["yarn"] | rope
    ours["rope_parameters"] = _CONFIG["yarn"] | ours["rope_parameters"]
    defaults = type(config)().to_dict()
    for key in sorted(ours.keys() | defaults.keys()):
        if key in _CONFIG["free"] or key.startswith("_"):
            continue
        if _same(ours.get(key), theirs.get(key)):
            continue
        hint = AS_OTHER
        if "dropout" in key:
            hint = f"primus trains without dropout: set it to 0.0 in a copy; or {hint}"
        yield Objection(
            why=f"{key} is {theirs.get(key)!r} in the weights, and {ours.get(key)!r} in the "
            "recipe's model",
            where=f"{file}: {key}",
            hint=hint,
        )


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = ours.keys() | theirs.keys()
        return all(_same(ours.get(key), theirs.get(key)) for key in keys)
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs)
    return bool(ours == theirs)


def main(folder: str, model: str, targets: str) -> None:
    """Print the first objection, or null."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        several = objections(Path(folder), architecture(json.loads(model)), json.loads(targets))
        first = next(several, None)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds
        sentence = " ".join(str(error).split())[:300]
        kind = type(error).__name__
        first = Objection(why=f"transformers cannot build this model: {kind}: {sentence}")
    print(json.dumps(first and asdict(first)))


if __name__ == "__main__":
    main(*sys.argv[1:])
