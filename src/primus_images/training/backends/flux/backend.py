"""The keys and checks of FLUX. Its data are latents, its weights those of diffusers' transformer.

Each safetensors file of a cache of latents contains, for any number of images, ``latents`` [images,
channels, height, width] as scaled by the VAE, ``text`` [images, tokens, width] and ``pooled``
[images, width].
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from primus_images.errors import InputError
from primus_images.files import read_bytes
from primus_images.recipes import tensors
from primus_images.recipes.architecture import Architecture, DiffusionTransformer
from primus_images.recipes.family import family
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.setting import bounded


@dataclass(frozen=True, kw_only=True)
class FluxConfig:
    """The settings of FLUX training.

    ``weights`` are the initial weights: "random" (from the seed), or a folder with the safetensors
    files of diffusers' transformer. ``guidance`` is the scale passed to a model with guidance
    embeddings.
    """

    weights: str = "random"
    guidance: float = bounded(1.0, "[0, inf)")


KEYS = ("latents", "text", "pooled")
_EXPECTED = "expected a folder of safetensors files with the tensors latents, text and pooled"
# One latent of the VAE is 8 × 8 pixels; one token of the transformer is 2 × 2 latents.
_PIXELS = 8
_PER_TOKEN = 4


def check_data(recipe: Recipe) -> None:
    """Raise InputError, with the file, if the recipe's model cannot be trained on its cache."""
    folder = recipe.asset("corpus")
    if folder is None:
        return
    files: list[Path] = []
    if folder.is_dir():
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{_EXPECTED}, found none", where=str(folder))
    images = sum(_images_of(file, recipe.architecture.dit) for file in files)
    if not images:
        raise InputError("the cache contains no image", where=str(folder))


def _images_of(file: Path, model: DiffusionTransformer) -> int:
    """Return the number of images in ``file``, whose tensors must be those of the model."""
    shapes = tensors.header(file).shapes
    missing = [key for key in KEYS if key not in shapes]
    if missing:
        raise InputError(f"{_EXPECTED}; {', '.join(missing)} is missing", where=str(file))
    side = model.image_size // _PIXELS
    expected = {
        "latents": (model.in_channels // _PER_TOKEN, side, side),
        "text": (model.text_tokens, model.text_dim),
        "pooled": (model.pooled_dim,),
    }
    for key, shape in expected.items():
        if shapes[key][1:] != shape:
            needed = _shown(("images", *shape))
            raise InputError(
                f"{key} is {_shown(shapes[key])}, but the model needs {needed}", where=file
            )
    counts = {shapes[key][0] for key in KEYS}
    if len(counts) > 1:
        raise InputError(
            "latents, text and pooled have different numbers of images", where=str(file)
        )
    return counts.pop()


def config_of(model: Architecture) -> dict[str, Any]:
    """Return the arguments of diffusers' transformer with the sizes of ``model``.

    Its config.json has them as well.
    """
    arguments = {}
    for key, name in family("flux").config.items():
        field = "head_size" if key == "head_dim" else key
        arguments[name] = attrgetter(field)(model)
    return arguments


def check_weights(recipe: Recipe) -> None:
    """Raise InputError unless the initial weights are whole, and of the recipe's sizes."""
    folder = recipe.weights
    if folder is None:
        return
    where = recipe.settings["flux.weights"].origin
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}", where=where, hint="name diffusers' folder 'transformer'"
        )
    for file in tensors.tensor_files(folder):
        tensors.header(file)
    file = folder / "config.json"
    try:
        config = {"guidance_embeds": False, **json.loads(read_bytes(file))}
        wrong = _differences(recipe.architecture, config)
    except FileNotFoundError:
        raise InputError(f"the weights in {folder} have no config.json", where=where) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            "config.json is not that of diffusers' FLUX transformer", where=str(file)
        ) from error
    if wrong:
        raise InputError(
            f"the recipe does not match these weights: {'; '.join(wrong)}", where=str(file)
        )


def _differences(model: Architecture, config: Mapping[str, Any]) -> list[str]:
    arguments = config_of(model)
    sentences = []
    for key, name in family("flux").config.items():
        if config[name] != arguments[name]:
            sentences.append(f"model.{key} is {arguments[name]}, the weights have {config[name]}")
    return sentences


def _shown(shape: tuple[object, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
