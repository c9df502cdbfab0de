"""Find a recipe file and read it into a flat table of settings, each with its line and column."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from primus.errors import InputError
from primus.recipes.model import Scalar, Setting, Value

__all__ = ["find", "folder", "names", "parse"]

_IN_IMAGE = Path("/opt/primus/recipes")


def folder() -> Path:
    """Where recipes are: ``PRIMUS_RECIPES``, else this source checkout's, else the image's folder."""
    if asked := os.environ.get("PRIMUS_RECIPES"):
        return Path(asked)
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file() and (checkout / "recipes").is_dir():
        return checkout / "recipes"
    return _IN_IMAGE


def names() -> list[str]:
    """The recipes that can be named, sorted."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def find(name: str) -> Path:
    """The file of a recipe given by name or by path. InputError names what there is."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise InputError(f"there is no recipe file {name}")
        return path
    path = folder() / f"{name}.yaml"
    if not path.is_file():
        known = names()
        near = get_close_matches(name, known, 1)
        there_are = f"recipes in {folder()}: {', '.join(known)}" if known else f"{folder()} holds no recipes"
        raise InputError(f"no recipe {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""), hint=there_are)
    return path


def parse(text: str, file: str) -> dict[str, Setting]:
    """Read recipe text into dotted keys. ``file`` is the name used in origins.

    InputError for anything that is not a mapping of mappings and plain values, and for a key given twice
    (YAML itself would silently keep the last).
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        raise InputError(f"this is not YAML: {error.problem}", where=where) from error
    except yaml.YAMLError as error:
        raise InputError(f"this is not YAML: {error}", where=file) from error
    if not isinstance(root, yaml.MappingNode):
        raise InputError("a recipe is a mapping of keys to values", where=f"{file}:1:1")
    settings: dict[str, Setting] = {}
    _flatten(root, "", file, settings)
    return settings


def _flatten(node: yaml.MappingNode, prefix: str, file: str, into: dict[str, Setting]) -> None:
    seen: set[str] = set()
    for key_node, value_node in node.value:
        where = _where(key_node, file)
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError("a key must be a word", where=where)
        key = f"{prefix}{key_node.value}"
        if key in seen:
            raise InputError(f"{key} is given twice", where=where)
        seen.add(key)
        if isinstance(value_node, yaml.MappingNode):
            _flatten(value_node, f"{key}.", file, into)
            continue
        into[key] = Setting(value=_value(value_node, key, file), origin=_where(value_node, file))


def _value(node: Any, key: str, file: str) -> Value:
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, key, file)
    items: list[Scalar] = []
    for item in node.value:
        if not isinstance(item, yaml.ScalarNode):
            raise InputError(f"{key} must hold plain values only", where=_where(item, file))
        items.append(_scalar(item, key, file))
    return items


def _scalar(node: yaml.ScalarNode, key: str, file: str) -> Scalar:
    loader = yaml.SafeLoader("")
    try:
        value: object = loader.construct_object(node)
    except yaml.YAMLError as error:
        raise InputError(f"{key}: {node.value!r} is not a plain value", where=_where(node, file)) from error
    if value is not None and not isinstance(value, (str, int, float, bool)):
        raise InputError(f"{key}: {node.value!r} reads as a {type(value).__name__}; quote it", where=_where(node, file))
    return value


def _where(node: Any, file: str) -> str:
    return f"{file}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
