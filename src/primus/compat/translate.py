"""Keys of Primus's experiments → settings of a recipe. What cannot be said is named, with its nearest key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from primus.compat.tables import Entry, entry, keys
from primus.compat.words import Given, spelt
from primus.errors import InputError, nearest
from primus.recipes.backends import backend as known_backend
from primus.recipes.model import Value
from primus.recipes.schema import backend_rules

__all__ = ["Translation", "Unmapped", "refuse", "translate"]

# Where a flat name of Megatron may live in the recipe, in this order.
_SECTIONS = ("training", "model", "optimizer", "ddp")


@dataclass(frozen=True, kw_only=True)
class Unmapped:
    """A key that no recipe can say, and why."""

    given: Given
    why: str

    def __str__(self) -> str:
        return f"{self.given.where}: {self.given.key}: {self.why}"


@dataclass(kw_only=True)
class Translation:
    """``settings`` are a recipe's keys in the order they were given, the last one wins; ``choices`` are options."""

    settings: dict[str, Value] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unmapped: list[Unmapped] = field(default_factory=list)

    def words(self) -> tuple[str, ...]:
        """The settings as ``key=value``."""
        return tuple(f"{key}={spelt(value)}" for key, value in self.settings.items())


def translate(backend: str, given: Sequence[Given]) -> Translation:
    """Every key of ``given``, in order."""
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


def _known(one: Given, what: Entry, last: Mapping[str, Value], done: Translation) -> None:
    if what.needs and last.get(what.needs) in (None, False):
        return
    values: list[Value] = [one.value]
    if what.values is not None:
        # A list is judged item by item: torchtitan's converters.
        words = [spelt(v) for v in one.value] if isinstance(one.value, list) and one.value else [spelt(one.value)]
        wrong = [word for word in words if word not in what.values]
        if wrong:
            known = ", ".join(what.values)
            reason = f"; {what.because}" if what.because else ""
            done.unmapped.append(Unmapped(given=one, why=f"{wrong[0]} has no counterpart (known: {known}){reason}"))
            return
        values = [made for word in words if (made := what.values[word]) is not None]
    if what.to is None and what.choice is None:
        if what.because and what.values is None:
            done.left_out.append(f"{one.key} is left out: {what.because}")
        return
    for value in values:
        if what.choice:
            done.choices[what.choice] = str(value)
        elif what.to:
            done.settings.pop(what.to, None)
            done.settings[what.to] = f"{what.prefix}{value}" if what.prefix else value


def _native(backend: str, one: Given, done: Translation) -> None:
    """A key that keeps its name, or one that nobody knows."""
    rules = backend_rules(backend)
    if backend == "megatron":
        names = [f"{section}.{one.key}" for section in _SECTIONS] if "." not in one.key else [one.key]
        found = next((name for name in names if name in rules or name in known_backend(backend).owned), None)
    else:
        found = one.key if one.key in rules or one.key in known_backend(backend).owned else None
    if found is not None and found in known_backend(backend).owned:
        done.unmapped.append(Unmapped(given=one, why=f"is set by primus: use {known_backend(backend).owned[found]}"))
    elif found is not None:
        done.settings.pop(f"{backend}.{found}", None)
        done.settings[f"{backend}.{found}"] = one.value
    else:
        candidates = [*keys(backend), *(rule.rpartition(".")[2] if backend == "megatron" else rule for rule in rules)]
        done.unmapped.append(Unmapped(given=one, why="no recipe has such a key" + nearest(one.key, candidates)))


def refuse(unmapped: Sequence[Unmapped], hint: str) -> None:
    """InputError that names every key, each on its line; nothing when there is none."""
    if unmapped:
        first, *others = unmapped
        more = "".join(f"\n{other}" for other in others)
        raise InputError(f"{first.given.key}: {first.why}{more}", where=first.given.where, hint=hint)
