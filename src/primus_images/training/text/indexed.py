"""Tokenized corpora, as ``tools/preprocess_data.py`` of Megatron-LM writes them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from primus_images.errors import InputError
from primus_images.files import reason_of
from primus_images.recipes.indexed import tokens_of

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
# The format of a token, as Python's struct has it, and code in the index → that.
_Format: TypeAlias = Literal["B", "b", "h", "i", "q", "H"]
_FORMATS: Mapping[int, _Format] = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
# Magic, version, code of the type, sequences, and entries of the list of documents.
_HEADER = len(_MAGIC) + 8 + 1 + 8 + 8
_MADE_BY = "make both files by tools/preprocess_data.py of Megatron-LM"


class _Index(NamedTuple):
    """The tokens and the first byte of each sequence, and the sequences before each document."""

    lengths: Sequence[int]
    places: Sequence[int]
    ends: Sequence[int]
    format: _Format


def documents(index: Path) -> Iterator[Sequence[int]]:
    """Yield the tokens of each document that ``index`` lists, in its order.

    Raises InputError if one of the two files is not as Megatron-LM writes it.
    """
    known = _read_index(index)
    file = tokens_of(index)
    tokens = _mapped(file, known.format)
    for begin, end in pairwise(known.ends):
        document: list[int] = []
        for number in range(begin, end):
            first, rest = divmod(known.places[number], tokens.itemsize)
            last = first + known.lengths[number]
            if rest or last > len(tokens):
                message = f"{index.name} lists more tokens than the {len(tokens):,} of this file"
                raise _wrong(message, file)
            document += tokens[first:last].tolist()
        if document and min(document) < 0:
            raise _wrong(f"token {min(document)} is negative", file)
        yield document


def _mapped(file: Path, form: _Format) -> memoryview[int]:
    """Return the tokens of a file, mapped into memory."""
    try:
        with file.open("rb") as stream:
            if not file.stat().st_size:
                return memoryview(b"").cast(form)
            content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise _wrong(f"cannot be read: {reason_of(error)}", file) from error
    try:
        return content.cast(form)
    except TypeError:
        raise _wrong("the file ends within a token", file) from None


def _read_index(index: Path) -> _Index:
    try:
        content = index.read_bytes()
    except OSError as error:
        raise _wrong(f"cannot be read: {reason_of(error)}", index) from error
    if not content.startswith(_MAGIC) or len(content) < _HEADER:
        raise _wrong("this is no index of Megatron-LM", index)
    start = len(_MAGIC)
    version = int.from_bytes(content[start : start + 8], "little")
    code = content[start + 8]
    sequences = int.from_bytes(content[start + 9 : start + 17], "little")
    entries = int.from_bytes(content[start + 17 : start + 25], "little")
    if version != _VERSION or code not in _FORMATS:
        raise _wrong(f"an index of version {version} with tokens of type {code} is unknown", index)
    if len(content) < _HEADER + 12 * sequences + 8 * entries:
        raise _wrong("the index ends too early", index)
    after_lengths = _HEADER + 4 * sequences
    after_places = after_lengths + 8 * sequences
    whole = memoryview(content)
    lengths = whole[_HEADER:after_lengths].cast("i")
    places = whole[after_lengths:after_places].cast("q")
    ends = whole[after_places : after_places + 8 * entries].cast("q")
    if min(lengths, default=0) < 0 or min(places, default=0) < 0:
        raise _wrong("the index has a negative place", index)
    complete = entries > 0 and ends[0] == 0 and ends[-1] == sequences
    if not complete or any(begin > end for begin, end in pairwise(ends)):
        raise _wrong("the index lists its documents wrongly", index)
    return _Index(lengths=lengths, places=places, ends=ends, format=_FORMATS[code])


def _wrong(message: str, file: Path) -> InputError:
    return InputError(message, where=str(file), hint=_MADE_BY)
