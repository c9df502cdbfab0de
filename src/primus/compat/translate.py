"""Keys of Primus's experiments → settings of a recipe. Keys that no recipe can express are listed with a reason."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from primus.compat.arguments import derived
from primus.compat.tables import Entry, entry, is_kernel, keys
from primus.compat.words import Given, spelt
from primus.errors import InputError, nearest
from primus.recipes.backends import backend as known_backend
from primus.recipes.schema import backend_rules
from primus.recipes.setting import Value

# Sections of the recipe in which a flat name of Megatron is looked up, in this order.
_SECTIONS = ("training", "model", "optimizer", "ddp")
_TURBO = "turbo"


@dataclass(frozen=True, kw_only=True)
class Unmapped:
    """A key that no recipe can express, and why."""

    given: Given
    why: str

    def __str__(self) -> str:
        return f"{self.given.where}: {self.given.key}: {self.why}"


@dataclass(kw_only=True)
class Translation:
    """The result of a translation.

    ``settings`` are keys of the recipe in order; a later value replaces an earlier one. ``choices`` are command-line
    options such as precision. ``left_out`` are sentences about keys that have no effect or work differently here.
    ``sources`` maps settings to the keys of Primus that they come from. ``preset`` are the settings that only Primus's
    presets set.
    """

    settings: dict[str, Value] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unmapped: list[Unmapped] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    preset: set[str] = field(default_factory=set)

    def words(self) -> tuple[str, ...]:
        """Return the settings as ``key=value``."""
        return tuple(f"{key}={spelt(value)}" for key, value in self.settings.items())

    def leave(self, key: str, because: str) -> None:
        """Record that ``key`` is left out. Keys with the same reason share one sentence."""
        before = next((one for one in self.left_out if one.endswith(f" left out: {because}")), None)
        if before is None:
            self.left_out.append(f"{key} is left out: {because}")
        else:
            names = re.sub(r" (is|are) left out: .*", "", before, flags=re.DOTALL)
            self.left_out[self.left_out.index(before)] = f"{names}, {key} are left out: {because}"

    def set(self, key: str, value: Value, one: Given) -> None:
        """Set a key of the recipe, and record that its value comes from ``one``."""
        self.settings.pop(key, None)
        self.settings[key] = value
        self.sources[key] = one.key
        (self.preset.discard if one.layer in ("file", "option") else self.preset.add)(key)


def translate(backend: str, given: Sequence[Given]) -> Translation:
    """Translate single options that override a recipe, in order. A null keeps the recipe's own value."""
    done = Translation()
    last = {one.key: one.value for one in given}
    for one in given:
        if one.value is None:
            continue
        what = entry(backend, one.key)
        if what is None:
            _native(backend, one, done)
        else:
            _known(one, what, last, done)
    return done


def translate_all(backend: str, given: Sequence[Given], neutral: Mapping[str, Value]) -> Translation:
    """Translate a whole configuration of Primus, including its presets, in order.

    ``neutral`` are the defaults of Primus's presets, which match what every backend here does. A key that no recipe can
    express is ignored if it has such a value; otherwise it is named in ``left_out`` or ``unmapped``.
    """
    done = Translation()
    last = {one.key: one.value for one in given}
    by_key = {one.key: one for one in given}
    meant = derived(backend, last)
    for key, why in meant.refused.items():
        done.unmapped.append(Unmapped(given=by_key[key], why=f"{spelt(last[key])} has no counterpart: {why}"))
    for key, value in meant.settings.items():
        # A value that Primus leaves to Megatron has no place in a file, so it counts as one of the presets.
        source = by_key.get(meant.sources[key], Given(key=meant.sources[key], value=None, where="", layer="modules"))
        done.set(key, value, source)
    done.choices.update(meant.choices)
    done.left_out += meant.says
    for one in given:
        if meant.holds(one.key):
            continue
        own = one.layer in ("file", "option")
        what = entry(backend, one.key)
        if one.key in meant.quiet and not own:
            continue
        if what is not None:
            # A key without effect is reported only if the user's file sets it, not if it comes from Primus's presets.
            asks = (what.to or what.choice or what.values is not None) and not is_kernel(backend, one.key)
            if own or asks:
                _known(one, what, last, done)
        elif _native_name(backend, one.key) is not None:
            if own or not is_kernel(backend, one.key):
                _native(backend, one, done)
        elif one.key not in neutral or one.value != neutral[one.key]:
            _unsayable(backend, one, neutral, done)
    return done


def _known(one: Given, what: Entry, last: Mapping[str, Value], done: Translation) -> None:
    if what.needs and all(last.get(key) in (None, False) for key in what.needs):
        if what.to == _TURBO and one.value:
            done.leave(one.key, f"it has no effect without {' or '.join(what.needs)}")
        return
    values: list[Value] = [one.value]
    if what.values is not None:
        # Lists, such as torchtitan's converters, are translated item by item.
        words = [spelt(v) for v in one.value] if isinstance(one.value, list) and one.value else [spelt(one.value)]
        wrong = [word for word in words if word not in what.values]
        if wrong and one.value is not None:
            known = ", ".join(what.values)
            reason = f"; {what.because}" if what.because else ""
            done.unmapped.append(Unmapped(given=one, why=f"{wrong[0]} has no counterpart (known: {known}){reason}"))
        values = [made for word in words if (made := what.values.get(word)) is not None]
    if what.to is None and what.choice is None:
        if what.because and what.values is None:
            done.leave(one.key, what.because)
        return
    for value in values:
        if what.choice:
            done.choices[what.choice] = str(value)
        elif what.to == _TURBO:
            # Each key adds one optimization.
            done.set(_TURBO, ",".join(dict.fromkeys([*_listed(done.settings.get(_TURBO)), str(value)])), one)
        elif what.to and (value is not None or not what.to.startswith(("assets.", "model."))):
            done.set(what.to, f"{what.prefix}{value}" if what.prefix else value, one)


def _listed(value: Value) -> list[str]:
    return str(value).split(",") if value else []


def _native_name(backend: str, key: str) -> str | None:
    """Return the backend's own key of this name that a recipe may set, or None."""
    rules = backend_rules(backend)
    owned = known_backend(backend).owned
    if backend == "megatron":
        names = [f"{section}.{key}" for section in _SECTIONS] if "." not in key else [key]
        return next((name for name in names if name in rules and name not in owned), None)
    return key if key not in owned and key in rules else None


def _owned_name(backend: str, key: str) -> str | None:
    owned = known_backend(backend).owned
    names = [f"{section}.{key}" for section in _SECTIONS] if backend == "megatron" and "." not in key else [key]
    return next((name for name in names if name in owned), None)


def _native(backend: str, one: Given, done: Translation) -> None:
    """Translate a key that keeps its name. An unknown key becomes ``unmapped``."""
    found, owned = _native_name(backend, one.key), _owned_name(backend, one.key)
    if owned is not None:
        instead = known_backend(backend).owned[owned]
        done.unmapped.append(Unmapped(given=one, why=f"is set by primus: use {instead}"))
    elif found is not None:
        done.set(f"{backend}.{found}", one.value, one)
    else:
        done.unmapped.append(Unmapped(given=one, why="no recipe has such a key" + nearest(one.key, _names(backend))))


def _unsayable(backend: str, one: Given, neutral: Mapping[str, Value], done: Translation) -> None:
    """Record a value that no recipe can express and that differs from Primus's default."""
    if one.key in neutral:
        usual = spelt(neutral[one.key])
        done.unmapped.append(Unmapped(given=one, why=f"{spelt(one.value)} has no counterpart (known: {usual})"))
    elif one.layer in ("file", "option"):
        _native(backend, one, done)
    elif one.value not in (None, False, 0, "", []):
        done.left_out.append(f"{one.key}: {spelt(one.value)} is Primus's default, and primus does not know the key")


def _names(backend: str) -> list[str]:
    rules = backend_rules(backend)
    return [*keys(backend), *(rule.rpartition(".")[2] if backend == "megatron" else rule for rule in rules)]


def refuse(unmapped: Sequence[Unmapped], hint: str) -> None:
    """Raise InputError that names every unmapped key, one per line, if there are any."""
    if unmapped:
        first, *others = unmapped
        more = "".join(f"\n{other}" for other in others)
        raise InputError(f"{first.given.key}: {first.why}{more}", where=first.given.where, hint=hint)
