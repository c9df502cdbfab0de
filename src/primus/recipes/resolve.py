"""From a recipe's name and the user's choices and overrides to a checked, resolved recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from primus.errors import InputError, nearest
from primus.recipes import load, schema
from primus.recipes.backends import Backend, backend, backends
from primus.recipes.choose import choose, supported
from primus.recipes.model import CHOICES, Asked, Recipe, Setting, Value
from primus.recipes.precision import derived_precision, unsharded
from primus.yamlfile import value as typed_value

__all__ = ["resolve"]

_OWN_SECTIONS = {"validation", "assets", "model", "ranks"}
# Parts of the file that decide, and are no settings of the run.
_DECIDING = ("default.", "supports.")


def resolve(name: str, overrides: Sequence[str] = (), asked: Asked | None = None) -> Recipe:
    """Load recipe ``name`` (or a path to one), choose, apply its cases, then ``key=value`` overrides in order.

    Keys of the backend's section may be given without its name: ``training.steps=5``. What every backend has, each
    under a key of its own, may be given by one word: ``steps=5``, ``tp=2``. ``precision=fp8`` and the other choices
    are taken as options. Raises InputError with the place that set the offending value and, for a key, the nearest
    valid one.
    """
    path = load.find(name).absolute()
    source = load.read(path)
    asked, words = _choices_among(asked or Asked(), overrides)
    chosen = choose(source.settings, asked, path)
    settings = {key: s for key, s in source.settings.items() if not key.startswith(_DECIDING)}
    settings.update(chosen)
    facts = {
        choice: str(s.value).lower() if isinstance(s.value, bool) else str(s.value) for choice, s in chosen.items()
    }
    for case in source.cases:
        if case.holds(facts):
            settings.update(case.settings)
    knows = backend(facts["backend"])
    settings = {key: s for key, s in settings.items() if not _elsewhere(key, knows)}
    _scale_batch(settings, source, facts, knows)
    words = [_spelled_out(word, knows) for word in words]
    for word in words:
        key, setting = _override(word, knows)
        settings[key] = setting
    _check_keys(settings, path, knows)
    recipe = Recipe(
        name=name, path=path, settings=settings, overrides=tuple(words), asked=_as_asked(asked, chosen),
        precisions=supported(source.settings)[facts["backend"], facts["mode"]],
    )  # fmt: skip
    _check_sense(recipe)
    return replace(recipe, name=recipe.get("name", str) if "/" not in name else name)


def _as_asked(asked: Asked, chosen: Mapping[str, Setting]) -> Asked:
    """What to ask for to get the same on another machine: a GPU that was detected is named."""
    gpu = chosen["gpu"]
    return asked if gpu.origin.startswith("--gpu") else replace(asked, gpu=str(gpu.value))


def _choices_among(asked: Asked, overrides: Sequence[str]) -> tuple[Asked, list[str]]:
    words = []
    for word in overrides:
        key, _, text = word.partition("=")
        if key not in CHOICES:
            words.append(word)
            continue
        value: object = text
        if key == "nodes":
            if not text.isdigit():
                raise InputError(f"nodes must be a whole number, not {text!r}", where="command line: nodes")
            value = int(text)
        elif key == "proxy":
            if text not in ("true", "false"):
                raise InputError(f"proxy must be true or false, not {text!r}", where="command line: proxy")
            value = text == "true"
        asked = replace(asked, **{key: value})  # type: ignore[arg-type]
    return asked, words


def _elsewhere(key: str, knows: Backend) -> bool:
    """Whether ``key`` belongs to another backend than the chosen one."""
    section = key.partition(".")[0]
    return section != knows.name and section in backends()


def _scale_batch(settings: dict[str, Setting], source: load.Source, facts: Mapping[str, str], knows: Backend) -> None:
    """A global batch is written for one node; n nodes take n times it, unless a case for nodes says it."""
    key, nodes = knows.key("global_batch"), int(facts["nodes"])
    batch = settings.get(key)
    told = any("nodes" in case.when and key in case.settings and case.holds(facts) for case in source.cases)
    if batch is None or nodes == 1 or told or not isinstance(batch.value, int) or batch.value < 1:
        return
    settings[key] = replace(batch, value=batch.value * nodes, origin=f"{batch.origin} × {nodes} nodes")


def _spelled_out(word: str, knows: Backend) -> str:
    """``steps=5`` with the backend's own key for it."""
    what, equals, text = word.partition("=")
    key = knows.keys.get(what) or knows.degrees.get(what)
    return f"{knows.name}.{key}={text}" if key and equals else word


def _override(word: str, knows: Backend) -> tuple[str, Setting]:
    key, separator, text = word.partition("=")
    if not separator or not key:
        raise InputError(f"{word!r} is not key=value", where="command line", hint="example: training.steps=5")
    value: Value = typed_value(text, f"command line: {key}") if text else ""
    setting = Setting(value=value, origin=f"command line: {word}")
    section = key.partition(".")[0]
    if section == knows.name or key in schema.RECIPE:
        return key, setting
    rules, unjudged = schema.backend_rules(knows.name)
    neutral = key.startswith("model.") and key.removeprefix("model.") in schema.model_rules()
    if neutral and key in knows.owned:
        # The recipe's own size, which the backend's key of this name is made from.
        return key, setting
    # What cannot be judged here is taken for the backend's own, unless it would stand among our own sections.
    ours = neutral or (section in _OWN_SECTIONS and section != "model")
    native = key in rules or key in knows.owned or (unjudged and key.startswith(unjudged) and not ours)
    return (f"{knows.name}.{key}" if native or section not in _OWN_SECTIONS else key), setting


def _check_keys(settings: Mapping[str, Setting], path: Path, knows: Backend) -> None:
    for key in ("name", "description", "ranks", "assets.tokenizer", "assets.corpus", "model.family"):
        if key not in settings:
            raise InputError(f"{key} is missing", where=f"{path}:1:1")
    own, unjudged = schema.backend_rules(knows.name)
    rules = dict(schema.RECIPE)
    rules.update({f"{knows.name}.{key}": rule for key, rule in own.items()})
    rules.update({f"model.{key}": rule for key, rule in schema.model_rules().items()})
    open_ended = tuple(f"{knows.name}.{section}" for section in unjudged)
    for key, setting in settings.items():
        if key in CHOICES:
            continue
        native = key.removeprefix(f"{knows.name}.")
        if native != key and native in knows.owned:
            raise InputError(f"{key} is set by primus", where=setting.origin, hint=f"use {knows.owned[native]}")
        if isinstance(setting.value, float) and not math.isfinite(setting.value):
            raise InputError(f"{key} must be finite, not {setting.value}", where=setting.origin)
        rule = rules.get(key)
        if rule is None:
            if open_ended and key.startswith(open_ended):
                continue
            raise InputError(f"there is no key {key!r}" + nearest(key, rules), where=setting.origin)
        if (objection := rule.objection(setting.value)) is not None:
            raise InputError(f"{key} {objection}", where=setting.origin)


_AT_LEAST_ONE = ("steps", "seq_len", "local_batch")


def _check_sense(recipe: Recipe) -> None:
    """What no schema says: presence, sizes that must divide, files that must exist, one precision."""
    knows = recipe.knows

    def refuse(key: str, why: str, hint: str | None = None) -> None:
        origin = recipe.settings[key].origin if key in recipe.settings else f"{recipe.path}:1:1"
        raise InputError(f"{key}: {why}", where=origin, hint=hint)

    keys = ["ranks", *(knows.key(what) for what in _AT_LEAST_ONE)]
    for key in keys:
        if key not in recipe.settings:
            refuse(key, f"is missing; {knows.name}'s own default would not be visible in the recipe")
    degrees = [f"{knows.name}.{key}" for key in knows.degrees.values()]
    for key in (*keys, *degrees, "validation.resume_at", "validation.accumulation"):
        if recipe.find(key, 1) < 1:
            refuse(key, "must be at least 1")
    for name in recipe.section("assets"):
        asset = recipe.asset(name)
        if asset is not None and not asset.exists():
            refuse(f"assets.{name}", f"there is no {asset}", "name a file, a folder, hf:OWNER/NAME or mock")
    if (objection := recipe.architecture.objection()) is not None:
        refuse(f"model.{objection[0]}", objection[1])
    _check_mesh(recipe)
    given = derived_precision(recipe)
    if given != recipe.precision:
        raise InputError(
            f"precision: {recipe.precision} is asked, but the {knows.name} settings give {given}",
            where=recipe.settings["precision"].origin,
            hint="it computes below float32 where FSDP shards the weights: leave ranks to data or context parallelism"
            if knows.sharded_precision and unsharded(recipe)
            else f"the recipe has no case that makes {knows.name} compute {recipe.precision}",
        )


def _check_mesh(recipe: Recipe) -> None:
    """World size, degrees and batches fit each other, and the model fits the degrees."""
    knows, world, origin = recipe.knows, recipe.world_size, recipe.settings["ranks"].origin
    product = math.prod(recipe.degree(kind) for kind in ("tp", "pp", "cp", "replicas"))
    if world % product:
        raise InputError(f"ranks: {world} ranks do not divide by TP·PP·CP·replicas = {product}", where=origin)
    expert, stages = recipe.degree("ep"), recipe.degree("pp")
    if world // stages % expert:
        least = math.lcm(recipe.get("ranks", int), expert * stages) // recipe.get("ranks", int)
        raise InputError(
            f"ranks: {world} ranks do not divide by EP = {expert}" + (f" × PP = {stages}" if stages > 1 else ""),
            where=origin, hint=f"--nodes {least} is the least" if least > recipe.get("nodes", int) else None,
        )  # fmt: skip
    model, tensor = recipe.architecture, recipe.degree("tp")
    for what, size in (("heads", model.heads), ("kv_heads", model.kv_heads), ("vocab_size", model.vocab_size)):
        if size % tensor:
            degree = recipe.settings[f"{knows.name}.{knows.degrees['tp']}"]
            raise InputError(f"model.{what}: {size} does not divide by TP = {tensor}", where=degree.origin)
    if expert > 1 and (not model.moe.experts or model.moe.experts % expert):
        degree = recipe.settings[f"{knows.name}.{knows.degrees['ep']}"]
        raise InputError(f"model.moe.experts: {model.moe.experts} do not divide by EP = {expert}", where=degree.origin)
    if stages > max(1, model.layers):
        degree = recipe.settings[f"{knows.name}.{knows.degrees['pp']}"]
        raise InputError(f"model.layers: {model.layers} layers are fewer than PP stages", where=degree.origin)
    if model.family != "flux" and model.max_seq_len and recipe.seq_len > model.max_seq_len:
        where = recipe.settings[knows.key("seq_len")].origin
        raise InputError(f"{knows.key('seq_len')}: {recipe.seq_len} is more than model.max_seq_len", where=where)
    together = recipe.local_batch * recipe.data_parallel
    key = knows.key("global_batch")
    batch = recipe.find(key, -1)
    if batch < 1 and batch != -1:
        raise InputError(
            f"{key}: must be at least 1, or -1 for one pass of all ranks", where=recipe.settings[key].origin
        )
    if batch > 0 and batch % together:
        raise InputError(
            f"{key}: {batch} is not a multiple of local batch × data parallel size = {together}",
            where=recipe.settings[key].origin,
        )
    if recipe.local_batch % recipe.find("validation.accumulation", 1):
        raise InputError(
            f"validation.accumulation: must divide the local batch of {recipe.local_batch}",
            where=recipe.settings["validation.accumulation"].origin,
        )
