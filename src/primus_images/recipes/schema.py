"""The table of backends, and the keys that a recipe may contain, with their types, defaults and
bounds.

The keys of a backend are in ``keys/BACKEND.json``, which ``nox -s docs`` generates from the source
of the version that versions.yaml pins. Keys are therefore checked in the same way whether or not
the backend is installed.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from primus_images.recipes.architecture import Architecture
from primus_images.recipes.setting import WORDS, Setting, Value, outside
from primus_images.yamlfile import Scalar, read_values

# A larger whole number in a recipe is a typing error.
_LARGEST = 10**12
# Text that can be part of a file name.
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One backend. Keys omit the backend's name. The comments in ``backends.yaml`` explain the
    fields.
    """

    name: str
    modes: Sequence[str]
    packages: Sequence[str]
    cpu: Sequence[str]
    keys: Mapping[str, str]
    degrees: Mapping[str, str]
    owned: Mapping[str, str]
    memory_error: float
    tried: Sequence[str]
    judged: Sequence[str]
    unmodelled: Sequence[str] = ()
    shard: str = ""
    warmup: str = "training.warmup_steps"
    evaluates: bool = False
    resharding: bool = False
    sharded_precision: bool = False
    latent_tp: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)
    bounds: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    inside: Sequence[str] = ()
    refused: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    checkpointing: Sequence[Mapping[str, Scalar]] = ()

    def key(self, what: str) -> str:
        """Return the full key of a setting that every backend has: ``steps`` →
        ``torchtitan.training.steps``.
        """
        return f"{self.name}.{self.keys[what]}"


@cache
def backends() -> Mapping[str, Backend]:
    """Return all backends by name."""
    content = cast(
        Mapping[str, Mapping[str, Any]], read_values(Path(__file__).with_name("backends.yaml")).data
    )
    return {name: Backend(name=name, **entry) for name, entry in content.items()}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What one key accepts: type names (``int``, ``str``, ``list`` ...), one of ``choices``, values
    within ``bounds``.

    ``items`` are the types of a list's items. ``filled``: text must not be empty. ``inside``: text
    is a path inside the run's folder. ``word``: text must be usable in a file name. Without types,
    only the library's code can set the key.
    """

    types: frozenset[str]
    choices: tuple[str, ...] = ()
    items: frozenset[str] = frozenset()
    bounds: str | None = None
    filled: bool = False
    inside: bool = False
    word: bool = False
    default: Value = None

    def objection(self, value: Value) -> str | None:
        """Return why ``value`` is not accepted, as the end of a sentence, or None. Bounds are
        checked separately.
        """
        if not self.types:
            return "needs a Python object, which a recipe cannot express"
        if self.choices and isinstance(value, str):
            if value in self.choices:
                return None
            return f"must be one of {', '.join(self.choices)}, not {value!r}"
        objection = _type_objection(self.types, value)
        if objection is not None:
            return objection
        if self.filled and not str(value).strip():
            return "must not be empty"
        if (
            self.inside
            and isinstance(value, str)
            and (value.startswith("/") or ".." in value.split("/"))
        ):
            return f"must be a relative path inside the run's folder, not {_short(value)}"
        if self.word and not _WORD.fullmatch(str(value)):
            return f"must be at most 100 letters, digits and ._+-, not {_short(value)}"
        for item in value if isinstance(value, list) and self.items else ():
            objection = _type_objection(self.items, item)
            if objection is not None:
                return f"contains {item!r}: each item {objection.partition(', not')[0]}"
        return None


def _type_objection(types: frozenset[str], value: Value) -> str | None:
    if value is None:
        kind = "None"
    else:
        kind = type(value).__name__
    accepted = types | ({"int"} if "float" in types else frozenset())
    accepted |= {"list"} if "tuple" in accepted else frozenset()
    if kind not in accepted:
        return (
            f"must be {' or '.join(sorted({WORDS.get(name, name) for name in types}))}, not "
            f"{_short(value)}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be finite, not {value}"
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"must be within ±{_LARGEST:,}, not {_short(value)}"
    if isinstance(value, str) and any(
        ord(character) < 32 or ord(character) == 127 for character in value
    ):
        return f"must not contain control characters, as {_short(value)} does"
    return None


def _short(value: Value) -> str:
    text = repr(value)
    if len(text) <= 80:
        return text
    return f"{text[:77]}…"


@cache
def recipe_rules() -> Mapping[str, Rule]:
    """Return the rules of the keys in ``keys.yaml``, which belong to no backend."""
    return _rules(cast(Mapping[str, Any], read_values(Path(__file__).with_name("keys.yaml")).data))


def _rules(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Rule]:
    rules = {}
    for key, entry in entries.items():
        names = {name: frozenset(entry.get(name, ())) for name in ("types", "items")}
        rules[key] = Rule(**{**entry, **names, "choices": tuple(entry.get("choices", ()))})
    return rules


@cache
def model_rules() -> Mapping[str, Rule]:
    """Return the rules of keys below ``model.``: the fields of
    :class:`primus_images.recipes.architecture.Architecture`.
    """
    return dict(_fields(Architecture, ""))


def _fields(cls: type[Any], prefix: str) -> Iterator[tuple[str, Rule]]:
    hints = get_type_hints(cls)
    for entry in fields(cls):
        hint = hints[entry.name]
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _fields(hint, f"{prefix}{entry.name}.")
        else:
            literal = get_origin(hint) is Literal
            default = entry.default
            rule = Rule(
                types=frozenset({"str" if literal else hint.__name__}),
                choices=get_args(hint) if literal else entry.metadata.get("choices", ()),
                bounds=entry.metadata.get("bounds"),
                default=default if isinstance(default, str | int | float) else None,
            )
            yield prefix + entry.name, rule


@cache
def backend_rules(name: str) -> Mapping[str, Rule]:
    """Return the rules of every key of a backend at its pinned version. Keys omit the backend's
    name.
    """
    content = json.loads(
        (Path(__file__).parent / "keys" / f"{name}.json").read_text(encoding="utf-8")
    )
    knows = backends()[name]
    return {
        key: replace(
            rule,
            choices=rule.choices or tuple(knows.choices.get(key, ())),
            bounds=rule.bounds or knows.bounds.get(key),
            inside=key in knows.inside,
        )
        for key, rule in _rules(content["keys"]).items()
    }


def out_of_bounds(
    key: str, rules: Mapping[str, Rule], settings: Mapping[str, Setting], *, related: bool
) -> tuple[str, str] | None:
    """Return why the value of ``key`` is outside its bounds, and a remedy; None if it is inside, or
    not set.

    With ``related``, bounds that name other keys, of the same section, are checked as well.
    """
    rule = rules[key]
    value = None
    if key in settings:
        value = settings[key].value
    section = key.partition(".")[0]
    if rule.bounds is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None

    def look_up(other: str) -> float | None:
        if not related:
            return None
        full = f"{section}.{other}"
        if full in settings:
            limit = settings[full].value
        else:
            limit = rules[full].default
        if isinstance(limit, int | float) and not isinstance(limit, bool):
            return limit
        return None

    objection = outside(rule.bounds, value, look_up)
    if objection is None:
        return None
    why, other = objection
    if other is not None:
        up, down = (
            ("raise", "lower") if "at least" in why or "greater" in why else ("lower", "raise")
        )
        return why.replace(
            f" {other} ", f" {section}.{other} "
        ), f"{up} {key} or {down} {section}.{other}"
    if (
        isinstance(rule.default, int | float)
        and outside(rule.bounds, rule.default, look_up) is None
    ):
        return why, f"the default is {rule.default}"
    return why, f"{key} takes {rule.bounds}"
