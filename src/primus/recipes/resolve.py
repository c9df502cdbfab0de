"""From a recipe's name and the user's overrides to a checked, resolved recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import yaml

from primus.errors import InputError
from primus.recipes import load, schema
from primus.recipes.model import Recipe, Setting, Value
from primus.recipes.schema import Rule

__all__ = ["data_parallel", "derived_precision", "resolve"]


def resolve(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load recipe ``name`` (or a path to one), apply ``key.sub=value`` overrides in order, check everything.

    Keys of the backend's section may be given without its name: ``training.steps=5``.
    Raises InputError with the place that set the offending value and, for a key, the nearest valid one.
    """
    path = load.find(name).absolute()
    settings = load.parse(path.read_text(encoding="utf-8"), str(path))
    backend = settings.get("backend")
    prefix = f"{backend.value}." if backend else ""
    for word in overrides:
        key, setting = _override(word, prefix)
        settings[key] = setting
    _check_keys(settings, path)
    recipe = Recipe(name=name, path=path, settings=settings, overrides=tuple(overrides))
    _check_sense(recipe)
    return replace(recipe, name=recipe.get("name", str) if "/" not in name else name)


def _override(word: str, backend: str) -> tuple[str, Setting]:
    key, separator, text = word.partition("=")
    if not separator or not key:
        raise InputError(f"{word!r} is not key=value", where="command line", hint="example: training.steps=5")
    known = key in schema.RECIPE or key.startswith(("model.args.", backend)) or key.split(".")[0] in _OWN_SECTIONS
    try:
        value: Value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise InputError(f"{text!r} is not a plain value", where=f"command line: {key}") from error
    return (key if known else backend + key), Setting(value=value, origin=f"command line: {word}")


_OWN_SECTIONS = {"validation", "assets"}


def _check_keys(settings: Mapping[str, Setting], path: Path) -> None:
    for key in schema.RECIPE:
        if key not in settings and not key.startswith("description"):
            raise InputError(f"{key} is missing", where=f"{path}:1:1")
    rules: dict[str, Rule | None] = dict(schema.RECIPE)
    backend = schema.torchtitan_rules()
    model = schema.torchtitan_model_rules(str(settings["model.name"].value))
    rules.update({f"torchtitan.{key}": rule for key, rule in (backend or {}).items()})
    rules.update({f"model.args.{key}": rule for key, rule in (model or {}).items()})
    # Without the backend (on a build machine) its keys cannot be judged; inside the image they always are.
    unknown_is_fine = tuple(
        section for section, there in (("torchtitan.", backend), ("model.args.", model)) if there is None
    )
    for key, setting in settings.items():
        if key in schema.OWNED:
            raise InputError(f"{key} is set by primus", where=setting.origin, hint=f"use {schema.OWNED[key]}")
        rule = rules.get(key)
        if rule is None:
            if key.startswith(unknown_is_fine) and unknown_is_fine:
                continue
            near = get_close_matches(key, rules, 1, 0.5)
            raise InputError(
                f"there is no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                where=setting.origin,
            )
        if (objection := rule.objection(setting.value)) is not None:
            raise InputError(f"{key} {objection}", where=setting.origin)


_TRAINING = "torchtitan.training"
_AT_LEAST_ONE = (
    "ranks",
    f"{_TRAINING}.steps",
    f"{_TRAINING}.seq_len",
    f"{_TRAINING}.local_batch_size",
    "validation.resume_at",
    "validation.accumulation",
)
_MODEL_PARALLEL = tuple(f"torchtitan.parallelism.{kind}_parallel_degree" for kind in ("tensor", "pipeline", "context"))
_REPLICAS = "torchtitan.parallelism.data_parallel_replicate_degree"


def _check_sense(recipe: Recipe) -> None:
    """What no schema says: presence, sizes that must divide, files that must exist, one precision."""

    def refuse(key: str, why: str, hint: str | None = None) -> None:
        origin = recipe.settings[key].origin if key in recipe.settings else f"{recipe.path}:1:1"
        raise InputError(f"{key}: {why}", where=origin, hint=hint)

    for key in _AT_LEAST_ONE:
        if key not in recipe.settings:
            refuse(key, "is missing; torchtitan's own default would not be visible in the recipe")
    for key in (*_AT_LEAST_ONE, *_MODEL_PARALLEL, _REPLICAS):
        if recipe.find(key, 1) < 1:
            refuse(key, "must be at least 1")
    for key in recipe.section("assets"):
        if not recipe.asset(key).exists():
            refuse(f"assets.{key}", f"there is no {recipe.asset(key)}")

    ranks = recipe.get("ranks", int)
    degrees = math.prod(recipe.find(key, 1) for key in (*_MODEL_PARALLEL, _REPLICAS))
    if ranks % degrees:
        refuse("ranks", f"{ranks} ranks do not divide by TP·PP·CP·replicas = {degrees}")
    local = recipe.get(f"{_TRAINING}.local_batch_size", int)
    batch = recipe.find(f"{_TRAINING}.global_batch_size", -1)
    together = local * data_parallel(recipe)
    if batch > 0 and batch % together:
        refuse(
            f"{_TRAINING}.global_batch_size",
            f"{batch} is not a multiple of local batch × data parallel size = {together}",
        )
    if local % recipe.get("validation.accumulation", int):
        refuse("validation.accumulation", f"must divide the local batch of {local}")
    given, asked = derived_precision(recipe), recipe.get("precision", str)
    if given != asked:
        refuse(
            "precision",
            f"{asked} is asked, but the torchtitan settings give {given}",
            f"set {_TRAINING}.mixed_precision_param (float32: fp32, bfloat16: bf16)",
        )


def data_parallel(recipe: Recipe) -> int:
    """How many ranks see different data: all of them ÷ (TP · PP · CP)."""
    return recipe.get("ranks", int) // math.prod(recipe.find(key, 1) for key in _MODEL_PARALLEL)


def derived_precision(recipe: Recipe) -> str:
    """The precision the backend's settings give: the dtype the matrix products run in.

    torchtitan 0.2.2: ``mixed_precision_param`` (default bfloat16) is the dtype FSDP2 gathers weights in, or
    autocast's on one rank; converters replace linear layers on top of it.
    """
    if recipe.section("torchtitan").get("model.converters"):
        return "converted"
    dtype = recipe.find("torchtitan.training.mixed_precision_param", "bfloat16")
    return {"float32": "fp32", "bfloat16": "bf16"}.get(dtype, dtype)
