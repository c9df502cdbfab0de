"""Find a recipe file and read it into a flat table of settings, each with its line and column."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from primus.errors import InputError, nearest
from primus.recipes.backends import LOADER
from primus.recipes.known import check_choice, check_word
from primus.recipes.model import Scalar, Setting, Value

__all__ = ["Case", "Source", "beside", "find", "folder", "names", "parse", "read"]

_IN_IMAGE = Path("/opt/primus/recipes")
_TOO_DEEP = "nested too deeply, or an anchor that holds itself"
# A few aliases of aliases can stand for more than any memory holds.
_MOST_VALUES = 10_000


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
        if path.is_dir():
            raise InputError(f"{name} is a folder, not a recipe file")
        if not path.is_file():
            raise InputError(f"there is no recipe file {name}")
        return path
    path = folder() / f"{name}.yaml"
    known = names()
    if name not in known:
        there_are = f"recipes in {folder()}: {', '.join(known)}" if known else f"{folder()} holds no recipes"
        raise InputError(f"no recipe {name!r}" + nearest(name, known), hint=there_are)
    return path


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings that hold when every choice of ``when`` is among the words given for it."""

    when: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, Setting]

    def holds(self, chosen: Mapping[str, str]) -> bool:
        """Whether ``chosen`` (choice → word) meets every condition; ``nodes: multi`` is any number above one."""
        return all(
            chosen[choice] in words or (choice == "nodes" and "multi" in words and chosen["nodes"] != "1")
            for choice, words in self.when.items()
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """One recipe file as written: what always holds, and its cases in order."""

    settings: Mapping[str, Setting]
    cases: tuple[Case, ...]


def read(path: Path) -> Source:
    """A recipe file with the files it ``uses`` before it, each once. InputError tells the place."""
    settings: dict[str, Setting] = {}
    cases: list[Case] = []
    _collect(path, settings, cases, set(), ())
    return Source(settings=settings, cases=tuple(cases))


def beside(path: Path, name: str) -> Path:
    """The file that the recipe at ``path`` calls ``name``: beside it, else among primus's own recipes."""
    near = path.parent / name
    return near if near.exists() or not (folder() / name).exists() else folder() / name


def _collect(
    path: Path, settings: dict[str, Setting], cases: list[Case], seen: set[Path], above: tuple[Path, ...]
) -> None:
    source, uses = parse(_text(path), str(path))
    here = path.resolve()
    seen.add(here)
    for name in uses:
        used = beside(path, str(name.value))
        if used.resolve() in (*above, here):
            raise InputError(f"{used.name} uses itself", where=name.origin)
        if used.resolve() in seen:
            continue
        if not used.is_file():
            raise InputError(f"there is no file {name.value!r} to use", where=name.origin)
        _collect(used, settings, cases, seen, (*above, here))
    settings.update(source.settings)
    cases += source.cases


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text (byte {error.start})", where=str(path)) from error
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error


@lru_cache(maxsize=256)  # a list of all recipes meets the same shared files again and again
def parse(text: str, file: str) -> tuple[Source, list[Setting]]:
    """Read recipe text into dotted keys, and the files it uses. ``file`` is the name used in origins.

    InputError for anything that is not a mapping of mappings and plain values, and for a key given twice
    (YAML itself would silently keep the last).
    """
    try:
        root = yaml.compose(text, Loader=LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        raise InputError(f"this is not YAML: {error.problem}", where=where) from error
    except yaml.YAMLError as error:
        raise InputError(f"this is not YAML: {' '.join(str(error).split())}", where=file) from error
    except RecursionError:
        raise InputError(_TOO_DEEP, where=file) from None
    if not isinstance(root, yaml.MappingNode):
        raise InputError("a recipe is a mapping of keys to values", where=f"{file}:1:1")
    settings: dict[str, Setting] = {}
    cases: list[Case] = []
    uses: list[Setting] = []
    _once(root.value, file)
    for key, value in root.value:
        if key.value == "cases":
            cases = [_case(node, file) for node in _items(value, "cases", file)]
        elif key.value == "uses":
            uses = [
                Setting(value=_scalar(n, "uses", file), origin=_where(n, file)) for n in _items(value, "uses", file)
            ]
    plain = [(key, value) for key, value in root.value if key.value not in ("cases", "uses")]
    try:
        _flatten(plain, "", file, settings)
    except RecursionError:
        raise InputError(_TOO_DEEP, where=file) from None
    for key, setting in settings.items():
        if key.startswith("default."):
            choice = key.removeprefix("default.")
            check_choice(choice, setting.origin)
            check_word(choice, setting, several=False)
    return Source(settings=settings, cases=tuple(cases)), uses


def _items(node: Any, key: str, file: str) -> list[Any]:
    if not isinstance(node, yaml.SequenceNode):
        raise InputError(f"{key} must be a list", where=_where(node, file))
    return list(node.value)


def _case(node: Any, file: str) -> Case:
    """One case: ``when``, an optional ``because``, and settings."""
    if not isinstance(node, yaml.MappingNode):
        raise InputError("a case is a mapping with 'when' and settings", where=_where(node, file))
    when: dict[str, Setting] = {}
    because = ""
    rest = []
    _once(node.value, file)
    for key, value in node.value:
        if key.value == "when" and isinstance(value, yaml.MappingNode):
            _flatten(value.value, "", file, when)
        elif key.value == "because":
            because = str(_scalar(value, "because", file))
        else:
            rest.append((key, value))
    if not when:
        raise InputError("a case needs 'when': the choices it holds for", where=_where(node, file))
    for choice, setting in when.items():
        check_choice(choice, setting.origin)
        check_word(choice, setting, several=True)
    settings: dict[str, Setting] = {}
    _flatten(rest, "", file, settings)
    return Case(
        when={choice: _words(setting.value) for choice, setting in when.items()},
        settings={key: replace(setting, because=because) for key, setting in settings.items()},
    )


def _words(value: Value) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    return tuple(str(item).lower() if isinstance(item, bool) else str(item) for item in items)


def _once(pairs: list[Any], file: str, prefix: str = "") -> None:
    """InputError for a key that is no word, or given twice."""
    seen: set[str] = set()
    for key_node, _ in pairs:
        where = _where(key_node, file)
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError("a key must be a word", where=where)
        if key_node.value in seen:
            raise InputError(f"{prefix}{key_node.value} is given twice", where=where)
        seen.add(key_node.value)


def _flatten(pairs: list[Any], prefix: str, file: str, into: dict[str, Setting]) -> None:
    _once(pairs, file, prefix)
    for key_node, value_node in pairs:
        key = f"{prefix}{key_node.value}"
        if isinstance(value_node, yaml.MappingNode):
            _flatten(value_node.value, f"{key}.", file, into)
            continue
        if len(into) >= _MOST_VALUES:
            raise InputError("too many values for a recipe", where=_where(key_node, file))
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
    try:
        value: object = SafeConstructor().construct_object(node)
    except yaml.YAMLError as error:
        raise InputError(f"{key}: {node.value!r} is not a plain value", where=_where(node, file)) from error
    if value is not None and not isinstance(value, (str, int, float, bool)):
        raise InputError(f"{key}: {node.value!r} reads as a {type(value).__name__}; quote it", where=_where(node, file))
    return value


def _where(node: Any, file: str) -> str:
    return f"{file}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
