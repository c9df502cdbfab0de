"""The table of backends, and the keys of recipes, with their types, defaults and bounds.

The keys of a backend are in ``keys/BACKEND.json``, which ``nox -s docs`` generates from the source
of the version that versions.yaml pins. Keys are therefore checked in the same way whether or not
the backend is installed.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from primus_images.recipes.architecture import Architecture
from primus_images.recipes.setting import WORDS, Settings, Value, outside
from primus_images.yamlfile import Scalar, read_values

# A larger whole number in a recipe is a typing error.
_LARGEST = 10**12
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Names of data types, for keys that a library declares as such.
DTYPES = ("fp32", "bf16", "fp16")
# Text that can be part of a file name.
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One backend. Keys omit its name. The comments in ``backends.yaml`` explain the fields."""

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
    schedule: str = "training.lr_schedule"
    least_rate: str = "training.min_lr"
    least_share: str = ""
    evaluates: bool = False
    resharding: bool = False
    sharded_precision: bool = False
    latent_tp: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)
    bounds: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dtypes: Sequence[str] = ()
    texts: Sequence[str] = ()
    inside: Sequence[str] = ()
    refused: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    checkpointing: Sequence[Mapping[str, Scalar]] = ()

    def key(self, what: str) -> str:
        """Return the full key of a setting that every backend has, such as ``steps``."""
        return f"{self.name}.{self.keys[what]}"


@cache
def backends() -> Mapping[str, Backend]:
    """Return all backends by name."""
    rows = read_values(Path(__file__).with_name("backends.yaml")).data
    return {name: Backend(name=name, **row) for name, row in rows.items()}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What one key accepts: ``types`` by name, one of ``choices``, values within ``bounds``.

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
        """Return why ``value`` is not accepted, as the end of a sentence, or None.

        Bounds are checked separately.
        """
        if not self.types:
            return "needs a Python object, which a recipe cannot express"
        if self.choices and isinstance(value, str):
            if value in self.choices:
                return None
            return f"must be one of {', '.join(self.choices)}, not {value!r}"
        return _type_objection(self.types, value) or self._form_objection(value)

    def _form_objection(self, value: Value) -> str | None:
        if self.filled and not str(value).strip():
            return "must not be empty"
        if self.word and not _WORD.fullmatch(str(value)):
            return f"must be at most 100 letters, digits and ._+-, not {_short(value)}"
        if self.inside and isinstance(value, str):
            parts = value.split("/")
            if ".." in parts or value.startswith("/"):
                return f"must be a relative path inside the run's folder, not {_short(value)}"
        if self.items and isinstance(value, list):
            for item in value:
                objection = _type_objection(self.items, item)
                if objection is not None:
                    kind, _, _ = objection.partition(", not")
                    return f"contains {item!r}: each item {kind}"
        return None


def _type_objection(types: frozenset[str], value: Value) -> str | None:
    kind = type(value).__name__
    if value is None:
        kind = "None"
    accepted = set(types)
    if "float" in types:
        accepted.add("int")
    if "tuple" in types:
        accepted.add("list")
    if kind not in accepted:
        words = sorted({WORDS.get(name, name) for name in types})
        objection = f"must be {' or '.join(words)}, not {_short(value)}"
        if words == ["a list"] and isinstance(value, str):
            objection += f": write [{value}]"
        return objection
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be finite, not {value}"
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"must be within ±{_LARGEST:,}, not {_short(value)}"
    if isinstance(value, str) and _CONTROL.search(value):
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
    rows = read_values(Path(__file__).with_name("keys.yaml")).data
    return {key: _rule(row) for key, row in rows.items()}


def _rule(row: Mapping[str, Any]) -> Rule:
    types = frozenset(row["types"])
    items = frozenset(row.get("items", ()))
    choices = tuple(row.get("choices", ()))
    return Rule(**{**row, "types": types, "items": items, "choices": choices})


@cache
def model_rules() -> Mapping[str, Rule]:
    """Return the rules of keys below ``model.``: the fields of an Architecture."""
    return dict(_fields(Architecture, ""))


def _fields(cls: type[Any], prefix: str) -> Iterator[tuple[str, Rule]]:
    hints = get_type_hints(cls)
    for entry in fields(cls):
        hint = hints[entry.name]
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _fields(hint, f"{prefix}{entry.name}.")
            continue
        kind = "str"
        choices = get_args(hint)
        if get_origin(hint) is not Literal:
            kind = hint.__name__
            choices = entry.metadata.get("choices", ())
        rule = Rule(
            types=frozenset({kind}),
            choices=choices,
            bounds=entry.metadata.get("bounds"),
            default=None if entry.default is MISSING else entry.default,
        )
        yield prefix + entry.name, rule


@cache
def backend_rules(name: str) -> Mapping[str, Rule]:
    """Return the rules of every key of a backend at its pinned version, without its name."""
    file = Path(__file__).parent / "keys" / f"{name}.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    backend = backends()[name]
    rules = {}
    for key, row in content["keys"].items():
        rule = _rule(row)
        if key in backend.dtypes:
            rule = replace(rule, types=frozenset({"str"}), choices=DTYPES, default=DTYPES[0])
        if key in backend.texts:
            rule = replace(rule, types=frozenset({"str"}), filled=True)
        rules[key] = replace(
            rule,
            choices=rule.choices or tuple(backend.choices.get(key, ())),
            bounds=rule.bounds or backend.bounds.get(key),
            inside=key in backend.inside,
        )
    return rules


def out_of_bounds(
    key: str, rules: Mapping[str, Rule], settings: Settings, *, related: bool
) -> tuple[str, str] | None:
    """Return why the value of ``key`` is outside its bounds, and a remedy; None if it is not.

    With ``related``, bounds that name other keys, of the same section, are checked as well.
    """
    rule = rules[key]
    if rule.bounds is None or key not in settings:
        return None
    section = key.partition(".")[0]
    value = _number(settings[key].value)

    def look_up(other: str) -> float | None:
        if not related:
            return None
        full = f"{section}.{other}"
        if full in settings:
            return _number(settings[full].value)
        return _number(rules[full].default)

    objection = value is not None and outside(rule.bounds, value, look_up)
    if value is None or not objection:
        return None
    why, other = objection
    if other is not None:
        full = f"{section}.{other}"
        why = why.replace(f" {other} ", f" {full} ")
        if "at least" in why or "greater than" in why:
            return why, f"raise {key} or lower {full}"
        return why, f"lower {key} or raise {full}"
    default = _number(rule.default)
    if default is not None and outside(rule.bounds, default, look_up) is None:
        return why, f"the default is {rule.default}"
    return why, f"{key} takes {rule.bounds}"


def _number(value: Value) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return None
