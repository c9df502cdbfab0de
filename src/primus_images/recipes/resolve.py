"""Resolving a recipe: read, choose, apply cases, override, check, fit.

Each stage takes a :class:`Draft` and returns the next one, or raises InputError with the place of
the wrong value.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from os.path import exists
from pathlib import Path
from typing import TypeAlias

from primus_images.errors import InputError
from primus_images.recipes import load, strict
from primus_images.recipes.assets import file_faults, vocabulary_faults
from primus_images.recipes.choose import CPU, LENGTH, choose, supported
from primus_images.recipes.experiments import source as sources
from primus_images.recipes.family import OTHER, families, family
from primus_images.recipes.faults import (
    Fault,
    batch_faults,
    data_faults,
    layout_faults,
    model_faults,
    rank_faults,
)
from primus_images.recipes.long import settings_of_long_run
from primus_images.recipes.overrides import Override, choices_among, read_override, set_twice
from primus_images.recipes.published import kind_faults, published_faults
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import USABLE, gpu_bytes, holds, predict, rules_of
from primus_images.recipes.schema import Backend, Rule, backend_rules, backends
from primus_images.recipes.setting import Choices, Setting, Settings, Value
from primus_images.recipes.weights import model_of
from primus_images.yamlfile import Scalar, spell

# Keys of weights to start from.
_WEIGHTS = ("weights", "finetune.weights", "megatron.weights")
# Sections of the file that guide the resolution and are not settings of the run.
_DECIDING = ("default.", "supports.")

_Check: TypeAlias = Callable[[Recipe], Iterable[Fault]]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the run will be.

    If it is not ``here``, files at absolute paths are not looked for. ``memory`` are the bytes of
    one GPU if they differ from those of its generation.
    """

    here: bool = True
    memory: float | None = None


HERE = Place()


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A recipe that is being resolved.

    ``name``, ``path``, ``choices`` and ``words`` are the user's. ``source`` is what the files say,
    ``chosen`` are the choices with their origins, and ``typed`` the words by their keys.
    ``settings`` are the run's so far. ``tried`` are the values to try of keys with a list.
    """

    name: str
    path: Path
    choices: Choices
    words: Sequence[str]
    source: load.Source
    chosen: Settings = field(default_factory=dict)
    typed: Mapping[str, Override] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    tried: Mapping[str, Sequence[Scalar]] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, str]:
        """The choices as conditions of cases compare them."""
        return {choice: load.words(setting)[0] for choice, setting in self.chosen.items()}

    @property
    def backend(self) -> Backend:
        """The chosen backend."""
        return backends()[self.facts["backend"]]

    @property
    def weights(self) -> Path | None:
        """The folder of weights that the user names, if it is there."""
        for word in self.words:
            key, _, text = word.partition("=")
            if key in _WEIGHTS and exists(text):
                return Path(text)
        return None

    def with_settings(self, settings: Settings) -> "Draft":
        """Return the draft with further settings, which replace those of the same keys."""
        return replace(self, settings={**self.settings, **settings})


def resolve(
    name: str,
    overrides: Sequence[str] = (),
    choices: Choices | None = None,
    among: Path | None = None,
    *,
    place: Place = HERE,
) -> Recipe:
    """Resolve the recipe ``name`` (of the folder ``among``, or a path). Raises InputError.

    ``overrides`` are ``key=value`` words, one for each key, which may omit the backend's name or be
    a short name or a choice: ``training.steps=5``, ``steps=5``, ``precision=fp8``.

    Of a list of values, the first whose predicted memory fits is taken, else the last. With weights
    to fine-tune, the model is that of their ``config.json``.
    """
    path = load.find(name, among).absolute()
    return _resolve(_read(name, path, overrides, choices or Choices()), place)


def changed(recipe: Recipe, words: Sequence[str], choices: Choices | None = None) -> Recipe:
    """Resolve ``recipe`` again, with ``words`` in place of its overrides of the same keys."""
    overrides = {}
    for word in (*recipe.overrides, *words):
        overrides[read_override(word, recipe.knows).key] = word
    name = str(recipe.path) if recipe.by_path else recipe.name
    draft = _read(name, recipe.path, list(overrides.values()), choices or recipe.choices)
    return _resolve(draft, HERE)


def runs_on(entry: load.Entry, precision: str, gpu: str) -> bool:
    """Whether a ``gpu`` holds the recipe on its own number of nodes, with some micro batch."""
    choices = Choices(backend=entry.backend, mode=entry.mode, precision=precision, gpu=gpu)
    try:
        return entry.only_proxy or holds(resolve(str(entry.path), (), choices))
    except InputError:
        return True  # a fault of the recipe, which `show` names


def _resolve(draft: Draft, place: Place) -> Recipe:
    draft = _choose(draft)
    draft = _read_words(draft)
    draft = _apply_cases(draft)
    draft = _scale_batch(draft)
    if draft.weights and place.here:
        draft = _take_sizes(draft, draft.weights)
    draft = _override(draft)
    draft = _settle_steps(draft)
    draft = draft.with_settings(settings_of_long_run(draft.backend, draft.settings, draft.typed))
    draft = _list_values(draft)
    strict.check(draft.settings, draft.source, draft.backend)
    recipe = _recipe(draft)
    _check(recipe, place)
    recipe = _fit(recipe, draft.tried, place)
    _refuse(recipe, batch_faults)
    return recipe


def _read(name: str, path: Path, overrides: Sequence[str], choices: Choices) -> Draft:
    source = sources.read(path)
    choices, words = choices_among(choices, overrides)
    return Draft(name=name, path=path, choices=choices, words=words, source=source)


def _choose(draft: Draft) -> Draft:
    settings = draft.source.settings
    chosen = choose(settings, draft.choices, draft.path, sized=draft.weights is not None)
    draft = replace(draft, chosen=chosen)
    if draft.choices.nodes is None:
        for case in draft.source.cases:
            if "nodes" in case.settings and case.holds(draft.facts):
                chosen = {**chosen, "nodes": case.settings["nodes"]}
    return replace(draft, chosen=chosen)


def _read_words(draft: Draft) -> Draft:
    typed: dict[str, Override] = {}
    for word in draft.words:
        override = read_override(word, draft.backend)
        if override.key in typed:
            raise set_twice(override.key, typed[override.key].word, override.word)
        typed[override.key] = override
    return replace(draft, typed=typed)


def _apply_cases(draft: Draft) -> Draft:
    """Take the file's settings, those of the cases that hold, and the choices."""
    written = draft.source.settings
    settings = {key: written[key] for key in written if not key.startswith(_DECIDING)}
    length_key = draft.backend.key(LENGTH)
    facts = draft.facts
    for case in draft.source.cases:
        length = draft.typed.get(length_key) or settings.get(length_key)
        if length:
            facts[LENGTH] = str(length.value)
        if case.holds(facts):
            settings.update(case.settings)
    settings.update(draft.chosen)
    for other in backends():
        if other != draft.backend.name:
            settings = {key: settings[key] for key in settings if not key.startswith(f"{other}.")}
    return replace(draft, settings=settings)


def _scale_batch(draft: Draft) -> Draft:
    """Multiply the global batch, which is written for one node, unless a case is for several."""
    key = draft.backend.key("global_batch")
    nodes = int(draft.facts["nodes"])
    batch = draft.settings.get(key)
    if nodes == 1 or batch is None or not isinstance(batch.value, int) or batch.value < 1:
        return draft
    for case in draft.source.cases:
        if "nodes" in case.when and key in case.settings and case.holds(draft.facts):
            return draft
    origin = f"{batch.origin} × {nodes} nodes"
    return draft.with_settings({key: replace(batch, value=batch.value * nodes, origin=origin)})


def _take_sizes(draft: Draft, weights: Path) -> Draft:
    """Take the model of the weights, if they are fine-tuned."""
    backend = draft.backend
    written = draft.settings.get("model.family")
    name = str(written.value) if written else ""
    if name not in families() or family(name).images:
        return draft
    if "weights" not in backend_rules(backend.name):
        return draft
    kept = ["model.hf_repo", "model.moe.auxiliary_loss"]
    typed = draft.typed.get("model.family")
    if typed and typed.value == OTHER:
        name = OTHER
        kept = []
    model = model_of(weights, name)
    _refuse_other_sizes(draft.typed, model)
    settings = {key: draft.settings[key] for key in draft.settings if not key.startswith("model.")}
    settings |= {key: draft.settings[key] for key in kept if key in draft.settings}
    settings |= model
    if name == OTHER:
        for key, value in (("compile", False), ("recompute", "full")):
            setting = Setting(value=value, origin="a model of no family")
            settings[f"{backend.name}.training.{key}"] = setting
    length_key = backend.key("seq_len")
    longest = model["model.max_seq_len"]
    if int(str(longest.value)) < int(str(settings[length_key].value)):
        settings[length_key] = longest
    return replace(draft, settings=settings)


def _refuse_other_sizes(typed: Settings, model: Settings) -> None:
    for key, setting in typed.items():
        if key in model and setting.value != model[key].value:
            raise InputError(
                f"{key} is {setting.value}, and the weights have {model[key].value}",
                where=model[key].origin,
                hint="leave it out: the sizes are those of the weights",
            )


def _override(draft: Draft) -> Draft:
    """Apply the user's words, after what follows from the choices."""
    if draft.facts["gpu"] == CPU and draft.facts["proxy"] == "false":
        one = Setting(value=1, origin="one process on a CPU")
        draft = draft.with_settings({"ranks": one})
    return draft.with_settings(draft.typed)


def _settle_steps(draft: Draft) -> Draft:
    """Leave the steps to ``epochs``, which a run counts, or to the user."""
    key = draft.backend.key("steps")
    settings = dict(draft.settings)
    steps = draft.typed.get(key)
    if "epochs" in settings and steps:
        epochs = draft.typed.get("epochs")
        if epochs:
            raise InputError("give either epochs or steps", where=epochs.origin)
        del settings["epochs"]
    elif "epochs" in settings and key in settings:
        origin = "replaced by those of epochs when a run starts"
        settings[key] = replace(settings[key], origin=origin)
    draft = replace(draft, settings=settings)
    if steps is None:
        return draft
    return _shorten_warmup(draft, steps.value)


def _shorten_warmup(draft: Draft, steps: Value) -> Draft:
    """Let the warm-up end with a run that the user shortens."""
    key = f"{draft.backend.name}.{draft.backend.warmup}"
    warmup = draft.settings.get(key)
    if warmup is None or key in draft.typed:
        return draft
    if not isinstance(steps, int) or not isinstance(warmup.value, int):
        return draft
    if not 0 < steps < warmup.value:
        return draft
    origin = f"{warmup.origin}, at most the {steps} steps"
    return draft.with_settings({key: replace(warmup, value=steps, origin=origin)})


def _list_values(draft: Draft) -> Draft:
    """Set the last value of each list, which is the one that needs least memory."""
    tried: dict[str, Sequence[Scalar]] = {}
    settings = dict(draft.settings)
    rules = backend_rules(draft.backend.name)
    for native in draft.backend.tried:
        key = f"{draft.backend.name}.{native}"
        setting = settings.get(key)
        if setting is None or not isinstance(setting.value, list):
            continue
        values = setting.value
        if not values or any(_is_wrong(value, rules[native]) for value in values):
            raise InputError(
                f"{key} is {spell(values)}",
                where=setting.origin,
                hint="give one value, or a list of values to try in this order",
            )
        shown = ", ".join(map(spell, values))
        origin = f"{setting.origin}, the first of {shown} that fits"
        settings[key] = replace(setting, value=values[-1], origin=origin)
        tried[key] = values
    return replace(draft, settings=settings, tried=tried)


def _is_wrong(value: Scalar, rule: Rule) -> bool:
    if rule.objection(value):
        return True
    return type(value) is int and value < 1


def _recipe(draft: Draft) -> Recipe:
    choices = draft.choices
    if not draft.chosen["gpu"].origin.startswith("--gpu"):
        # With these choices, the recipe is the same on any machine.
        choices = replace(choices, gpu=draft.facts["gpu"])
    name = draft.name
    if "/" not in name:
        name = str(draft.settings["name"].value)
    precisions = supported(draft.source.settings)
    return Recipe(
        name=name,
        path=draft.path,
        settings=draft.settings,
        overrides=tuple(override.word for override in draft.typed.values()),
        choices=choices,
        precisions=precisions[draft.facts["backend"], draft.facts["mode"]],
        by_path=load.is_path(draft.name),
        files=draft.source.files,
        says=draft.source.says,
    )


def _check(recipe: Recipe, place: Place) -> None:
    """Raise InputError for the first thing that the recipe asks for and cannot have."""
    checks: tuple[_Check, ...] = (
        partial(file_faults, here=place.here),
        kind_faults,
        model_faults,
        _size_faults,
        published_faults,
        rank_faults,
        layout_faults,
        data_faults,
        vocabulary_faults,
        rules_of(recipe).faults,
        _precision_faults,
    )
    for faults in checks:
        _refuse(recipe, faults)


def _refuse(recipe: Recipe, faults: _Check) -> None:
    for key, why, remedy in faults(recipe):
        raise InputError(f"{key}: {why}", where=_origin(recipe, key, why), hint=remedy)


def _origin(recipe: Recipe, key: str, why: str) -> str:
    # If the key is missing, the place is that of the first setting that the reason names.
    for word in (key, *why.replace(",", "").split()):
        if word in recipe.settings:
            return recipe.settings[word].origin
    return f"{recipe.path}:1:1"


def _size_faults(recipe: Recipe) -> Iterator[Fault]:
    return recipe.architecture.objections()


def _precision_faults(recipe: Recipe) -> Iterator[Fault]:
    backend = recipe.knows
    computed = rules_of(recipe).precision(recipe)
    if computed == recipe.precision:
        return
    remedy = f"the recipe has no case that makes {backend.name} compute {recipe.precision}"
    if backend.sharded_precision and recipe.unsharded:
        remedy = (
            "it computes below float32 where FSDP shards the weights: leave ranks to data or "
            "context parallelism"
        )
    why = f"{recipe.precision} is requested, but the {backend.name} settings give {computed}"
    yield "precision", why, remedy


def _fit(recipe: Recipe, tried: Mapping[str, Sequence[Scalar]], place: Place) -> Recipe:
    """Take the first of the listed values that the memory of the GPU holds, else the last.

    Micro batches that do not divide the global batch are left out.
    """
    memory = place.memory or gpu_bytes(recipe.gpu)
    for values in product(*tried.values()):
        settings = dict(recipe.settings)
        for key, value in zip(tried, values, strict=True):
            settings[key] = replace(settings[key], value=value)
        candidate = replace(recipe, settings=settings)
        if any(batch_faults(candidate)):
            continue
        recipe = candidate
        if memory and predict(recipe).peak <= USABLE * memory:
            break
    return recipe
