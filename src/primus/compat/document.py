"""One YAML file of Primus: its dotted keys, with environment variables substituted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from primus.compat.words import Given, typed
from primus.errors import InputError
from primus.recipes.setting import Value
from primus.yamlfile import Tree, Values, read_values

_PLACEHOLDER = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")


def plain(path: Path) -> dict[str, Given]:
    """Return the dotted keys of one file. Placeholders take their defaults; the environment is not read."""
    document = read_values(path)
    found: dict[str, Given] = {}
    for key in mapping(document, ()):
        flatten(document, (key,), 0, {}, found)
    return found


def flatten(
    document: Values, key: tuple[str | int, ...], skip: int, environment: Mapping[str, str], into: dict[str, Given]
) -> None:
    """Add everything below ``key`` to ``into``, under dotted names without the first ``skip`` parts."""
    value = at(document, key)
    if isinstance(value, dict):
        for name in value:
            flatten(document, (*key, name), skip, environment, into)
        return
    dotted = ".".join(map(str, key[skip:]))
    where = document.where(key)
    if not dotted:
        raise InputError("overrides must be a mapping of keys to values", where=where)
    into[dotted] = Given(key=dotted, value=_value(value, where, environment), where=where)


def _value(value: Tree, where: str, environment: Mapping[str, str]) -> Value:
    if isinstance(value, list):
        items = [_value(item, where, environment) for item in value]
        if any(isinstance(item, list) for item in items):
            raise InputError("a list may contain plain values only", where=where)
        return [item for item in items if not isinstance(item, list)]
    if isinstance(value, dict):
        raise InputError("a list may contain plain values only", where=where)
    if not isinstance(value, str) or "${" not in value:
        return value
    # Like Primus, convert text to a number or boolean only if it contained a placeholder.
    return typed(filled(value, where, environment))


def filled(text: str, where: str, environment: Mapping[str, str]) -> str:
    """Replace ``${VAR}`` and ``${VAR:default}``. Raises InputError for an unset variable without a default."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name in environment:
            return environment[name]
        if default is None:
            raise InputError(f"{name} is not set in the environment", where=where, hint=f"export {name}=…")
        return default

    filled = _PLACEHOLDER.sub(value, text)
    if "${" in filled:
        raise InputError(f"{text!r} has an unclosed ${{", where=where)
    return filled


def at(document: Values, key: tuple[str | int, ...]) -> Tree:
    """Return the value at ``key``, or None."""
    value = document.data
    for part in key:
        value = value.get(part) if isinstance(value, dict) and isinstance(part, str) else None
    return value


def mapping(document: Values, key: tuple[str | int, ...]) -> dict[str, Tree]:
    """Return the mapping at ``key``. Raises InputError if the value is not a mapping."""
    value = at(document, key)
    if isinstance(value, dict):
        return value
    what = ".".join(map(str, key)) or "an experiment"
    raise InputError(f"{what} must be a mapping of keys to values", where=document.where(key))
