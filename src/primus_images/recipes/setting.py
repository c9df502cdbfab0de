"""One setting of a recipe, its bounds, and the choices that determine which settings apply.

Bounds are declared with a field as an interval: ``[1, inf)``, ``(0, 1]``, ``[0, training.steps]``.
An end is a number, ``inf`` or another key of the same section, so that one notation covers ranges
and relations. ``-1 | [1, inf)`` allows one more value outside the interval.
"""

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from primus_images.yamlfile import Scalar

# Names of types in messages.
WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "None": "null",
}
# The choices that determine which cases of a recipe apply. Each is also a command-line option.
CHOICES = ("backend", "mode", "precision", "gpu", "nodes", "proxy")

_INTERVAL = re.compile(r"(?:(-?[0-9]+) \| )?([\[(])([^,]+), ([^\])]+)([\])])")
_NUMBER = re.compile(r"-?(?:[0-9.]+|inf)")

Value = Scalar | list[Scalar]
# How the origin of a value begins that the user typed as a word.
COMMAND_LINE = "command line"


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
        words = []
        for name in CHOICES:
            value = getattr(self, name)
            if name != "proxy" and value is not None:
                words.append(f"--{name}={value}")
        if self.proxy is not None:
            words.append("--proxy" if self.proxy else "proxy=false")
        return words


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One value and its origin: ``file:line:col``, or the command-line argument that set it.

    ``because`` is the reason that the recipe gives for a value on which sources disagree.
    ``deliberate``: an experiment file has the value, which counts more than the publisher's.
    """

    value: Value
    origin: str
    because: str = ""
    deliberate: bool = False

    @property
    def typed(self) -> bool:
        """Whether the value stands on the command line."""
        return self.origin.startswith(COMMAND_LINE)


# Settings by their dotted keys.
Settings: TypeAlias = Mapping[str, Setting]


def share_of(text: str) -> float:
    """Return the share that a percentage is: 0.01 of ``1%``. Raises ValueError for other text."""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)%", text)
    if not match or float(match[1]) > 100:
        raise ValueError(f"{text!r} is not a percentage")
    return float(match[1]) / 100


def bounded(default: Any, bounds: str) -> Any:
    """Return a dataclass field with an interval for its value or, if the value is a list, for each
    item.
    """
    return dataclasses.field(default=default, metadata={"bounds": bounds})


def outside(
    bounds: str, value: float, look_up: Callable[[str], float | None] = lambda _key: None
) -> tuple[str, str | None] | None:
    """Return why ``value`` is outside ``bounds``, and the key that bounds it; None if inside.

    The reason is the end of a sentence. ``look_up`` returns the value of a key, or None. An end
    without a value does not bound anything.
    """
    special, opening, low, high, closing = ends_of(bounds)
    if special and value == int(special):
        return None
    ends = (
        (low, operator.lt, opening == "(", "at least", "greater than"),
        (high, operator.gt, closing == ")", "at most", "less than"),
    )
    for end, is_beyond, is_open, closed_words, open_words in ends:
        limit, key = _limit(end, look_up)
        if limit is None or not (is_beyond(value, limit) or (is_open and value == limit)):
            continue
        relation = open_words if is_open else closed_words
        if special:
            relation = f"{special} or {relation}"
        shown = str(int(limit) if float(limit).is_integer() else limit)
        if key:
            shown = f"{key} = {shown}"
        return f"must be {relation} {shown}, not {value}", key
    return None


def _limit(end: str, look_up: Callable[[str], float | None]) -> tuple[float | None, str | None]:
    if _NUMBER.fullmatch(end):
        return float(end), None
    return look_up(end), end


@cache
def ends_of(bounds: str) -> tuple[str, ...]:
    """Return special value, bracket, low end, high end and bracket. Raises ValueError."""
    match = _INTERVAL.fullmatch(bounds)
    if match is None:
        raise ValueError(f"{bounds!r} is not an interval")
    return match.groups("")
