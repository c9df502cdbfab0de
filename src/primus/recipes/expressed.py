"""Checks that a backend supports every field of a model's description, so that no field is silently dropped.

``backends.yaml`` lists, for each family, which fields may differ from their default, which values some fields may have,
and which fields must be equal. Fields without effect (``moe.top_k`` of a dense model) are refused as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from primus.recipes.backends import Model, backends
from primus.recipes.mesh import Fault
from primus.recipes.recipe import Recipe
from primus.recipes.schema import model_rules
from primus.recipes.setting import Value
from primus.yamlfile import spell

# Part of the model → the key that enables it.
_SWITCHES = {"rope_scaling": "rope_scaling.kind", "moe": "moe.experts", "mla": "mla.kv_lora_rank"}
# The parameters of each kind of rope scaling, besides factor and original_max_position.
_STRETCH = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
_OFF: tuple[Value, ...] = (0, "none")


def faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield each field of the model that the recipe's backend does not support: its key, the reason and a remedy."""
    rules = model_rules()
    values = {key: rule.default for key, rule in rules.items()} | recipe.section("model")
    changed = [key for key, rule in rules.items() if not _same(values[key], rule.default)]
    yield from _idle(recipe, values, changed)
    row = _row(recipe.knows.models, values)
    if row is None:
        yield _no_model(recipe, values)
        return
    active = [key for key in changed if values.get(_SWITCHES.get(key.partition(".")[0], ""), True) not in _OFF]
    yield from _dropped(recipe, row, values, active)
    yield from _limited(recipe, row, values, active)


def _same(value: Value, default: Value) -> bool:
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _latent(values: Mapping[str, Value]) -> bool:
    return bool(values["mla.kv_lora_rank"])


def _row(rows: tuple[Model, ...], values: Mapping[str, Value]) -> Model | None:
    return next((row for row in rows if values["family"] in row.families and row.latent == _latent(values)), None)


def _no_model(recipe: Recipe, values: Mapping[str, Value]) -> Fault:
    family, others = values["family"], _others(recipe, values, "family")
    hint = f"--backend {' or '.join(others)}" if others else None
    if any(family in row.families for row in recipe.knows.models):
        why = f"{recipe.backend} has no {family} {'with' if _latent(values) else 'without'} latent attention"
        return "model.mla.kv_lora_rank", why, hint
    return "model.family", f"{recipe.backend} has no model of the family {family}", hint


def _others(recipe: Recipe, values: Mapping[str, Value], key: str) -> list[str]:
    """Return the other backends that support ``key`` for this family."""
    rows = {name: _row(other.models, values) for name, other in backends().items() if name != recipe.backend}
    return [name for name, row in rows.items() if row is not None and (key == "family" or _has(row, key))]


def _has(row: Model, key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in row.fields)


def _idle(recipe: Recipe, values: Mapping[str, Value], changed: list[str]) -> Iterator[Fault]:
    """Yield fields of a part that is disabled. A file may set them if it disables the part explicitly."""
    kind = str(values["rope_scaling.kind"])
    read = ("kind", "factor", "original_max_position", *_STRETCH.get(kind, ()))
    for key in changed:
        part, _, name = key.partition(".")
        if part == "dit" and values["family"] != "flux":
            yield f"model.{key}", f"has no effect on the family {values['family']}", f"remove model.{key}"
        if part == "rope_scaling" and kind in _STRETCH and name not in read:
            yield f"model.{key}", f"has no effect while model.rope_scaling.kind is {kind}", f"remove model.{key}"
        switch = _SWITCHES.get(part, key)
        kept = f"model.{switch}" in recipe.settings and not recipe.settings[f"model.{key}"].origin.startswith("command")
        if switch != key and values[switch] in _OFF and not kept:
            yield f"model.{key}", f"has no effect while model.{switch} is {values[switch]}", f"set model.{switch}, too"


def _dropped(recipe: Recipe, row: Model, values: Mapping[str, Value], active: list[str]) -> Iterator[Fault]:
    model = recipe.architecture
    for key in active:
        if key == "family" or _has(row, key):
            continue
        if key == "head_dim" and model.head_dim * model.heads == model.hidden_size:
            continue  # the value that every backend uses by default
        others = _others(recipe, values, key)
        hint = f"model.{key}={spell(model_rules()[key].default)}" + (
            f", or --backend {' or '.join(others)}" if others else ""
        )
        yield (
            f"model.{key}",
            f"{recipe.backend}'s model of the family {model.family} cannot express {spell(values[key])}",
            hint,
        )


def _limited(recipe: Recipe, row: Model, values: Mapping[str, Value], active: list[str]) -> Iterator[Fault]:
    for key, allowed in row.values.items():
        switch = _SWITCHES.get(key.partition(".")[0], key)
        if (switch == key or values[switch] not in _OFF) and values[key] not in allowed:
            named = " or ".join(spell(value) for value in allowed)
            why = f"{recipe.backend} computes the family {values['family']} with {named} only, not {spell(values[key])}"
            why += f", where model.{switch} is {values[switch]}" if switch != key else ""
            others = _others(recipe, values, key)
            yield (
                f"model.{key}",
                why,
                f"model.{key}={spell(allowed[0])}" + (f", or --backend {' or '.join(others)}" if others else ""),
            )
    for key, other in row.equal.items():
        if key in active and values[key] != values[other]:
            both = f"{spell(values[key])} and {spell(values[other])}"
            why = f"{recipe.backend} has one value for this and model.{other}, not {both}"
            yield f"model.{key}", why, f"model.{key}={spell(values[other])}"
    for key in row.whole:
        value = values[key]
        if key in active and isinstance(value, float) and not value.is_integer():
            yield f"model.{key}", f"{recipe.backend} takes a whole number, not {value}", f"model.{key}={round(value)}.0"
    targets = recipe.section(recipe.backend).get("lora.targets")
    for name in targets if isinstance(targets, list) and recipe.mode == "lora" else ():
        if name not in row.linears:
            why = f"no linear layer of the family {values['family']} is named {name!r}"
            yield f"{recipe.backend}.lora.targets", why, f"there are: {', '.join(row.linears)}"
