"""The pieces of a corpus: rows that one process reads and tokenizes.

The main process reads the bytes of a text file only to cut it at ends of lines, and to count these.
Text may be compressed by gzip, bzip2, xz or zstd; then it also unpacks them.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from primus_images.errors import InputError, PrimusError
from primus_images.files import reason_of, refuse_pointer
from primus_images.training.text.compression import DAMAGE, Stream, remedy_of, unpacked
from primus_images.training.text.rows import (
    TABLE,
    Row,
    begins_list,
    form_of,
    has_columns,
    rows_of_columns,
    rows_of_lines,
    rows_of_list,
    rows_of_table,
    tables_of_file,
    unreadable,
)

# Bytes of text in a piece. A process tokenizes them in about a second.
_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Piece(ABC):
    """Some rows of a corpus. ``size`` is that of the part of its file."""

    size: int = 0

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """Yield the rows, again for each call.

        Raises InputError, with file and line or row, where the rest of the corpus cannot be read.
        """


@dataclass(frozen=True, kw_only=True)
class Lines(Piece):
    """Whole lines of the text ``file``, after ``before`` others.

    They are ``length`` bytes from ``begin`` on, or ``text``, which was unpacked.
    """

    file: Path
    before: int
    begin: int
    length: int
    text: bytes | None = field(repr=False)

    def rows(self) -> Iterator[Row]:
        """Read them from the file, if they are not here."""
        text = self.text
        if text is None:
            text = self._read()
        return rows_of_lines(text, self.file, self.before)

    def _read(self) -> bytes:
        where = f"{self.file}:{self.before + 1}"
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.begin)
                text = stream.read(self.length)
        except OSError as error:
            raise _damaged(error, where) from error
        if len(text) < self.length:
            raise InputError("the file got shorter while it was read", where=where)
        return text


@dataclass(frozen=True, kw_only=True)
class Columns(Piece):
    """Rows of the table ``file``, after ``before`` others: ``content`` is in Arrow's form."""

    file: Path
    before: int
    content: bytes = field(repr=False)

    def rows(self) -> Iterator[Row]:
        """Yield them as Python has them."""
        return rows_of_columns(self.content, str(self.file), self.before)


@dataclass(frozen=True, kw_only=True)
class Listed(Piece):
    """Rows that are read already."""

    listed: Sequence[Row] = field(repr=False)

    def rows(self) -> Iterator[Row]:
        """Yield what was read."""
        return iter(self.listed)


@dataclass(frozen=True, kw_only=True)
class Rest(Piece):
    """The rows of ``piece`` but the first ``count``."""

    piece: Piece
    count: int

    def rows(self) -> Iterator[Row]:
        """Leave out the first ones."""
        return islice(self.piece.rows(), self.count, None)


@dataclass(frozen=True, kw_only=True)
class Unreadable(Piece):
    """The rest of a corpus that cannot be read: it is refused once all before it is."""

    error: PrimusError

    def rows(self) -> Iterator[Row]:
        """Refuse the rest."""
        raise self.error


def pieces_of_file(file: Path) -> Iterator[Piece]:
    """Yield every piece of a file. Raises InputError where the rest of it cannot be read."""
    form = form_of(file)
    head = _head(file)
    refuse_pointer(file)
    if form in TABLE["tables"] or head.startswith(b"PAR1"):
        yield from _pieces_of_table(file, form)
    else:
        yield from _pieces_of_text(file, head)


def _pieces_of_table(file: Path, form: str) -> Iterator[Piece]:
    before = 0
    rest: Iterator[Row] = iter(())
    try:
        if not has_columns(form):
            rest = rows_of_table(file, form)
        else:
            for table in tables_of_file(file, form):
                rows = max(1, table.num_rows * _PIECE // max(1, table.nbytes))
                for first in range(0, table.num_rows, rows):
                    content = _written(table.slice(first, rows))
                    yield Columns(file=file, before=before + first, content=content)
                before += table.num_rows
    except PrimusError:  # what cannot be read is found row by row
        rest = islice(rows_of_table(file, form), before, None)
    yield from pieces_of_rows(rest, file.stat().st_size)


def _written(table: Any) -> bytes:
    """Return a table in Arrow's form."""
    from pyarrow import BufferOutputStream, ipc

    sink = BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def pieces_of_rows(rows: Iterable[Row], size: int = 0) -> Iterator[Piece]:
    """Yield rows that only the main process can read. They count as ``size`` bytes in the end."""
    listed: list[Row] = []
    weight = 0
    for row in rows:
        listed.append(row)
        weight += _weight(row)
        if weight > _PIECE:
            yield Listed(listed=listed)
            listed = []
            weight = 0
    yield Listed(listed=listed, size=size)


def _weight(row: Row) -> int:
    """Return about how many characters a row has."""
    where, columns = row
    if not isinstance(columns, Mapping):
        return len(where) + len(str(columns))
    weight = 0
    for value in columns.values():
        weight += len(value if isinstance(value, str) else str(value))
    return weight


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(8)
    except OSError as error:
        raise InputError(f"cannot be read: {reason_of(error)}", where=str(file)) from error


def _pieces_of_text(file: Path, head: bytes) -> Iterator[Piece]:
    begin = 0
    counted = 0
    with io.BufferedReader(io.FileIO(file), _PIECE) as packed, unpacked(packed, head) as stream:
        texts = _cut(stream, file)
        for before, text in texts:
            if not before and form_of(file) != ".txt" and begins_list(text):
                contents = chain([text], (more for _, more in texts))
                yield from pieces_of_rows(rows_of_list(contents, file), file.stat().st_size)
                return
            size = packed.tell() - counted
            kept = None
            if stream is not packed:
                kept = text
            yield Lines(
                file=file, before=before, begin=begin, length=len(text), text=kept, size=size
            )
            begin += len(text)
            counted += size


def _damaged(error: Exception, where: str) -> InputError:
    return unreadable(f"cannot be read: {error}", where, remedy_of(error))


def _cut(stream: Stream, file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number of lines before, and about as many bytes as a piece has.

    They are whole lines; of a ``.txt`` file, whole paragraphs. Raises InputError after all whole
    lines before what cannot be read.
    """
    paragraphs = form_of(file) == ".txt"
    text = bytearray()
    before = 0
    searched = 0
    failure: Exception | None = None
    while failure is None:
        block = b""
        try:
            block = stream.read1()
        except DAMAGE as error:
            failure = error
        text += block
        if block and len(text) < _PIECE:
            continue
        if block and paragraphs:
            end = _end_of_paragraph(text, searched)
        elif block:
            end = text.rfind(b"\n", searched) + 1
        elif failure:
            end = text.rfind(b"\n") + 1
        else:
            end = len(text)
        searched = len(text)
        if end:
            with memoryview(text) as view:
                whole = bytes(view[:end])
            del text[:end]
            searched = 0
            yield before, whole
            before += _line_ends(whole, paragraphs=paragraphs)
        if not block and not failure:
            return
    raise _damaged(failure, f"{file}:{before + 1}") from failure


def _end_of_paragraph(text: bytearray, searched: int) -> int:
    """Return where the last blank line of ``text`` ends, 0 if none does.

    None ends in the first ``searched`` bytes.
    """
    end = text.rfind(b"\n", searched)
    while end >= searched:
        begin = text.rfind(b"\n", 0, end) + 1
        if not text[begin:end].decode("utf-8-sig", "replace").strip():
            return end + 1
        end = begin - 1
    return 0


def _line_ends(text: bytes, *, paragraphs: bool) -> int:
    """Return how many lines end in ``text``. Those of ``paragraphs`` may end by CR, too."""
    ends = text.count(b"\n")
    if paragraphs:
        ends += text.count(b"\r") - text.count(b"\r\n")
    return ends
