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
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, Union, cast

from primus_images.errors import InputError, did_you_mean
from primus_images.files import read_bytes
from primus_images.yamlfile import (
    LARGEST,
    Document,
    Key,
    Plain,
    conflict,
    parse,
    read_values,
    scalar,
)

T = TypeVar("T")

_SCALARS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


class WrongValue(ValueError):
    """Raised by a dataclass's ``__post_init__`` for the value at ``key`` in the dataclass.

    A key is for example ``"rows", 2``.
    """

    def __init__(self, message: str, *key: str | int) -> None:
        super().__init__(message)
        self.key = key


class _Place(NamedTuple):
    """A key of a document, and the note about it in ``fields.yaml``."""

    document: Document
    key: Key
    note: Mapping[str, Any]

    def below(self, part: str | int) -> "_Place":
        return self._replace(key=(*self.key, part))

    def error(self, message: str, hint: str | None = None) -> InputError:
        return InputError(message, where=self.document.where(self.key), hint=hint)

    def wrong(self, shape: str, data: Plain, hint: str = "") -> InputError:
        names = [part for part in self.key if isinstance(part, str)]
        name = names[-1] if names else "the file"
        return self.error(f"{name} must be {shape}, not {_seen(data)}", hint or None)


def _seen(data: object) -> str:
    if data is None:
        return "nothing"
    if isinstance(data, str):
        return repr(data)
    if isinstance(data, list):
        return "a list"
    if isinstance(data, dict):
        return "a mapping"
    return str(data)[:40]


def build(cls: type[T], document: Document, data: Plain = None, key: Key = ()) -> T:
    """Build an instance of ``cls`` from the document, or from ``data`` at ``key`` in it."""
    if not key:
        data = document.data
    return cast(T, _dataclass(cls, data, _Place(document, key, {})))


def build_typed(cls: type[T], data: Any, name: str) -> T:
    """Build an instance of ``cls`` from data with numbers and booleans, such as a record's.

    Errors call it ``name``.
    """
    return build(cls, Document(name=name, data=data, places={}, typed=True))


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the types of the dataclass's fields, by name."""
    return typing.get_type_hints(cls)


def _value(hint: Any, data: Plain, place: _Place) -> object:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        hint = typing.get_args(hint)[0]
        origin = typing.get_origin(hint)
    if hint in _SCALARS:
        return _scalar(hint, data, place)
    if dataclasses.is_dataclass(hint):
        return _dataclass(cast(type, hint), data, place)
    if origin is not None:
        return _generic(origin, typing.get_args(hint), data, place)
    return data


def _generic(origin: Any, args: tuple[Any, ...], data: Any, place: _Place) -> object:
    if origin in (tuple, list):
        if not isinstance(data, list):
            raise place.wrong("a list", data)
        if len(data) < place.note.get("least", 0):
            raise place.error(f"{place.key[-1]} is an empty list", place.note["doc"])
        return origin(_value(args[0], item, place.below(i)) for i, item in enumerate(data))
    if origin in (dict, Mapping):
        if not isinstance(data, dict):
            raise place.wrong("a mapping", data)
        return {name: _value(args[1], item, place.below(name)) for name, item in data.items()}
    if data not in args:  # of a typing.Literal
        words = [str(arg) for arg in args]
        hint = did_you_mean(data, words) if isinstance(data, str) else ""
        raise place.wrong("one of " + ", ".join(words), data, hint)
    return data


def _scalar(hint: type, data: Any, place: _Place) -> object:
    if hint is str:
        return _text(data, place)
    shape = _SCALARS[hint]
    value = data
    if not place.document.typed:
        if not isinstance(data, str):
            raise place.wrong(shape, data)
        try:
            value = scalar(data)
        except ValueError as error:
            raise place.error(str(error)) from None
        _require_pattern(data, place)
    if type(value) is int and abs(value) > LARGEST:
        raise place.wrong("a number that fits into 64 bits", data)
    # bool does not count as a number, and a whole number is one.
    fits = type(value) is hint or (hint is float and type(value) is int)
    if not fits or not math.isfinite(value):
        raise place.wrong(shape, data)
    return hint(value)


def _require_pattern(text: str, place: _Place) -> None:
    pattern = place.note.get("pattern")
    if pattern and not re.fullmatch(pattern, text):
        raise place.wrong(place.note.get("shape") or f"text like {pattern}", text)


def _text(data: Any, place: _Place) -> str:
    if not isinstance(data, str):
        raise place.wrong("text", data)
    _require_pattern(data, place)
    return data


def _dataclass(cls: type, data: Plain, place: _Place) -> object:
    fields = fields_of(cls)
    if not isinstance(data, dict):
        raise place.wrong("a mapping with " + ", ".join(fields), data)
    for word in data:
        if word not in fields:
            hint = did_you_mean(word, fields) or "known here: " + ", ".join(fields)
            raise place.below(word).error(f"unknown key {word!r}", hint)
    hints = hints_of(cls)
    notes = notes_of(cls)
    values = {}
    for word, field in fields.items():
        if word in data:
            below = _Place(place.document, (*place.key, word), notes[word])
            values[field.name] = _value(hints[field.name], data[word], below)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise place.error(f"{word!r} is missing here", notes[word].get("doc"))
    try:
        return cls(**values)
    except WrongValue as error:
        wrong = place._replace(key=place.key + error.key)
        raise wrong.error(str(error)) from None
    except ValueError as error:
        raise place.error(str(error)) from None


@cache
def fields_of(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """Return key in the file → field.

    A Python keyword has a trailing underscore in the code (``for_`` → ``for``).
    """
    return {field.name.rstrip("_"): field for field in dataclasses.fields(cls) if field.init}


@cache
def notes_of(cls: type) -> dict[str, Mapping[str, Any]]:
    """Return key in the file → what describes it.

    Notes are ``doc``, ``pattern`` and ``shape``, ``least``, and a format's own. A list must have at
    least ``least`` items, because a missing list may mean all, and an empty one would then mean the
    opposite of what it shows.
    """
    file = Path(inspect.getfile(cls)).with_name("fields.yaml")
    rows = _notes_in(file).get(cls.__name__, {})
    notes = {}
    for word in fields_of(cls):
        note = rows.get(word, {})
        if isinstance(note, str):
            note = {"doc": note}
        notes[word] = note
    return notes


@cache
def _notes_in(file: Path) -> dict[str, Any]:
    if file.exists():
        return cast(dict[str, Any], read_values(file).data)
    return {}


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
    """Read the document at ``path``.

    Raises InputError if it is not JSON, and OSError as any read.
    """
    return parse_json(read_bytes(path), str(path))


def parse_json(data: bytes | str, name: str) -> Document:
    """Parse a document.

    Raises InputError, with the place, if it is not JSON in UTF-8, and for duplicate keys.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        value: Any = json.loads(text, object_pairs_hook=distinct_keys, parse_constant=_refuse)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            # Half a surrogate pair cannot be written again.
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"{name}:{error.lineno}:{error.colno}"
        not_json = InputError(f"not JSON: {error.msg}", where=where)
        raise conflict(text, name) or not_json from None
    except UnicodeError:
        raise InputError("not UTF-8 text", where=name) from None
    except RecursionError:
        raise InputError("nested too deeply", where=name) from None
    except ValueError as error:
        raise InputError(f"not JSON: {error}", where=name) from None
    return _JsonDocument(name=name, data=value, places={}, typed=True, text=text)


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of ``pairs``, for Python's reader of JSON.

    Raises ValueError if a key is there twice.
    """
    result: dict[str, Any] = {}
    for word, value in pairs:
        if word in result:
            raise ValueError(f"duplicate key {word!r}")
        result[word] = value
    return result


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number in JSON")
