"""Strict conversion of plain data, such as a JSON file's, to frozen dataclasses.

Each file format is declared once, as a dataclass, whose fields ``fields.yaml`` beside its module
describes. An unknown key, a missing one or a value of another type is an InputError with its place.
"""

import contextlib
import dataclasses
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, cast

from primus_images.errors import InputError, did_you_mean
from primus_images.files import read_bytes
from primus_images.yamlfile import (
    LARGEST,
    MOST_DIGITS,
    Document,
    Key,
    Plain,
    conflict,
    parse,
    read_values,
    scalar,
)

T = TypeVar("T")

# The name of each type, and the YAML scalars that it accepts. bool does not count as a number.
_SCALARS: dict[type, tuple[str, Callable[[object], bool]]] = {
    str: ("text", lambda value: isinstance(value, str)),
    int: ("a whole number", lambda value: type(value) is int),
    float: (
        "a number",
        lambda value: type(value) in (int, float) and math.isfinite(cast(float, value)),
    ),
    bool: ("true or false", lambda value: type(value) is bool),
}


class WrongValue(ValueError):
    """Raised by a dataclass's ``__post_init__`` for the value at ``key``, such as ``"rows", 2``, in
    the dataclass.
    """

    def __init__(self, message: str, *key: str | int) -> None:
        super().__init__(message)
        self.key = key


def build(cls: type[T], document: Document, data: Plain = None, key: Key = ()) -> T:
    """Build an instance of ``cls`` from the document, or from ``data`` at ``key`` in it. Strict;
    see the module.
    """
    return cast(T, _value(cls, document.data if not key else data, document, key, {}))


def build_typed(cls: type[T], data: Any, name: str) -> T:
    """Build an instance of ``cls`` from data with numbers and booleans, such as a record's; errors
    call it ``name``.
    """
    return build(cls, Document(name=name, data=data, places={}, typed=True))


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the types of the dataclass's fields, by name."""
    return typing.get_type_hints(cls)


def _value(hint: Any, data: Plain, doc: Document, key: Key, meta: Mapping[str, Any]) -> object:
    if hint is Any:
        return data
    if hint in _SCALARS:
        return _scalar(hint, data, doc, key, meta)
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        (inner,) = (a for a in args if a is not type(None))
        return _value(inner, data, doc, key, meta)
    if dataclasses.is_dataclass(hint):
        return _dataclass(cast(type, hint), data, doc, key)
    if origin in (tuple, list):
        if not isinstance(data, list):
            raise _wrong("a list", data, doc, key)
        if len(data) < meta.get("least", 0):
            raise InputError(f"{key[-1]} is an empty list", where=doc.where(key), hint=meta["doc"])
        return origin(_value(args[0], item, doc, (*key, i), meta) for i, item in enumerate(data))
    if origin in (dict, Mapping):
        if not isinstance(data, dict):
            raise _wrong("a mapping", data, doc, key)
        return {name: _value(args[1], item, doc, (*key, name), meta) for name, item in data.items()}
    if data not in args:  # of a typing.Literal
        raise _wrong(
            "one of " + ", ".join(map(str, args)), data, doc, key, near=[str(a) for a in args]
        )
    return data


def _scalar(hint: type, data: Plain, doc: Document, key: Key, meta: Mapping[str, Any]) -> object:
    shape, fits = _SCALARS[hint]
    meaning: object = data
    if not doc.typed and hint is not str and isinstance(data, str):
        try:
            meaning = scalar(data)
        except ValueError as error:
            raise InputError(str(error), where=doc.where(key)) from None
    if type(meaning) is int and abs(meaning) > LARGEST:
        raise _wrong("a number that fits into 64 bits", data, doc, key)
    if isinstance(data, str) != (hint is str or not doc.typed) or not fits(meaning):
        raise _wrong(shape, data, doc, key)
    if isinstance(data, str) and meta.get("pattern") and not re.fullmatch(meta["pattern"], data):
        raise _wrong(meta.get("shape") or f"text like {meta['pattern']}", data, doc, key)
    return hint(meaning)


def _dataclass(cls: type, data: Plain, doc: Document, key: Key) -> object:
    if not isinstance(data, dict):
        raise _wrong("a mapping with " + ", ".join(fields_of(cls)), data, doc, key)
    names = fields_of(cls)
    for word in data:
        if word not in names:
            hint = did_you_mean(word, names) or "known here: " + ", ".join(names)
            raise InputError(f"unknown key {word!r}", where=doc.where((*key, word)), hint=hint)
    values: dict[str, object] = {}
    hints = hints_of(cls)
    notes = notes_of(cls)
    for word, field in names.items():
        if word in data:
            values[field.name] = _value(
                hints[field.name], data[word], doc, (*key, word), notes[word]
            )
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(
                f"{word!r} is missing here", where=doc.where(key), hint=notes[word].get("doc")
            )
    try:
        return cls(**values)
    except ValueError as error:
        inner = ()
        if isinstance(error, WrongValue):
            inner = error.key
        raise InputError(str(error), where=doc.where((*key, *inner))) from None


@cache
def fields_of(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """Return key in the file → field. A Python keyword has a trailing underscore in the code
    (``for_`` → ``for``).
    """
    return {
        f.name.rstrip("_"): f
        for f in dataclasses.fields(cls)
        if f.init and not f.metadata.get("hidden")
    }


@cache
def notes_of(cls: type) -> dict[str, Mapping[str, Any]]:
    """Return key in the file → what describes it: ``doc``, ``pattern`` and ``shape``, ``least``,
    and a format's own.

    A list must have at least ``least`` items, because a missing list may mean all, and an empty one
    would then mean the opposite of what it shows.
    """
    rows = _notes_in(Path(inspect.getfile(cls)).with_name("fields.yaml")).get(cls.__name__, {})
    rows = {word: {"doc": row} if isinstance(row, str) else row for word, row in rows.items()}
    return {word: rows.get(word, {}) for word in fields_of(cls)}


@cache
def _notes_in(file: Path) -> dict[str, Any]:
    if file.exists():
        return cast(dict[str, Any], read_values(file).data)
    return {}


def _wrong(
    shape: str, data: Plain, doc: Document, key: Key, near: list[str] | None = None
) -> InputError:
    if data is None:
        seen = "nothing"
    elif isinstance(data, str):
        seen = repr(data)
    else:
        seen = {list: "a list", dict: "a mapping"}.get(type(data), str(data)[:40])
    name = next((str(part) for part in reversed(key) if isinstance(part, str)), "the file")
    hint = (did_you_mean(data, near) if near and isinstance(data, str) else "") or None
    return InputError(f"{name} must be {shape}, not {seen}", where=doc.where(key), hint=hint)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _JsonDocument(Document):
    text: str = dataclasses.field(repr=False)

    def where(self, key: Key = ()) -> str:
        """Return ``file:line:col`` of ``key``, or only the file if it is too large to search."""
        with contextlib.suppress(InputError):
            # JSON is YAML, whose parser records places. Only errors need them.
            return parse(self.text, self.name).where(key)
        return self.name


def read_json(path: Path) -> Document:
    """Read the document at ``path``. Raises InputError if it is not JSON, and OSError as any read."""
    return parse_json(read_bytes(path), str(path))


def parse_json(data: bytes | str, name: str) -> Document:
    """Parse a document. Raises InputError, with the place, if it is not JSON in UTF-8, and for
    duplicate keys.
    """
    try:
        if isinstance(data, str):
            text = data
        else:
            text = data.decode()
        value: Any = json.loads(
            text, object_pairs_hook=distinct_keys, parse_constant=_refuse, parse_int=_short_int
        )
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        merged = conflict(text, name)
        if merged:
            raise merged from None
        raise InputError(
            f"not JSON: {error.msg}", where=f"{name}:{error.lineno}:{error.colno}"
        ) from None
    except UnicodeError:
        raise InputError("not UTF-8 text", where=name) from None
    except RecursionError:
        raise InputError("nested too deeply", where=name) from None
    except ValueError as error:
        raise InputError(f"not JSON: {error}", where=name) from None
    return _JsonDocument(name=name, data=value, places={}, typed=True, text=text)


def _short_int(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of ``pairs``, for Python's reader of JSON. Raises ValueError if a key is
    there twice.
    """
    result = dict(pairs)
    if len(result) < len(pairs):
        words = [word for word, _ in pairs]
        raise ValueError(f"duplicate key {next(word for word in words if words.count(word) > 1)!r}")
    return result


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number in JSON")
