"""Reading YAML to plain data with the place of each value.

This is the only module that parses YAML.

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

_MOST_CHARACTERS = 500_000
# A few nested aliases can stand for more values than fit into memory.
_MOST_VALUES = 20_000
_DEEPEST = 64
_TOO_DEEP = f"nested too deeply: more than {_DEEPEST} levels"
# The largest whole number that a field can hold: it fits into 64 bits.
LARGEST = 2**63 - 1

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = r"[-+]?[0-9]+"
_OCTAL_OR_HEXADECIMAL = r"0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_SPECIAL_FLOAT = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
# Characters that YAML does not allow.
_UNREADABLE = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]"
# Control characters other than tabs and ends of lines.
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
# git's markers in a file that it could not merge.
_CONFLICT = r"(?m)^(?:<{7}|>{7}) "
# Text that needs no quotes, unless it reads as a number or another special value.
_PLAIN = r"[\w/](?:[\w/.+:-]*[\w/])?"
_SAME_INDENTATION = "give the entries of a list or a mapping the same indentation"
# Words of libyaml, and of PyYAML's own parser, about a problem → what to do about it.
_REMEDIES = {
    "cannot start any token": "put the value in quotes",
    "mapping values are not allowed": (
        "put a value that contains ': ' in quotes, or correct the indentation"
    ),
    "block end": _SAME_INDENTATION,
    "expected '-' indicator": _SAME_INDENTATION,
    "expected key": _SAME_INDENTATION,
    "',' or": "close the bracket, and separate its values by commas",
    "unexpected end of stream": "close the quotes",
    "alphabetic or numeric": "put a value that begins with '*' or '&' in quotes",
    "undefined alias": (
        "put a value that begins with '*' in quotes, or write '&' with the same name above it"
    ),
    "second occurrence": "give each anchor (&) a name of its own",
    "unknown escape character": "use single quotes, or write the backslash twice",
    "another document": "a file has one document: delete the line '---' and what follows it",
}


@dataclass(frozen=True, kw_only=True)
class Document:
    """The data of a file, and where it has each part.

    ``places`` are the 1-based line and column of each key, ``origins`` those of each value.
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
        """Return ``file:line:col`` of the value at ``key``, or of its nearest parent."""
        return _nearest(self.name, self.origins, key)


def _nearest(name: str, places: dict[Key, tuple[int, int]], key: Key) -> str:
    while key and key not in places:
        key = key[:-1]
    line, column = places.get(key, (1, 1))
    return f"{name}:{line}:{column}"


def read_text(path: Path, name: str | None = None) -> str:
    """Return the text of the file at ``path``.

    Raises InputError if it cannot be read, or is not UTF-8.
    """
    shown = name or str(path)
    try:
        return read_bytes(path, shown).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text (byte {error.start})", where=shown) from None
    except OSError as error:
        # A link that leads nowhere is there.
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            raise InputError("there is no such file", where=shown) from None
        raise InputError(f"cannot be read: {reason_of(error)}", where=shown) from None


def parse(text: str, name: str, *, typed: bool = False, last_wins: bool = False) -> Document:
    """Parse ``text``, with ``typed`` scalars or all as text.

    With ``last_wins``, the last of several equal keys counts, as PyYAML takes it. Raises InputError
    with the place of the first error.
    """
    if len(text) > _MOST_CHARACTERS:
        raise InputError(f"the text is longer than {_MOST_CHARACTERS:,} characters", where=name)
    unreadable = re.search(_UNREADABLE, text)
    if unreadable:
        before = text[: unreadable.start()]
        where = f"{name}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        character = f"U+{ord(unreadable[0]):04X}"
        message = f"this is not YAML: the character {character} is not allowed"
        raise InputError(message, where=where)
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise conflict(text, name) or _not_yaml(error, text, name) from None
    except RecursionError:
        raise InputError(_TOO_DEEP, where=name) from None
    builder = _Builder(name, typed=typed, last_wins=last_wins)
    data = None
    if root is not None:
        data = builder.value(root, ())
    return Document(
        name=name, data=data, places=builder.places, origins=builder.origins, typed=typed
    )


def read(
    path: Path, name: str | None = None, *, typed: bool = False, last_wins: bool = False
) -> Document:
    """Read ``path`` as :func:`parse` does; ``name`` is its name in messages."""
    text = read_text(path, name)
    return parse(text, name or str(path), typed=typed, last_wins=last_wins)


parse_values = partial(parse, typed=True)
read_values = partial(read, typed=True)


def value(text: str, where: str) -> Scalar | list[Scalar]:
    """Return the scalar, or list of scalars, for ``text`` from a command line.

    Raises InputError for anything else.
    """
    shown = repr(text)
    if len(text) > 60:
        shown = repr(f"{text[:60]}…")
    try:
        parsed: Scalar | list[Scalar] = parse_values(text, "value").data
    except InputError as error:
        reason = error.message.removeprefix("this is not YAML: ")
        raise InputError(f"{shown} is not a plain value: {reason}", where=where) from None
    items = parsed if isinstance(parsed, list) else [parsed]
    if any(isinstance(item, list | dict) for item in items):
        hint = "give a scalar or a list of scalars"
        raise InputError(f"{shown} is not a plain value", where=where, hint=hint)
    return parsed


def conflict(text: str, name: str) -> InputError | None:
    """Return the error for an unresolved merge conflict in ``text``, or None.

    Its place is that of the first marker.
    """
    marker = re.search(_CONFLICT, text)
    if marker is None:
        return None
    line = text.count("\n", 0, marker.start()) + 1
    hint = "keep one of the two sides and delete the marker lines"
    message = "a merge conflict is not resolved here"
    return InputError(message, where=f"{name}:{line}:1", hint=hint)


def scalar(text: str) -> Scalar:
    """Return the value of the plain scalar ``text`` in YAML 1.2's core schema.

    Raises ValueError for a number that is too long for Python.
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if re.fullmatch(_INT, text):
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"a number of {len(text)} characters is too long") from None
    if re.fullmatch(_OCTAL_OR_HEXADECIMAL, text):
        return int(text, 0)
    if re.fullmatch(_SPECIAL_FLOAT, text):
        text = text.replace(".", "")
    elif not re.fullmatch(_FLOAT, text):
        return text
    return float(text)


def spell(data: Scalar | list[Scalar]) -> str:
    """Return ``data`` as YAML that this module reads as the same value."""
    if isinstance(data, list):
        return f"[{', '.join(spell(item) for item in data)}]"
    if data is None:
        return "null"
    if isinstance(data, bool):
        return str(data).lower()
    if isinstance(data, str):
        return _spelled_text(data)
    if isinstance(data, float) and not math.isfinite(data):
        return str(data).replace("inf", ".inf").replace("nan", ".nan")
    # With a point in the mantissa, readers of YAML 1.1 also see a number.
    return re.sub(r"^(-?\d+)e", r"\1.0e", repr(data))


def _spelled_text(text: str) -> str:
    if re.fullmatch(_PLAIN, text) and scalar(text) == text:
        return text
    # JSON escapes what is necessary, but YAML folds these line breaks and refuses DEL.
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub("[\x7f\x85\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", quoted)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested mappings as dotted keys with values. An empty mapping yields nothing."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def filled(tree: Any, values: Mapping[str, Any]) -> Any:
    """Return the form ``tree`` with the value of each text ``$NAME``.

    Keys and items without a value are left out.
    """
    if isinstance(tree, dict):
        pairs = {key: filled(below, values) for key, below in tree.items()}
        return {key: value for key, value in pairs.items() if value is not None}
    if isinstance(tree, list):
        items = [filled(below, values) for below in tree]
        return [item for item in items if item is not None]
    if isinstance(tree, str) and tree.startswith("$"):
        return values[tree[1:]]
    return tree


def section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the values of the dotted keys below ``name``, which the keys omit."""
    head = f"{name}."
    return {key.removeprefix(head): value for key, value in values.items() if key.startswith(head)}


def _not_yaml(error: yaml.MarkedYAMLError, text: str, name: str) -> InputError:
    mark = error.problem_mark or error.context_mark
    problem = (error.problem or "").removeprefix("but ")
    where = name
    line = ""
    if mark:
        where = f"{name}:{mark.line + 1}:{mark.column + 1}"
        line = "".join(text.split("\n")[mark.line : mark.line + 1])
    if "nesting depth" in problem:
        return InputError(_TOO_DEEP, where=where)
    indentation = line[: len(line) - len(line.lstrip())]
    if "\t" in indentation:
        message = "this is not YAML: a tab cannot indent a line"
        return InputError(message, where=where, hint="use spaces instead of tabs")
    hint = None
    for words, remedy in _REMEDIES.items():
        if words in problem:
            hint = remedy
            break
    return InputError(f"this is not YAML: {problem}", where=where, hint=hint)


_Base: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


class _Loader(_Base):  # type: ignore[misc]
    """A loader whose nodes have a tag only if the text has one."""

    def resolve(self, kind: object, value: object, implicit: object) -> str:
        return ""


class _Builder:
    """Makes plain data of YAML's nodes, and remembers their places."""

    def __init__(self, name: str, *, typed: bool, last_wins: bool) -> None:
        self._last_wins = last_wins
        self.places: dict[Key, tuple[int, int]] = {}
        self.origins: dict[Key, tuple[int, int]] = {}
        self._name = name
        self._typed = typed
        self._count = 0

    def _error(self, message: str, node: yaml.Node, hint: str | None = None) -> InputError:
        line, column = _place(node)
        return InputError(message, where=f"{self._name}:{line}:{column}", hint=hint)

    def value(self, node: yaml.Node, key: Key) -> Tree:
        """Return the value of the node at ``key``."""
        self._count += 1
        if self._count > _MOST_VALUES:
            message = f"there are too many values: more than {_MOST_VALUES:,}, aliases included"
            raise self._error(message, node)
        if len(key) > _DEEPEST:
            raise self._error(_TOO_DEEP, node)
        if node.tag:
            message = f"the tag {node.tag:.40} is not supported"
            raise self._error(message, node, "write the plain value")
        self.places.setdefault(key, _place(node))
        self.origins[key] = _place(node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*key, i)) for i, item in enumerate(node.value)]
        return self._mapping(node, key)

    def _mapping(self, node: yaml.Node, key: Key) -> Tree:
        mapping: dict[str, Tree] = {}
        for key_node, value_node in node.value:
            word = self._word(key_node)
            if word in mapping and not self._last_wins:
                raise self._error(f"duplicate key {word!r}", key_node, "keep one of the two")
            self.places[(*key, word)] = _place(key_node)
            mapping[word] = self.value(value_node, (*key, word))
        return mapping

    def _word(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag:
            raise self._error("a key must be plain text", node)
        if node.value == "<<" and not node.style:
            raise self._error(
                "merge keys (<<) are not part of YAML 1.2, and are not read",
                node,
                "write the keys out, or put a whole mapping behind an anchor (&name) and use it "
                "(*name)",
            )
        return self._text(node)

    def _scalar(self, node: yaml.ScalarNode) -> Scalar:
        text = self._text(node)
        # A plain scalar's style is None with the Python parser and "" with the C parser.
        if node.style:
            return text
        if not self._typed:
            return None if text in _NULL else text
        try:
            return scalar(text)
        except ValueError as error:
            raise self._error(str(error), node) from None

    def _text(self, node: yaml.ScalarNode) -> str:
        # An escape can spell it. No path, variable or argument can contain U+0000, and a terminal
        # obeys the others.
        control = re.search(_CONTROL, node.value)
        if control:
            raise self._error(f"the character U+{ord(control[0]):04X} is not allowed", node)
        return str(node.value)


def _place(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1
