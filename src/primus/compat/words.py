"""Options in the style of Primus's scripts: ``--key value``, ``--key=value``, or ``--key`` alone for true."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from primus.errors import InputError
from primus.recipes.setting import Value
from primus.yamlfile import spell, value


@dataclass(frozen=True, kw_only=True)
class Given:
    """One key with its value and its place: ``file:line:col``, or the option as typed.

    ``layer`` is its origin: ``modules`` and ``models`` are Primus's presets, ``file`` and ``option`` the user's input.
    """

    key: str
    value: Value
    where: str
    layer: Literal["modules", "models", "file", "option"] = "file"


def options(words: Sequence[str]) -> list[Given]:
    """Parse the options of a command line. Raises InputError for a word that belongs to no option."""
    found: list[Given] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise InputError(
                f"{word!r} belongs to no option", where="command line",
                hint="write --key value or --key=value, as in --training.local_batch_size 6",
            )  # fmt: skip
        key, separator, text = word[2:].partition("=")
        if not re.fullmatch(r"[A-Za-z][\w.-]*", key):
            raise InputError(f"{word!r} is not an option", where="command line")
        if not separator:
            # The next word is the value unless it is an option. A negative number is a value.
            text = rest.pop(0) if rest and not re.match(r"--[A-Za-z]", rest[0]) else "true"
        found.append(Given(key=key, value=typed(text), where=f"--{key} {text}", layer="option"))
    return found


def typed(text: str) -> Value:
    """Return the YAML value of ``text``. Text that is neither a scalar nor a list of scalars stays text."""
    try:
        return value(text, "") if text else text
    except InputError:
        return text


def spelt(given: Value) -> str:
    """Return ``given`` as YAML text. This is the inverse of :func:`typed` for the values of a recipe."""
    return spell(given)
