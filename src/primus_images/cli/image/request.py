"""The recipe that a command asks for: by its name, or by the weights that it fine-tunes."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from primus_images.cli.verb import Options
from primus_images.errors import InputError
from primus_images.gpus.detect import visible_gpus
from primus_images.recipes.experiments.presets import ROOT
from primus_images.recipes.experiments.source import ALLOW_UNMAPPED
from primus_images.recipes.family import OTHER
from primus_images.recipes.load import names
from primus_images.recipes.overrides import choices_among
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import Place, resolve
from primus_images.recipes.rules import USABLE, gpu_bytes, largest_batch, predict
from primus_images.recipes.setting import CHOICES, Choices
from primus_images.recipes.weights import HUB, folder_of, nearest_recipe, other_family
from primus_images.training.run import machine
from primus_images.turbo.optimizations import chosen

# A larger micro batch is hardly faster, and a step would train on more samples than fine-tuning
# wants.
_LARGEST_BATCH = 8
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")
_BATCH_KEYS = {"local_batch", "training.micro_batch_size"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A recipe by name, the choices among its variants, and the words that override settings."""

    recipe: str
    choices: Choices
    words: tuple[str, ...]

    def with_words(self, *words: str) -> "Request":
        """Return the request with more words."""
        return replace(self, words=(*self.words, *words))

    def with_mode(self, mode: str) -> "Request":
        """Return the request with another mode."""
        return replace(self, choices=replace(self.choices, mode=mode))

    def with_gpu(self, gpu: str) -> "Request":
        """Return the request for another GPU."""
        return replace(self, choices=replace(self.choices, gpu=gpu))

    def resolved(self, *, here: bool = True, memory: float | None = None) -> Recipe:
        """Resolve the recipe. Raises InputError. ``here`` and ``memory``: as in :class:`Place`."""
        place = Place(here=here, memory=memory)
        recipe = resolve(self.recipe, self.words, self.choices, place=place)
        chosen(recipe)  # refuses names of optimizations that are none
        return recipe


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(Options):
    """Settings that override a recipe's, and the options that choose among its variants."""

    overrides: Sequence[str]
    backend: str | None
    mode: str | None
    precision: str | None
    gpu: str | None
    nodes: int | None
    proxy: bool | None
    ranks: int | None
    steps: int | None
    seed: int | None
    turbo: str | None

    def request_of(self, recipe: str) -> Request:
        """Return the request for the recipe of this name."""
        choices = Choices(**{name: getattr(self, name) for name in CHOICES})
        words = list(self.overrides)
        for name in ("ranks", "steps", "seed", "turbo"):
            value = getattr(self, name)
            if value is not None:
                words.append(f"{name}={value}")
        return Request(recipe=recipe, choices=choices, words=tuple(words))


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(ChoiceOptions):
    """The options of a verb about one recipe, or about weights to fine-tune."""

    recipe: str

    @property
    def request(self) -> Request:
        """The request for the recipe, or for the one that fine-tunes the weights."""
        request = self.request_of(self.recipe)
        if names_weights(self.recipe):
            return fine_tuning(request, self.recipe)
        return request


@dataclass(frozen=True, kw_only=True)
class PresetOptions(ChoiceOptions):
    """The same, where a recipe may be an experiment file, whose presets are in a checkout."""

    primus_root: Path | None
    allow_unmapped: bool

    def request_of(self, recipe: str) -> Request:
        """Return the request for the recipe of this name, or for the experiment file."""
        set_variables(self.primus_root, allow_unmapped=self.allow_unmapped)
        return super().request_of(recipe)


@dataclass(frozen=True, kw_only=True)
class LocalRecipeOptions(PresetOptions, RecipeOptions):
    """The options of a verb about one recipe, an experiment file, or weights to fine-tune."""


def set_variables(primus_root: Path | None, *, allow_unmapped: bool) -> None:
    """Set the variables by which experiment files are read, from primus's own options."""
    if primus_root is not None:
        os.environ[ROOT] = str(primus_root)
    if allow_unmapped:
        os.environ[ALLOW_UNMAPPED] = "1"


def names_weights(name: str) -> bool:
    """Whether ``name`` is a folder of weights, or one on the hub, and not a recipe."""
    return name.startswith(HUB) or (Path(name).is_dir() and name not in names())


def fine_tuning(request: Request, weights: str, *, to_train: bool = False) -> Request:
    """Return the request for the nearest recipe with the model and tokenizer of ``weights``.

    Unless the user sets them, mode, ranks and micro batch are those that fit. The weights
    themselves are only needed ``to_train``; the run then exports what it trained.
    """
    folder = folder_of(weights, whole=to_train)
    choices, words = choices_among(request.choices, request.words)
    other = f"model.family={OTHER}" in words
    nearest = nearest_recipe(folder, choices.mode, other=other)
    if choices.backend not in (None, nearest.backend):
        raise InputError(
            f"--backend {choices.backend} does not fine-tune",
            hint="`primus train` has all backends",
        )
    typed = {re.sub(rf"^({nearest.backend}|assets)\.|=.*", "", word) for word in words}
    if "tokenizer" not in typed and not _has_tokenizer(folder):
        raise InputError(
            f"{folder} has no tokenizer",
            hint="copy it from the weights' source, or tokenizer=FOLDER",
        )
    settings = {"weights": str(folder), "tokenizer": str(folder), **other_family(folder)}
    if to_train:
        settings["save_weights"] = "true"
    gpus = visible_gpus()
    if gpus:
        settings["ranks"] = str(len(gpus))
    added = [f"{key}={value}" for key, value in settings.items() if key not in typed]
    request = Request(
        recipe=nearest.recipe,
        choices=replace(choices, backend=nearest.backend),
        words=(*words, *added),
    )
    if choices.mode is None:
        request = request.with_mode(_mode_that_fits(request))
    batch = _batch_that_fits(request.resolved())
    if batch and not typed & _BATCH_KEYS:
        return request.with_words(f"local_batch={batch}")
    return request


def _has_tokenizer(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)


def _mode_that_fits(request: Request) -> str:
    try:
        batch = _batch_that_fits(request.with_mode("full").resolved())
    except InputError:  # some recipes have LoRA only
        return "lora"
    if batch:
        return "full"
    return "lora"


def _batch_that_fits(recipe: Recipe) -> int:
    memory = gpu_bytes(recipe.gpu)
    if memory is None:
        needed = predict(recipe).states * recipe.get("ranks", int)
        if needed <= (machine.host_bytes() or math.inf):
            return recipe.local_batch
        return 0
    global_batch = recipe.find(recipe.knows.key("global_batch"), 0)
    largest = min(largest_batch(recipe, USABLE * memory), _LARGEST_BATCH)
    for size in range(largest, 0, -1):
        if global_batch < 1 or global_batch % (size * recipe.data_parallel) == 0:
            return size
    return 0
