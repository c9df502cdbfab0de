"""Options as Primus's scripts took them: ``--key value``, ``--key=value``, and a lone ``--key`` that means true."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from primus.errors import InputError
from primus.recipes.model import Scalar, Value

__all__ = ["Given", "options", "spelt", "typed"]


@dataclass(frozen=True, kw_only=True)
class Given:
    """One key with its value and its place: ``file:line:col``, or the option as typed."""

    key: str
    value: Value
    where: str


def options(words: Sequence[str]) -> list[Given]:
    """Every option of a command line. InputError for a word that belongs to none."""
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
            # A negative number is a value, another option is not.
            text = rest.pop(0) if rest and not re.match(r"--[A-Za-z]", rest[0]) else "true"
        found.append(Given(key=key, value=typed(text), where=f"--{key} {text}"))
    return found


def typed(text: str) -> Value:
    """The value that ``text`` stands for: YAML's, and ``1e-5`` is a number as it is for Python."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
    if isinstance(value, list) and all(isinstance(item, str | int | float | bool | None) for item in value):
        return value
    return value if isinstance(value, str | int | float | bool) or (value is None and text) else text


def spelt(value: Value) -> str:
    """``value`` as YAML reads it back: the inverse of :func:`typed` for what a recipe holds."""
    if isinstance(value, list):
        return f"[{', '.join(spelt(item) for item in value)}]"
    return _spelt(value)


def _spelt(value: Scalar) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        # YAML 1.1 wants a point in the mantissa: 1e-05 alone would be text.
        mantissa, separator, exponent = repr(value).partition("e")
        return f"{mantissa if '.' in mantissa or not separator else mantissa + '.0'}{separator}{exponent}"
    if isinstance(value, str) and (typed(value) != value or re.search(r"[\s,:#\[\]{}&*!|>'\"%@`]", value)):
        return yaml.safe_dump(value, default_style='"', width=10**6).strip()
    return str(value)
