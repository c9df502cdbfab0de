"""The rows of a file of text.

* ``.txt``: documents separated by blank lines;
* Parquet, CSV, TSV and Arrow, which ``datasets`` reads: one document per row;
* anything else is JSON: one object per line, or a list of objects.

Text may be compressed by gzip, bzip2, xz or zstd.
"""

import bz2
import gzip
import io
import json
import lzma
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from glob import escape
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from primus_images.errors import HostError, InputError
from primus_images.files import reason_of, refuse_pointer
from primus_images.schema import distinct_keys
from primus_images.yamlfile import read_values

TABLE: Mapping[str, Any] = read_values(Path(__file__).with_name("corpus.yaml")).data
_BLOCK = 1 << 20
_ZSTD = b"\x28\xb5\x2f\xfd"
_OPENERS: Mapping[bytes, Callable[[IO[bytes], str], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}

# A row, and its place for messages. A row that cannot be read is the InputError that says why.
Row = tuple[str, Any]


class Reading:
    """How far files are read that are read one after the other."""

    def __init__(self) -> None:
        self._ended = 0
        self._open: IO[bytes] | None = None

    @property
    def size(self) -> int:
        """The bytes that are read: as they are in the files, such as compressed.

        Those of a table count when it ends.
        """
        if self._open is None or self._open.closed:
            return self._ended
        return self._ended + self._open.tell()

    def begin(self, stream: IO[bytes]) -> None:
        """Read the next file, which is open."""
        self._open = stream

    def end(self, file: Path) -> None:
        """Count all of a file, which was read."""
        self._open = None
        self._ended += file.stat().st_size


def rows_of_hub(name: str, split: str) -> Iterator[Row]:
    """Yield every row of the data set ``name`` on the hub."""
    return _table_rows(f"hf:{name}", name, split=split)


def rows_of_file(file: Path, reading: Reading) -> Iterator[Row]:
    """Yield every row of a file. A row of a text file is a mapping with the column ``text``.

    ``reading`` is told how far it is. Raises InputError, with file and line or row, where the rest
    of the file cannot be read.
    """
    form = form_of(file)
    head = _head(file)
    refuse_pointer(file)
    if form in TABLE["tables"] or head.startswith(b"PAR1"):
        yield from _rows_of_table(file, form)
    elif form == ".txt":
        with closing(_text_lines(file, head, reading)) as lines:
            for blank, paragraph in groupby(lines, key=_is_blank):
                if not blank:
                    yield _paragraph(list(paragraph))
    else:
        yield from _json_rows(file, head, reading)


def form_of(file: Path) -> str:
    """Return the suffix of a file without that of its compression; ``.jsonl`` for any JSON."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in TABLE["packed"]:
        suffixes.pop()
    if not suffixes:
        return ""
    if suffixes[-1] in (".json", ".ndjson"):
        return ".jsonl"
    return suffixes[-1]


def unreadable(message: str, where: str, remedy: str = "") -> InputError:
    """Return the error of a file that cannot be read as a corpus, with its ``remedy`` if known."""
    return InputError(message, where=where, hint=remedy or TABLE["readable"])


def first_line(error: Exception) -> str:
    """Return the first line of the message of ``error``, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(8)
    except OSError as error:
        raise InputError(f"cannot be read: {reason_of(error)}", where=str(file)) from error


def _unpacked(file: IO[bytes], head: bytes) -> IO[bytes]:
    """Return the content of an open file, without its compression."""
    if head.startswith(_ZSTD):
        from pyarrow import input_stream

        return io.BufferedReader(input_stream(file, compression="zstd"), _BLOCK)
    for magic, opener in _OPENERS.items():
        if head.startswith(magic):
            stream: IO[bytes] = opener(file, "rb")
            return stream
    return file


def _is_blank(line: tuple[str, str | InputError]) -> bool:
    _, text = line
    return isinstance(text, str) and not text.strip()


def _paragraph(lines: list[tuple[str, str | InputError]]) -> Row:
    where, _ = lines[0]
    texts = []
    for _, text in lines:
        if isinstance(text, InputError):
            return where, text
        texts.append(text)
    return where, {"text": "\n".join(texts)}


def _lines(file: Path, head: bytes, reading: Reading) -> Generator[tuple[str, bytes]]:
    """Yield the place and the bytes of every line.

    The file is open until it ends or is closed: an error that somebody keeps would keep it, too.
    """
    number = 0
    try:
        with file.open("rb") as packed, _unpacked(packed, head) as stream:
            reading.begin(packed)
            for number, line in enumerate(stream, 1):
                yield f"{file}:{number}", line
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise unreadable(
            f"cannot be read: {error}",
            f"{file}:{number + 1}",
            "the file is damaged or incomplete: copy the file again, or compress it again",
        ) from error


def _text_lines(
    file: Path, head: bytes, reading: Reading
) -> Generator[tuple[str, str | InputError]]:
    """Yield the place and the text of every line, without its end: LF, CRLF or CR."""
    number = 0
    with closing(_lines(file, head, reading)) as lines:
        for _, several in lines:
            for line in several.removesuffix(b"\n").removesuffix(b"\r").split(b"\r"):
                number += 1
                where = f"{file}:{number}"
                try:
                    yield where, _decoded(line, where)
                except InputError as error:
                    yield where, error


def _decoded(line: bytes, where: str) -> str:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"the byte 0x{line[error.start]:02x}"
        remedy = f"if it is text, write it as UTF-8 (iconv -f LATIN1 -t UTF-8); {TABLE['readable']}"
        if line.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            remedy = "write it as UTF-8, as by iconv -f UTF-16 -t UTF-8"
        raise unreadable(f"expected UTF-8 text, found {byte}", where, remedy) from None
    if "\0" in text:
        raise unreadable("expected text, found binary data", where)
    return text


def _json_rows(file: Path, head: bytes, reading: Reading) -> Iterator[Row]:
    with closing(_lines(file, head, reading)) as lines:
        for number, (where, line) in enumerate(lines, 1):
            if number == 1 and line.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
                whole = _decoded(line, where)
                whole += "".join(_decoded(more, place) for place, more in lines)
                yield from _rows_of_list(whole, file)
            elif line.strip():
                yield where, _object_of(line, file, number)


def _object_of(line: bytes, file: Path, number: int) -> Any:
    """Return the object of a line, or the InputError that says why there is none."""
    try:
        text = _decoded(line, f"{file}:{number}")
        return _parsed(text, file, number, "one JSON object per line")
    except InputError as error:
        return error


def _rows_of_list(text: str, file: Path) -> Iterator[Row]:
    for number, row in enumerate(_parsed(text, file, 1, "one JSON list"), 1):
        where = f"{file}: item {number}"
        if isinstance(row, str):
            yield where, {"text": row}
        else:
            yield where, row


def _parsed(text: str, file: Path, line: int, expected: str) -> Any:
    try:
        return json.loads(text.rstrip(), object_pairs_hook=distinct_keys)
    except RecursionError:
        raise unreadable("the JSON is nested too deeply", f"{file}:{line}") from None
    except json.JSONDecodeError as error:
        rest = text[error.pos :].strip()[:40]
        token = "the end"
        if rest:
            token = repr(rest)
        where = f"{file}:{line + error.lineno - 1}:{error.colno}"
        remedy = ""
        if "\r" in text[: error.pos].rstrip("\n"):
            remedy = "the ends of lines are CR: write LF, as by tr '\\r' '\\n'"
        raise unreadable(f"expected {expected}, found {token}", where, remedy) from None
    except ValueError as error:  # a number with thousands of digits
        raise unreadable(f"the JSON cannot be read: {error}", f"{file}:{line}") from None


def datasets_library() -> Any:
    """Return the library ``datasets``. Raises HostError if it cannot be imported."""
    try:
        import datasets
    except ImportError as error:
        raise HostError(
            "datasets, which reads Parquet, CSV and Arrow, cannot be imported: "
            f"{first_line(error)}",
            hint="run this inside a primus image",
        ) from None
    # It would print an error beside the one that it raises.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _rows_of_table(file: Path, form: str) -> Iterator[Row]:
    kind = TABLE["tables"].get(form, "parquet")
    options: dict[str, Any] = {}
    if form == ".tsv":
        options["sep"] = "\t"
    elif kind == "parquet":
        # datasets would read as many rows at a time as the first group has, which may be none.
        options["batch_size"] = 1024
    data_files = escape(str(file))
    return _table_rows(str(file), kind, data_files=data_files, split="train", **options)


def _table_rows(shown: str, name: str, **options: Any) -> Iterator[Row]:
    load_dataset = datasets_library().load_dataset
    number = 0
    try:
        table = load_dataset(name, streaming=True, **options)
        kinds = table.features or {}
        for number, row in enumerate(table, 1):
            # pandas takes the first fields for names of lines
            if name == "csv" and "__index_level_0__" in row:
                raise ValueError(
                    "lines have more fields than the first one: quote those that contain the "
                    "separator"
                )
            columns = {}
            for column, value in row.items():
                columns[column] = _without_nulls(value, kinds.get(column))
            yield f"{shown}: row {number}", columns
    except ConnectionError as error:
        raise HostError(
            f"cannot be read: {first_line(error)}",
            where=shown,
            hint="allow this machine to reach the hub (HF_TOKEN for what is not public), or "
            "name a file",
        ) from None
    except Exception as error:
        message = f"cannot be read after row {number}: {first_line(error)}"
        remedy = f"copy the file again if it is damaged; {TABLE['readable']}"
        raise unreadable(message, shown, remedy) from error


def _without_nulls(value: Any, kind: Any) -> Any:
    """Return a value without the keys that a table adds because other rows have them.

    ``kind`` is its type in the table, or None. JSON in a table is as it was written. A key that is
    null in every row was written, too: no other row has a value for it.
    """
    if type(kind).__name__ == "Json":
        return value
    if isinstance(value, Mapping):
        kinds: Mapping[str, Any] = {}
        if isinstance(kind, Mapping):
            kinds = kind
        kept = {}
        for key, item in value.items():
            inner = kinds.get(key)
            if item is not None or getattr(inner, "dtype", "") == "null":
                kept[key] = _without_nulls(item, inner)
        return kept
    if isinstance(value, list):
        return [_without_nulls(item, getattr(kind, "feature", None)) for item in value]
    return value
