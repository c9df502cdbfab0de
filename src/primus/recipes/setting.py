"""One setting of a recipe, its bounds, and the choices that determine which settings apply.

Bounds are declared with a field as an interval: ``[1, inf)``, ``(0, 1]``, ``[0, training.steps]``. An end is a number,
``inf`` or another key of the same section, so that one notation covers ranges and relations. ``-1 | [1, inf)`` allows
one more value outside the interval.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from primus.yamlfile import Scalar

# Names of types in messages.
WORDS = {
    "str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list",
    "tuple": "a list", "None": "null",
}  # fmt: skip
# The choices that determine which cases of a recipe apply. Each is also a command-line option.
CHOICES = ("backend", "mode", "precision", "gpu", "nodes", "proxy")

_INTERVAL = re.compile(r"(?:(-?[0-9]+) \| )?([\[(])([^,]+), ([^\])]+)([\])])")

Value = Scalar | list[Scalar]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The user's choices. None stands for the recipe's default, or for what the machine has."""

    backend: str | None = None
    mode: str | None = None
    precision: str | None = None
    gpu: str | None = None
    nodes: int | None = None
    proxy: bool | None = None

    def words(self) -> list[str]:
        """Return the command-line options for the same choices."""
        named = [f"--{name}={value}" for name in CHOICES[:-1] if (value := getattr(self, name)) is not None]
        return named if self.proxy is None else [*named, "--proxy" if self.proxy else "proxy=false"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value and its origin: ``file:line:col``, or the command-line argument that set it.

    ``because`` is the reason that the recipe gives for a value on which sources disagree.
    """

    value: Value
    origin: str
    because: str = ""


def bounded(default: Any, bounds: str) -> Any:
    """Return a dataclass field with an interval for its value or, if the value is a list, for each item."""
    return dataclasses.field(default=default, metadata={"bounds": bounds})


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """One interval. ``special`` is a value allowed outside it. An end that is text is the name of another key."""

    special: int | None
    low: float | str
    low_open: bool
    high: float | str
    high_open: bool

    def objection(self, value: float, look_up: Callable[[str], float | None]) -> tuple[str, str | None] | None:
        """Return why ``value`` is outside (the end of a sentence) and the key that bounds it; None if it is inside.

        ``look_up`` returns the value of a key, or None. An end without a value does not bound anything.
        """
        if value == self.special:
            return None
        for end, is_open, words in (
            (self.low, self.low_open, ("at least", "greater than")),
            (self.high, self.high_open, ("at most", "less than")),
        ):
            limit = look_up(end) if isinstance(end, str) else end
            if limit is None:
                continue
            beyond = value < limit if end is self.low else value > limit
            if beyond or (is_open and value == limit):
                number = int(limit) if float(limit).is_integer() else limit
                beside = "" if self.special is None else f"{self.special} or "
                named = f"{end} = {number}" if isinstance(end, str) else f"{number}"
                return f"must be {beside}{words[is_open]} {named}, not {value}", end if isinstance(end, str) else None
        return None


@cache
def interval(text: str) -> Bounds:
    """Parse an interval. Raises ValueError if ``text`` is not one."""
    match = _INTERVAL.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an interval")
    special, opening, low, high, closing = match.groups()
    return Bounds(
        special=int(special) if special else None,
        low=_end(low), low_open=opening == "(", high=_end(high), high_open=closing == ")",
    )  # fmt: skip


def _end(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
