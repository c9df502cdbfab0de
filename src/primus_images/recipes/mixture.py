"""Several corpora as one: a YAML file that lists them, each with its weight."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus_images.errors import InputError, nearest
from primus_images.recipes.indexed import named
from primus_images.yamlfile import Document, read

_SUFFIXES = (".yaml", ".yml")
# What may stand beside `corpus` and `weight`: as `data.` has it for a corpus alone.
_OPTIONS = ("column", "split", "question", "answer")
_MOST = 1000
_EXAMPLE = "for example: - {corpus: chats.jsonl, weight: 2}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One corpus of a mixture: a path or ``hf:OWNER/NAME``.

    Each of its documents is taken ``weight`` times in an epoch; of 0.5, every other one is.
    ``options`` are its own columns and split.
    """

    name: str
    weight: float
    options: Mapping[str, str]


def is_mixture(name: str) -> bool:
    """Whether a corpus of this name is a list of others."""
    return not name.startswith("hf:") and Path(name).suffix.lower() in _SUFFIXES


def parts_of(file: Path) -> list[Part]:
    """Return the corpora that ``file`` lists. Relative paths are relative to it.

    Raises InputError, with line and column, for another content, or a corpus that is not there.
    """
    document = read(file, typed=True)
    rows = document.data
    if not isinstance(rows, list) or not rows:
        raise InputError("expected a list of corpora", where=str(file), hint=_EXAMPLE)
    return [_part(document, number, file) for number in range(len(rows))]


def _part(document: Document, number: int, file: Path) -> Part:
    row = document.data[number]
    where = document.where((number,))
    if not isinstance(row, Mapping) or not isinstance(row.get("corpus"), str):
        raise InputError("expected a corpus and its weight", where=where, hint=_EXAMPLE)
    _check_keys(row, where)
    weight = _weight(row, where)
    if ("question" in row) != ("answer" in row):
        raise InputError("a question needs its answer: give both columns", where=where)
    name = _name(row["corpus"], file, where)
    options = {key: row[key] for key in _OPTIONS if key in row}
    return Part(name=name, weight=weight, options=options)


def _check_keys(row: Mapping[str, Any], where: str) -> None:
    known = ("corpus", "weight", *_OPTIONS)
    for key, value in row.items():
        if key not in known:
            raise InputError(
                f"there is no key {key!r}{nearest(str(key), known)}",
                where=where,
                hint=f"there are: {', '.join(known)}",
            )
        if key in _OPTIONS and not isinstance(value, str):
            raise InputError(f"{key} must be text, not {value!r}", where=where)


def _weight(row: Mapping[str, Any], where: str) -> float:
    weight = row.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= _MOST:
        raise InputError(
            f"weight must be a number above 0 and at most {_MOST}, not {weight!r}", where=where
        )
    return float(weight)


def _name(corpus: str, file: Path, where: str) -> str:
    """Return the name of a corpus, whose path is relative to the list ``file``."""
    if is_mixture(corpus):
        raise InputError("a mixture contains no other one", where=where, hint="list its corpora")
    if corpus.startswith("hf:"):
        return corpus
    path = named(file.parent / corpus)
    if not path.exists():
        raise InputError(f"{path} is not a file or a folder", where=where)
    return str(path)
