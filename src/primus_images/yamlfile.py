"""Reading YAML to plain data with the place of each value. This is the only module that parses
YAML.

Plain scalars follow the core schema of YAML 1.2: ``1e-6`` is a number, ``yes`` and ``2026-11-20``
are text, ``010`` is ten. :func:`read` leaves scalars as text for the strict schemas of
:mod:`primus_images.schema`, so that a version such as ``3.10`` keeps its zero; :func:`read_values`
types them. Duplicate keys, tags and merge keys are errors. The size, the depth and the number of
values of a file are limited, so that a hostile file causes an error message and not a crash.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from primus_images.errors import InputError
from primus_images.files import read_bytes, reason_of

Scalar: TypeAlias = str | int | float | bool | None
Plain: TypeAlias = "str | list[Plain] | dict[str, Plain] | None"
Tree: TypeAlias = "Scalar | list[Tree] | dict[str, Tree]"
Key: TypeAlias = "tuple[str | int, ...]"

_Loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_VALUE_EVENTS = (yaml.NodeEvent, yaml.CollectionEndEvent)
_MOST_CHARACTERS = 500_000
# A few nested aliases can stand for more values than fit into memory.
_MOST_VALUES = 20_000
_DEEPEST = 64
_TOO_DEEP = f"nested too deeply: more than {_DEEPEST} levels"
# No field needs longer numbers, and Python refuses to convert some of them.
MOST_DIGITS = 64
# The largest whole number that a field can hold: it fits into 64 bits.
LARGEST = 2**63 - 1

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NUMBER = (
    r"(?P<int>[-+]?[0-9]+)|(?P<prefixed>0o[0-7]+|0x[0-9a-fA-F]+)"
    r"|(?P<float>[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?)"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
# Characters that YAML does not allow.
_UNREADABLE = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]"
# git's markers in a file that it could not merge.
_CONFLICT = r"(?m)^(?:<{7}|>{7}) "
# Text that needs no quotes, unless it reads as a number or another special value.
_PLAIN = r"[\w/](?:[\w/.+:-]*[\w/])?"


@dataclass(frozen=True, kw_only=True)
class Document:
    """The file's data, and the 1-based line and column of each key (``places``) and value
    (``origins``).

    ``typed`` data contains numbers and booleans, as in JSON; otherwise every scalar is text or
    None.
    """

    name: str
    data: Any
    places: dict[Key, tuple[int, int]] = field(repr=False)
    origins: dict[Key, tuple[int, int]] = field(default_factory=dict, repr=False)
    typed: bool = False

    def where(self, key: Key = ()) -> str:
        """Return ``file:line:col`` of ``key``, or of its nearest parent in the file."""
        return _nearest(self.name, self.places, key)

    def origin(self, key: Key = ()) -> str:
        """Return ``file:line:col`` of the value at ``key``, or of its nearest parent in the file."""
        return _nearest(self.name, self.origins, key)


def _nearest(name: str, places: dict[Key, tuple[int, int]], key: Key) -> str:
    while key and key not in places:
        key = key[:-1]
    line, column = places.get(key, (1, 1))
    return f"{name}:{line}:{column}"


def read_text(path: Path, name: str | None = None) -> str:
    """Return the text of the file at ``path``. Raises InputError if it cannot be read, or is not
    UTF-8.
    """
    shown = name or str(path)
    try:
        return read_bytes(path, shown).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text (byte {error.start})", where=shown) from None
    except OSError as error:
        # A link that leads nowhere is there.
        absent = isinstance(error, FileNotFoundError) and not path.is_symlink()
        if absent:
            sentence = "there is no such file"
        else:
            sentence = f"cannot be read: {reason_of(error)}"
        raise InputError(sentence, where=shown) from None


def parse(text: str, name: str, *, typed: bool = False) -> Document:
    """Parse ``text``, with ``typed`` scalars or all as text. Raises InputError with the place of
    the first error.
    """
    return _Builder(name, typed=typed).build(text)


def read(path: Path, name: str | None = None, *, typed: bool = False) -> Document:
    """Read ``path`` as :func:`parse` does; ``name`` is its name in messages."""
    return parse(read_text(path, name), name or str(path), typed=typed)


parse_values = partial(parse, typed=True)
read_values = partial(read, typed=True)


def value(text: str, where: str) -> Scalar | list[Scalar]:
    """Return the scalar, or list of scalars, for ``text`` from a command line. Raises InputError
    for anything else.
    """
    if len(text) <= 60:
        shown = text
    else:
        shown = f"{text[:60]}…"
    try:
        parsed: Scalar | list[Scalar] = parse_values(text, "value").data
    except InputError as error:
        reason = error.message.removeprefix("this is not YAML: ")
        raise InputError(f"{shown!r} is not a plain value: {reason}", where=where) from None
    if any(
        isinstance(item, list | dict) for item in (parsed if isinstance(parsed, list) else [parsed])
    ):
        raise InputError(
            f"{shown!r} is not a plain value",
            where=where,
            hint="give a scalar or a list of scalars",
        )
    return parsed


def conflict(text: str, name: str) -> InputError | None:
    """Return the error for an unresolved merge conflict in ``text``, with the place of its first
    marker, or None.
    """
    match = re.search(_CONFLICT, text)
    if match is None:
        return None
    where = f"{name}:{text.count(chr(10), 0, match.start()) + 1}:1"
    hint = "keep one of the two sides and delete the marker lines"
    return InputError("a merge conflict is not resolved here", where=where, hint=hint)


def scalar(text: str) -> Scalar:
    """Return the value of the plain scalar ``text`` in YAML 1.2's core schema. ValueError for too
    long a number.
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    number = re.fullmatch(_NUMBER, text)
    if number is None:
        return text
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} characters is too long")
    match number.lastgroup:
        case "int":
            return int(text)
        case "prefixed":
            return int(text, 0)
        case "float":
            return float(text)
        case _:
            return float(text.replace(".", ""))


def spell(data: Scalar | list[Scalar]) -> str:
    """Return ``data`` as YAML that this module reads as the same value."""
    if isinstance(data, list):
        return f"[{', '.join(spell(item) for item in data)}]"
    if data is None or isinstance(data, bool):
        return {None: "null", True: "true", False: "false"}[data]
    if isinstance(data, str):
        special = data in _NULL or data in _BOOL or re.fullmatch(_NUMBER, data)
        if re.fullmatch(_PLAIN, data) and not special:
            return data
        # JSON escapes what is necessary, but YAML folds these line breaks and refuses DEL.
        return re.sub(
            "[\x7f\x85\u2028\u2029]",
            lambda c: f"\\u{ord(c[0]):04x}",
            json.dumps(data, ensure_ascii=False),
        )
    if isinstance(data, float) and not math.isfinite(data):
        if math.isnan(data):
            return ".nan"
        if data > 0:
            return ".inf"
        return "-.inf"
    # With a point in the mantissa, readers of YAML 1.1 also see a number.
    return re.sub(r"^(-?\d+)e", r"\1.0e", repr(data))


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested mappings as dotted keys with values. An empty mapping yields nothing."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def filled(tree: Any, values: Mapping[str, Any]) -> Any:
    """Return the form ``tree`` with the value of each text ``$NAME``. Keys and items without a
    value are left out.
    """
    if isinstance(tree, dict):
        pairs = ((key, filled(below, values)) for key, below in tree.items())
        return {key: value for key, value in pairs if value is not None}
    if isinstance(tree, list):
        return [value for below in tree if (value := filled(below, values)) is not None]
    if isinstance(tree, str) and tree.startswith("$"):
        return values[tree[1:]]
    return tree


def section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the values of the dotted keys below ``name``, which the keys omit."""
    head = f"{name}."
    return {key.removeprefix(head): value for key, value in values.items() if key.startswith(head)}


class _Builder:
    def __init__(self, name: str, *, typed: bool) -> None:
        self._name = name
        self._typed = typed
        self._places: dict[Key, tuple[int, int]] = {}
        self._origins: dict[Key, tuple[int, int]] = {}
        self._events: list[Any] = []
        self._anchors: dict[str, int] = {}
        self._count = self._length = 0

    def build(self, text: str) -> Document:
        if len(text) > _MOST_CHARACTERS:
            raise InputError(
                f"the text is longer than {_MOST_CHARACTERS:,} characters", where=self._name
            )
        bad = re.search(_UNREADABLE, text)
        if bad:
            place = (
                text.count("\n", 0, bad.start()) + 1,
                bad.start() - text.rfind("\n", 0, bad.start()),
            )
            raise self._error(
                f"this is not YAML: the character U+{ord(bad[0]):04X} is not allowed", place
            )
        try:
            self._read(text)
        except yaml.YAMLError as error:
            raise conflict(text, self._name) or self._refusal(error, text) from None
        data = None
        if self._events:
            data = self._data(0, (), 0)[0]
        return Document(
            name=self._name,
            data=data,
            places=self._places,
            origins=self._origins,
            typed=self._typed,
        )

    def _read(self, text: str) -> None:
        # Not by the composer of libyaml, which recurses in C: a deeply nested file would end the
        # process.
        depth = documents = 0
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, _VALUE_EVENTS):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                    event, yaml.CollectionEndEvent
                )
                if depth > _DEEPEST + 1:
                    raise self._error(_TOO_DEEP, _place(event))
                self._events.append(event)
            documents += isinstance(event, yaml.DocumentStartEvent)
            if documents > 1:
                hint = "a file has one document: delete the line '---' and what follows it"
                raise self._error(
                    "this is not YAML: another document begins here", _place(event), hint
                )

    def _refusal(self, error: Exception, text: str) -> InputError:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        if mark:
            where = f"{self._name}:{mark.line + 1}:{mark.column + 1}"
        else:
            where = self._name
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        if "nesting depth" in problem:
            return InputError(_TOO_DEEP, where=where)
        line = ""
        if mark:
            line = (text.split("\n")[mark.line :] or [""])[0]
        remedies = read_values(Path(__file__).with_name("remedies.yaml")).data
        hint = next((hint for part, hint in remedies.items() if part in problem), None)
        if "\t" in line[: len(line) - len(line.lstrip())]:
            problem = "a tab cannot indent a line"
            hint = "use spaces instead of tabs"
        return InputError(f"this is not YAML: {problem}", where=where, hint=hint)

    def _error(self, message: str, place: tuple[int, int], hint: str | None = None) -> InputError:
        return InputError(message, where=f"{self._name}:{place[0]}:{place[1]}", hint=hint)

    def _data(self, at: int, key: Key, depth: int) -> tuple[Tree, int]:
        """Return the value that begins with the event of number ``at``, and the number of the event
        after it.
        """
        begin = self._begin(at)
        event = self._events[begin]
        place = _place(event)
        self._count += 1
        if self._count > _MOST_VALUES:
            raise self._error(
                f"there are too many values: more than {_MOST_VALUES:,}, aliases included", place
            )
        if depth > _DEEPEST:
            raise self._error(_TOO_DEEP, place)
        if event.tag not in (None, "!"):
            raise self._error(
                f"the tag {event.tag:.40} is not supported", place, "write the plain value"
            )
        self._places.setdefault(key, place)
        self._origins[key] = place
        value: Tree
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
            end = begin + 1
        elif isinstance(event, yaml.SequenceStartEvent):
            value, end = self._list(begin + 1, key, depth + 1)
        else:
            value, end = self._mapping(begin + 1, key, depth + 1)
        return value, end if begin == at else at + 1

    def _begin(self, at: int) -> int:
        event = self._events[at]
        if not isinstance(event, yaml.AliasEvent):
            if event.anchor is not None and self._anchors.setdefault(event.anchor, at) != at:
                raise self._error(
                    f"this is not YAML: a second anchor is called {event.anchor!r}", _place(event)
                )
            return at
        if event.anchor not in self._anchors:
            hint = (
                "put a value that begins with '*' in quotes, or write '&' with the same name "
                "above it"
            )
            raise self._error(
                f"this is not YAML: undefined alias {event.anchor!r}", _place(event), hint
            )
        return self._anchors[event.anchor]

    def _list(self, at: int, key: Key, depth: int) -> tuple[Tree, int]:
        items: list[Tree] = []
        while not isinstance(self._events[at], yaml.CollectionEndEvent):
            item, at = self._data(at, (*key, len(items)), depth)
            items.append(item)
        return items, at + 1

    def _mapping(self, at: int, key: Key, depth: int) -> tuple[Tree, int]:
        mapping: dict[str, Tree] = {}
        while not isinstance(self._events[at], yaml.CollectionEndEvent):
            event = self._events[self._begin(at)]
            if not isinstance(event, yaml.ScalarEvent) or event.tag not in (None, "!"):
                raise self._error("a key must be plain text", _place(event))
            if event.value == "<<" and not event.style:
                hint = (
                    "write the keys out, or put a whole mapping behind an anchor (&name) and "
                    "use it (*name)"
                )
                raise self._error(
                    "merge keys (<<) are not part of YAML 1.2, and are not read",
                    _place(event),
                    hint,
                )
            word = self._text(event)
            if word in mapping:
                raise self._error(f"duplicate key {word!r}", _place(event), "keep one of the two")
            self._places[(*key, word)] = _place(event)
            mapping[word], at = self._data(at + 1, (*key, word), depth)
        return mapping, at + 1

    def _scalar(self, event: yaml.ScalarEvent) -> Scalar:
        text = self._text(event)
        # A plain scalar's style is None with the Python parser and "" with the C parser.
        if event.style:
            return text
        if not self._typed:
            if text in _NULL:
                return None
            return text
        try:
            return scalar(text)
        except ValueError as error:
            raise self._error(str(error), _place(event)) from None

    def _text(self, event: yaml.ScalarEvent) -> str:
        # An escape can spell it; no path, variable or argument can contain it.
        if "\0" in event.value:
            raise self._error("the character U+0000 is not allowed", _place(event))
        self._length += len(event.value)
        if self._length > _MOST_CHARACTERS:
            raise self._error(
                f"more than {_MOST_CHARACTERS:,} characters of text, aliases included",
                _place(event),
            )
        return str(event.value)


def _place(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1
