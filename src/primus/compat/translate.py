"""Keys and options of Primus → settings of a recipe, by the table ``keys.yaml``. What it does not know is refused."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from primus.errors import InputError, nearest
from primus.recipes.schema import backend_rules, backends
from primus.recipes.setting import Value
from primus.yamlfile import Scalar, read_values, spell, value

ALLOW_UNMAPPED = "--allow-unmapped leaves them out"
# Sections of the recipe in which a flat name of Megatron is looked up, in this order.
_SECTIONS = ("training", "model", "optimizer", "ddp")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One key with its value and its place: ``file:line:col``, or the option as typed."""

    key: str
    value: Value
    where: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The translation of one key. The comment at the top of ``keys.yaml`` explains the fields."""

    to: str | None = None
    choice: str | None = None
    values: Mapping[str, Scalar] | None = None
    prefix: str = ""
    needs: Sequence[str] = ()
    off: Sequence[str] = ()
    because: str = ""


@dataclass(kw_only=True)
class Translation:
    """The result of a translation.

    ``settings`` are keys of the recipe in order; a later value replaces an earlier one. ``precision`` is the
    command-line choice. ``sources`` maps settings to the options that they come from. ``left_out`` are sentences about
    keys that have no effect here. ``unmapped`` are options that no recipe can express, with the reason.
    """

    settings: dict[str, Value] = field(default_factory=dict)
    precision: str | None = None
    sources: dict[str, Option] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unmapped: list[tuple[Option, str]] = field(default_factory=list)

    def words(self) -> tuple[str, ...]:
        """Return the settings as ``key=value``."""
        return tuple(f"{key}={spell(setting)}" for key, setting in self.settings.items())

    def set(self, key: str, setting: Value, option: Option) -> None:
        """Set a key of the recipe, and record that its value comes from ``option``."""
        self.settings.pop(key, None)
        self.settings[key] = setting
        self.sources[key] = option

    def refuse_unmapped(self) -> None:
        """Raise InputError that names every unmapped option, one per line, if there are any."""
        if self.unmapped:
            (first, reason), *others = self.unmapped
            more = "".join(f"\n{option.where}: {option.key}: {why}" for option, why in others)
            raise InputError(f"{first.key}: {reason}{more}", where=first.where, hint=ALLOW_UNMAPPED)

    def placed(self, error: InputError) -> InputError:
        """Return ``error``, which is about a setting, with the key of Primus and its place instead."""
        option = self.sources.get(str(error.where).removeprefix("command line: ").partition("=")[0])
        return InputError(f"{option.key}: {error.message}", where=option.where, hint=error.hint) if option else error


def options(words: Sequence[str]) -> list[Option]:
    """Parse ``--key value``, ``--key=value`` and ``--key`` (true). InputError for a word that belongs to no option."""
    parsed: list[Option] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            hint = "write --key value or --key=value, as in --training.local_batch_size 6"
            raise InputError(f"{word!r} belongs to no option", where="command line", hint=hint)
        key, separator, text = word[2:].partition("=")
        if not re.fullmatch(r"[A-Za-z][\w.-]*", key):
            raise InputError(f"{word!r} is not an option", where="command line")
        if not separator:
            # The next word is the value unless it is an option. A negative number is a value.
            text = rest.pop(0) if rest and not re.match(r"--[A-Za-z]", rest[0]) else "true"
        parsed.append(Option(key=key, value=typed(text), where=f"--{key} {text}"))
    return parsed


def typed(text: str) -> Value:
    """Return the YAML value of ``text``. Text that is neither a scalar nor a list of scalars stays text."""
    try:
        return value(text, "") if text else text
    except InputError:
        return text


@cache
def table(name: str) -> dict[str, Any]:
    """Return the contents of ``NAME.yaml`` of this package."""
    return cast("dict[str, Any]", read_values(Path(__file__).with_name(f"{name}.yaml")).data)


@cache
def keys(backend: str) -> Mapping[str, Entry]:
    """Return key of Primus → translation, for one backend."""
    rows = {**table("keys")["every"], **table("keys").get(backend, {})}
    return {key: Entry(**({"to": row} if isinstance(row, str) else row)) for key, row in rows.items()}


def recipe_of(backend: str, stem: str) -> tuple[str, Mapping[str, Scalar]]:
    """Return the recipe of Primus's model ``stem``, and the settings that the model adds to it."""
    row = table("paths")["stems"][backend][stem]
    return (row, {}) if isinstance(row, str) else (row["recipe"], row["settings"])


def translate(
    backend: str, arguments: Sequence[Option], defaults: Mapping[str, Value] = MappingProxyType({}), precision: str = ""
) -> Translation:
    """Translate options in order, over ``defaults`` and ``precision``. A null keeps the recipe's own value."""
    done = Translation(precision=precision or None)
    entries, values = keys(backend), {option.key: option.value for option in arguments}
    for option in arguments:
        if option.value is None:
            continue
        patterns = (row for name, row in entries.items() if name.endswith("*") and fnmatchcase(option.key, name))
        entry = entries.get(option.key) or next(patterns, None)
        if entry is None:
            _translate_native(backend, option, done)
        elif not entry.needs or any(values.get(key) not in (None, False) for key in entry.needs):
            _translate_listed(option, entry, done)
    done.settings = {**defaults, **done.settings}
    return done


def _translate_listed(option: Option, entry: Entry, done: Translation) -> None:
    values: list[Value] = [option.value]
    if entry.values is not None:
        # Lists, such as torchtitan's converters, are translated item by item.
        items = option.value if isinstance(option.value, list) and option.value else [option.value]
        words = [spell(item) for item in items]
        if unknown := [word for word in words if word not in entry.values]:
            because = f"; {entry.because}" if entry.because else ""
            reason = f"{unknown[0]} has no counterpart (known: {', '.join(entry.values)}){because}"
            done.unmapped.append((option, reason))
        values = [entry.values[word] for word in words if entry.values.get(word) is not None]
    if entry.choice:
        done.precision = str(values[-1]) if values else done.precision
    elif entry.to:
        for setting in values:
            done.set(entry.to, f"{entry.prefix}{setting}" if entry.prefix else setting, option)
            for key in entry.off if setting else ():
                if key not in done.settings:
                    done.set(key, False, option)
    elif entry.because and entry.values is None:
        done.left_out.append(f"{option.key} is left out: {entry.because}")


def _translate_native(backend: str, option: Option, done: Translation) -> None:
    rules, owned = backend_rules(backend), backends()[backend].owned
    flat = backend == "megatron" and "." not in option.key
    names = [f"{section}.{option.key}" for section in _SECTIONS] if flat else [option.key]
    if owner := next((name for name in names if name in owned), None):
        done.unmapped.append((option, f"is set by primus: use {owned[owner]}"))
    elif name := next((name for name in names if name in rules), None):
        done.set(f"{backend}.{name}", option.value, option)
    else:
        similar = [*keys(backend), *(rule.rpartition(".")[2] if backend == "megatron" else rule for rule in rules)]
        done.unmapped.append((option, "no recipe has such a key" + nearest(option.key, similar)))
