"""Read a YAML file into plain data that still knows where each value stands.

YAML 1.1 reads ``yes``, ``3.10`` and ``2026-11-20`` as something other than what was typed; here every plain
scalar stays text, and the schema (:mod:`primus.schema`) decides what it means. Duplicate keys and anchors that
merge are refused: a file of pins must say each thing once, where it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from primus.errors import InputError

if TYPE_CHECKING:
    import yaml

__all__ = ["Document", "Key", "Plain", "parse", "read"]

Plain: TypeAlias = "str | list[Plain] | dict[str, Plain] | None"
Key: TypeAlias = "tuple[str | int, ...]"


@dataclass(frozen=True, kw_only=True)
class Document:
    """The file's data (mappings, lists, text, None) and the 1-based line and column of each key path."""

    name: str
    data: Plain
    places: dict[Key, tuple[int, int]] = field(repr=False)

    def where(self, key: Key = ()) -> str:
        """``file:line:col`` of the value at ``key``, or of its nearest parent that the file has."""
        while key and key not in self.places:
            key = key[:-1]
        line, column = self.places.get(key, (1, 1))
        return f"{self.name}:{line}:{column}"


def read(path: Path, name: str | None = None) -> Document:
    """Read ``path``; ``name`` is how messages call it. Raises InputError when it is missing or not YAML."""
    shown = name or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError("there is no such file", where=shown) from None
    except IsADirectoryError:
        raise InputError("this is a directory, not a file", where=shown) from None
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text (byte {error.start})", where=shown) from None
    return parse(text, shown)


def parse(text: str, name: str) -> Document:
    """Parse ``text``; raises InputError with the place of the first mistake."""
    import yaml

    places: dict[Key, tuple[int, int]] = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        node = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise InputError(f"not YAML: {error.problem or error.context}", where=where) from None
    except yaml.YAMLError as error:
        raise InputError(f"not YAML: {str(error).splitlines()[0]}", where=name) from None
    try:
        data = _plain(node, (), places, name) if node is not None else None
    except RecursionError:
        raise InputError("nested too deeply, or an anchor that holds itself", where=name) from None
    return Document(name=name, data=data, places=places)


def _plain(node: yaml.Node, key: Key, places: dict[Key, tuple[int, int]], name: str) -> Plain:
    import yaml

    places.setdefault(key, (node.start_mark.line + 1, node.start_mark.column + 1))
    if isinstance(node, yaml.ScalarNode):
        # A plain scalar's style is None to the parser written in Python and "" to the one in C.
        if not node.style and node.value in ("", "~", "null"):
            return None
        return str(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child, (*key, index), places, name) for index, child in enumerate(node.value)]
    result: dict[str, Plain] = {}
    for key_node, value_node in node.value:
        where = f"{name}:{key_node.start_mark.line + 1}:{key_node.start_mark.column + 1}"
        if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
            raise InputError("a key must be plain text", where=where)
        word = str(key_node.value)
        if word in result:
            raise InputError(f"{word!r} stands here twice", where=where, hint="keep one of the two")
        places[(*key, word)] = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
        result[word] = _plain(value_node, (*key, word), places, name)
    return result
