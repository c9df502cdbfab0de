"""Why transformers would not load a folder of weights as a model without dropping, adding or
changing a tensor.

``python -m primus_images.training.backends.finetune.objections FOLDER MODEL`` (MODEL: the sizes as
JSON) prints the first objection as JSON, or null.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from primus_images.files import json_if_readable
from primus_images.recipes.architecture import Architecture, architecture
from primus_images.recipes.tensors import OTHER_MODEL, header, plain_shapes, tensor_files, text_name
from primus_images.training.backends.finetune.models import (
    OUTER,
    config_of,
    config_of_weights,
    stored,
)
from primus_images.training.backends.loop import weights
from primus_images.yamlfile import read_values

_CONFIG: Any = read_values(Path(__file__).with_name("config.yaml")).data


def objections(folder: Path, model: Architecture) -> Iterator[dict[str, str]]:
    """Yield what prevents a strict load of ``folder`` as ``model``: ``why``, and maybe ``where``
    and ``hint``.
    """
    from safetensors import SafetensorError, safe_open
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, __version__

    kind = json_if_readable(folder / "config.json").get("model_type")
    if kind not in CONFIG_MAPPING:
        hint = "take weights of a type that it has: primus runs no code that comes with weights"
        why = f"transformers {__version__} has no models of type {kind}"
        yield {"why": why, "where": f"{folder}/config.json: model_type", "hint": hint}
        return
    config = config_of_weights(folder)
    if model.has_formula:
        yield from _other_settings(
            folder / "config.json", config_of(model, "sdpa").to_dict(), config
        )
    places: dict[str, Path] = {}
    shapes: dict[str, torch.Tensor] = {}
    for file in tensor_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    places[text_name(name)] = file
        except SafetensorError as error:
            yield {
                "why": f"the file is damaged: {error}",
                "where": str(file),
                "hint": "fetch it again",
            }
            return
        shapes |= {
            name: torch.empty(size, device="meta")
            for name, size in plain_shapes(header(file)).items()
        }
    model_of_config, report = AutoModelForCausalLM._model_mapping[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=shapes,
        device_map={"": "meta"},
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    for kind in ("mismatched_keys", "unexpected_keys", "missing_keys"):
        names = sorted(report[kind], key=str)
        if names:
            where = str(places.get(names[0], folder))
            yield {
                "why": f"transformers reports {kind}: {names[0]}",
                "where": where,
                "hint": OTHER_MODEL,
            }
    (output, embedding), files = OUTER, weights.Files(folder)
    tied = config.tie_word_embeddings and output in files and embedding in files
    if tied and not torch.equal(files.whole(embedding), files.whole(output)):
        yield {
            "why": (
                f"config.json ties the output layer to the embedding, but {output} differs "
                f"from {embedding}"
            ),
            "where": str(places[output]),
            "hint": "set tie_word_embeddings to false in config.json",
        }
    if not hasattr(getattr(model_of_config, "model", None), "layers"):
        yield {
            "why": (
                f"primus shards layers, which models of type {config.model_type} do not have "
                "in model.layers"
            )
        }
    for name, _ in model_of_config.named_parameters():
        try:
            stored(files, name)
        except SystemExit as error:
            hint = "load them with transformers, and save_pretrained"
            if not model.has_formula:
                hint = (
                    "primus reads no weights of this type that transformers renames or joins "
                    "when it loads them"
                )
            yield {"why": str(error), "hint": hint}


def _other_settings(file: Path, mine: dict[str, Any], config: Any) -> Iterator[dict[str, str]]:
    theirs = config.to_dict()
    theirs["rope_parameters"] = _CONFIG["yarn"] | {
        k: v for k, v in (theirs["rope_parameters"] or {}).items() if k != "type"
    }
    mine["rope_parameters"] = _CONFIG["yarn"] | mine["rope_parameters"]
    for key in sorted(mine.keys() | type(config)().to_dict().keys()):
        if (
            key not in _CONFIG["free"]
            and not key.startswith("_")
            and not _same(mine.get(key), theirs.get(key))
        ):
            why = (
                f"{key} is {theirs.get(key)!r} in the weights, and {mine.get(key)!r} in the "
                "recipe's model"
            )
            if "dropout" in key:
                hint = {"hint": "primus trains without dropout: set it to 0.0 in a copy"}
            else:
                hint = {}
            yield {"why": why, "where": f"{file}: {key}", **hint}


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return all(_same(mine.get(key), theirs.get(key)) for key in mine.keys() | theirs.keys())
    if isinstance(mine, float) and isinstance(theirs, int | float):
        return math.isclose(mine, theirs)
    return bool(mine == theirs)


def main(folder: str, model: str) -> None:
    """Print the first objection, or null."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        first = next(objections(Path(folder), architecture(json.loads(model))), None)
    except Exception as error:
        lines = " ".join(str(error).split())
        first = {
            "why": f"transformers cannot build this model: {type(error).__name__}: {lines[:300]}"
        }
    print(json.dumps(first))


if __name__ == "__main__":
    main(*sys.argv[1:])
