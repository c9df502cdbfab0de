"""Keys and options of Primus → settings of a recipe, by the table ``keys.yaml``.

A key of Megatron or torchtitan that the table does not list keeps its name, if the backend has it.
``megatron_arguments.json`` has all arguments of Megatron-LM: those at their default have no effect,
and others are refused by name.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from primus_images.errors import InputError, alike
from primus_images.recipes.experiments.presets import Argument, typed
from primus_images.recipes.schema import backend_rules, backends
from primus_images.recipes.setting import Value
from primus_images.yamlfile import Scalar, read_values, spell

ALLOW_UNMAPPED = "--allow-unmapped leaves them out"
# Sections of the recipe in which a flat name of Megatron is looked up, in this order.
_SECTIONS = ("training", "model", "optimizer", "ddp")
_FOLDER = Path(__file__).parent
# In Megatron, MXFP8 is a form of FP8.
_FP8_FORM = "megatron.model.fp8_recipe"
# Names in a sentence that has many.
_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The translation of one key. The comment at the top of ``keys.yaml`` explains the fields."""

    to: str | None = None
    choice: str | None = None
    values: Mapping[str, Scalar] | None = None
    further: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    prefix: str = ""
    needs: Sequence[str] = ()
    off: Sequence[str] = ()
    because: str = ""
    of_model: bool = False


@dataclass(kw_only=True)
class Translation:
    """The result of a translation.

    ``settings`` are keys of the recipe in order; a later value replaces an earlier one.
    ``precision`` is the command-line choice. ``sources`` maps settings to the arguments that they
    come from. ``left_out`` are keys that have no effect here, with the reason, and ``of_model``
    those that describe the model together. ``unmapped`` are arguments that no recipe can express,
    with the reason.
    """

    settings: dict[str, Value] = field(default_factory=dict)
    precision: str | None = None
    sources: dict[str, Argument] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    of_model: dict[str, Argument] = field(default_factory=dict)
    unmapped: list[tuple[Argument, str]] = field(default_factory=list)

    def words(self) -> tuple[str, ...]:
        """Return the settings as ``key=value``."""
        return tuple(f"{key}={spell(setting)}" for key, setting in self.settings.items())

    def set(self, key: str, setting: Value, argument: Argument) -> None:
        """Set a key of the recipe, and record that its value comes from ``argument``."""
        self.settings.pop(key, None)
        self.settings[key] = setting
        self.sources[key] = argument

    def summary(self) -> str:
        """Return in one sentence which keys have no effect here; "" if all have one."""
        if not self.left_out:
            return ""
        if len(self.left_out) == 1:
            ((key, because),) = self.left_out.items()
            return f"{key} is left out: {because}"
        names = list(self.left_out)
        shown = ", ".join(names[:_NAMED])
        if len(names) > _NAMED:
            shown += f" and {len(names) - _NAMED} more"
        return f"without effect here: {shown} (import-exp gives the reasons)"

    def refuse_unmapped(self) -> None:
        """Raise InputError that names every unmapped argument, one per line, if there are any."""
        if not self.unmapped:
            return
        (first, reason), *others = self.unmapped
        message = f"{first.key}: {reason}"
        for argument, why in others:
            message += f"\n{argument.where}: {argument.key}: {why}"
        raise InputError(message, where=first.where, hint=ALLOW_UNMAPPED)

    def placed(self, error: InputError) -> InputError:
        """Return ``error``, which is about a setting, with the key of Primus at its place."""
        for argument in self.sources.values():
            if argument.where == error.where:
                message = f"{argument.key}: {error.message}"
                return InputError(message, where=error.where, hint=error.hint)
        return error


def options(words: Sequence[str]) -> list[Argument]:
    """Parse ``--key value``, ``--key=value`` and ``--key`` (true).

    Raises InputError for a word that belongs to no option.
    """
    parsed: list[Argument] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise InputError(
                f"{word!r} belongs to no option",
                where="command line",
                hint="write --key value or --key=value, as in --training.local_batch_size 6",
            )
        key, separator, text = word[2:].partition("=")
        if not re.fullmatch(r"[A-Za-z][\w.-]*", key):
            raise InputError(f"{word!r} is not an option", where="command line")
        if not separator:
            # The next word is the value unless it is an option. A negative number is a value.
            text = "true"
            if rest and not re.match(r"--[A-Za-z]", rest[0]):
                text = rest.pop(0)
        parsed.append(Argument(key=key, value=typed(text), where=f"--{key} {text}"))
    return parsed


@cache
def table(name: str) -> dict[str, Any]:
    """Return the contents of ``NAME.yaml`` of this package."""
    return cast("dict[str, Any]", read_values(_FOLDER / f"{name}.yaml").data)


@cache
def megatron_arguments() -> Mapping[str, Value]:
    """Return every argument of Megatron-LM with its default."""
    content = json.loads((_FOLDER / "megatron_arguments.json").read_text(encoding="utf-8"))
    return cast("dict[str, Value]", content["arguments"])


def listed(word: str, rows: Collection[str], where: str, lacking: str = "there is no") -> str:
    """Return ``word``. Raises InputError, which begins with ``lacking``, if no row has it."""
    if word not in rows:
        raise InputError(
            f"{lacking} {word!r}{alike(word, rows)}",
            where=where,
            hint=f"there are: {', '.join(rows)}",
        )
    return word


@cache
def keys(backend: str) -> Mapping[str, Entry]:
    """Return key of Primus → translation, for one backend."""
    entries = {}
    for key, row in {**table("keys")["every"], **table("keys").get(backend, {})}.items():
        if isinstance(row, str):
            entries[key] = Entry(to=row)
        else:
            entries[key] = Entry(**row)
    return entries


def _entry(backend: str, key: str) -> Entry | None:
    """Return the translation of ``key``, whose name in the table may be a pattern."""
    entries = keys(backend)
    if key in entries:
        return entries[key]
    for pattern in _patterns(backend):
        if fnmatchcase(key, pattern):
            return entries[pattern]
    return None


@cache
def _patterns(backend: str) -> tuple[str, ...]:
    return tuple(key for key in keys(backend) if key.endswith("*"))


def translate(
    backend: str,
    arguments: Sequence[Argument],
    defaults: Mapping[str, Value] = MappingProxyType({}),
    precision: str = "",
    *,
    whole: bool = False,
) -> Translation:
    """Translate arguments in order, over ``defaults`` and ``precision``.

    With ``whole``, keys of the model are left to :mod:`.models`, which reads them together.

    A null keeps the recipe's own value. What a preset has and no recipe can express is left out
    without a word, unless the table says which values are possible.
    """
    done = Translation(precision=precision or None)
    enabled = {argument.key for argument in arguments if argument.value not in (None, False)}
    for argument in arguments:
        entry = _entry(backend, argument.key)
        if entry is not None and entry.of_model:
            done.of_model[argument.key] = argument
            if whole:
                continue
        if argument.value is None:
            continue
        if entry is None:
            _translate_native(backend, argument, done)
        elif not entry.needs or not enabled.isdisjoint(entry.needs):
            _translate_listed(argument, entry, done)
    _settle_off(backend, arguments, done)
    done.settings = {**defaults, **done.settings}
    if done.precision == "fp8" and done.settings.get(_FP8_FORM) == "mxfp8":
        done.precision = "mxfp8"
    return done


def _settle_off(backend: str, arguments: Sequence[Argument], done: Translation) -> None:
    """Set to false what another setting excludes, wherever it stands."""
    for argument in arguments:
        entry = _entry(backend, argument.key)
        if entry is None or not entry.to or not done.settings.get(entry.to):
            continue
        for key in entry.off:
            excluded = done.sources.get(key)
            if excluded is not None and done.settings[key] and excluded.level == "override":
                done.left_out[excluded.key] = f"{argument.key} excludes it"
            done.set(key, False, argument)


def _translate_listed(argument: Argument, entry: Entry, done: Translation) -> None:
    values: list[Value] = [argument.value]
    if entry.values is not None:
        values = _translated_values(argument, entry, done)
    elif not (entry.to or entry.choice or entry.of_model) and argument.level == "override":
        done.left_out[argument.key] = entry.because
    if entry.choice and values:
        done.precision = str(values[-1])
    for key, further in entry.further.get(str(argument.value), {}).items():
        done.set(key, further, argument)
    if not entry.to:
        return
    for setting in values:
        done.set(entry.to, f"{entry.prefix}{setting}" if entry.prefix else setting, argument)


def _translated_values(argument: Argument, entry: Entry, done: Translation) -> list[Value]:
    """Translate lists, such as torchtitan's converters, item by item."""
    items = [argument.value]
    if isinstance(argument.value, list) and argument.value:
        items = list(argument.value)
    known = entry.values or {}
    words = [spell(item) for item in items]
    unknown = [word for word in words if word not in known]
    if unknown:
        reason = f"{unknown[0]} has no counterpart (known: {', '.join(known)})"
        if entry.because:
            reason += f"; {entry.because}"
        done.unmapped.append((argument, reason))
    return [known[word] for word in words if known.get(word) is not None]


def _translate_native(backend: str, argument: Argument, done: Translation) -> None:
    rules = backend_rules(backend)
    owned = backends()[backend].owned
    names = [argument.key]
    if backend == "megatron" and "." not in argument.key:
        names = [f"{section}.{argument.key}" for section in _SECTIONS]
    for name in names:
        if name in rules and name not in owned:
            done.set(f"{backend}.{name}", argument.value, argument)
            return
    if argument.level != "override":
        return
    for name in names:
        if name in owned:
            done.unmapped.append((argument, f"is set by primus: use {owned[name]}"))
            return
    if backend == "megatron" and argument.key in megatron_arguments():
        _translate_unused(argument, done)
        return
    done.unmapped.append((argument, _unknown(backend, argument.key)))


def _translate_unused(argument: Argument, done: Translation) -> None:
    """Leave out an argument of Megatron-LM at its default, and refuse another value."""
    default = megatron_arguments()[argument.key]
    if argument.value == default or (argument.value in (False, 0, [], "") and not default):
        done.left_out[argument.key] = "it has Megatron-LM's own default"
        return
    usual = spell(cast(Scalar, default))
    why = f"this argument of Megatron-LM is not supported here, except at its default, {usual}"
    done.unmapped.append((argument, why))


def _unknown(backend: str, key: str) -> str:
    known = [*keys(backend), *backend_rules(backend)]
    who = backend
    if backend == "megatron":
        known += [rule.rpartition(".")[2] for rule in backend_rules(backend)]
        known += megatron_arguments()
        who = "Megatron-LM"
    near = alike(key, [name for name in known if not name.endswith("*")])
    return f"neither {who} nor Primus has such a key, as far as known here{near}"
