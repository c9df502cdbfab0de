"""Reading JSON that people or other programs may have changed, for the strict schemas of :mod:`primus.schema`."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from primus.errors import InputError
from primus.files import read_bytes
from primus.yamlfile import MOST_DIGITS, Document, Key, conflict, parse

_SURROGATE = r"\\u[dD][89a-fA-F]"


@dataclass(frozen=True, kw_only=True)
class _Json(Document):
    text: str = field(repr=False)

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
    """Parse a document. Raises InputError, with the place, if it is not JSON in UTF-8, and for duplicate keys."""
    try:
        text = data if isinstance(data, str) else data.decode()
        value: Any = json.loads(text, object_pairs_hook=_mapping, parse_constant=_refuse, parse_int=short_int)
        if re.search(_SURROGATE, text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        if merged := conflict(text, name):
            raise merged from None
        raise InputError(f"not JSON: {error.msg}", where=f"{name}:{error.lineno}:{error.colno}") from None
    except UnicodeError:
        raise InputError("not UTF-8 text", where=name) from None
    except RecursionError:
        raise InputError("nested too deeply", where=name) from None
    except ValueError as error:
        raise InputError(f"not JSON: {error}", where=name) from None
    return _Json(name=name, data=value, places={}, typed=True, text=text)


def short_int(digits: str) -> int:
    """Return the whole number of a JSON text. Raises ValueError if it is so long that a float cannot hold it."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        words = [word for word, _ in pairs]
        raise ValueError(f"duplicate key {next(word for word in words if words.count(word) > 1)!r}")
    return result


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number in JSON")
