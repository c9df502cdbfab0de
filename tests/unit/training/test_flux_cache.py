"""A cache of images that FLUX can be trained on, and weights that it can begin with."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from primus_images.errors import InputError  # noqa: E402
from primus_images.recipes.resolve import resolve  # noqa: E402
from primus_images.recipes.setting import Choices  # noqa: E402
from primus_images.training.backends.flux import backend  # noqa: E402

RECIPE = resolve("flux.1-dev", (), Choices(gpu="cpu", proxy=True, mode="pretrain"))
DIT = RECIPE.architecture.dit
SIDE = DIT.image_size // 8


def recipe(key: str, value: Path) -> Any:
    """Return the recipe with a folder in place of a setting."""
    setting = next(iter(RECIPE.settings.values()))
    settings = {**RECIPE.settings, key: replace(setting, value=str(value), origin="here")}
    return replace(RECIPE, settings=settings)


def cache(images: int = 2) -> dict[str, Any]:
    return {
        "latents": torch.zeros(images, DIT.in_channels // 4, SIDE, SIDE),
        "text": torch.zeros(images, DIT.text_tokens, DIT.text_dim),
        "pooled": torch.zeros(images, DIT.pooled_dim),
    }


def test_cache_of_the_models_sizes_is_accepted(tmp_path: Path) -> None:
    save_file(cache(), tmp_path / "a.safetensors")
    save_file(cache(0), tmp_path / "b.safetensors")
    backend.check_data(recipe("assets.corpus", tmp_path))
    backend.check_data(RECIPE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.pop("text"), "latents, text and pooled; text is missing"),
        (
            lambda content: content.update(pooled=torch.zeros(2, 3)),
            f"pooled is [2, 3], but the model needs [images, {DIT.pooled_dim}]",
        ),
        (
            lambda content: content.update(pooled=torch.zeros(1, DIT.pooled_dim)),
            "latents, text and pooled have different numbers of images",
        ),
        (lambda content: content.update(cache(0)), "the cache contains no image"),
    ],
)
def test_other_cache_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    content = cache()
    change(content)
    save_file(content, tmp_path / "a.safetensors")
    with pytest.raises(InputError) as caught:
        backend.check_data(recipe("assets.corpus", tmp_path))
    assert words in str(caught.value).replace(" × ", ", ")


def test_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pooled, found none"):
        backend.check_data(recipe("assets.corpus", tmp_path))


def test_weights_are_checked_against_the_recipe(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    given = recipe("flux.weights", tmp_path)
    with pytest.raises(InputError, match=r"have no config\.json"):
        backend.check_weights(given)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError):
        backend.check_weights(given)
    config = backend.config_of(RECIPE.architecture)
    (tmp_path / "config.json").write_text(json.dumps(config))
    backend.check_weights(given)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 5}))
    with pytest.raises(InputError, match="the weights have 5"):
        backend.check_weights(given)
    with pytest.raises(InputError, match="there is no folder"):
        backend.check_weights(recipe("flux.weights", tmp_path / "other"))
    backend.check_weights(RECIPE)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(backend.config_of(RECIPE.architecture)))
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(InputError, match=r"model\.safetensors"):
        backend.check_weights(recipe("flux.weights", tmp_path))
