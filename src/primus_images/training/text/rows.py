"""The rows of lines of text, and of a table.

* ``.txt``: documents separated by blank lines;
* Parquet and Arrow, which ``datasets`` reads: one document per row;
* CSV and TSV, whose cells are text: one document per row;
* anything else is JSON: one object per line, or a list of objects.
"""

import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from io import BytesIO
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from primus_images.errors import HostError, InputError
from primus_images.schema import distinct_keys
from primus_images.training.text.compression import unpacked
from primus_images.yamlfile import read_values

TABLE: Mapping[str, Any] = read_values(Path(__file__).with_name("corpus.yaml")).data
_LINES = "one JSON object per line"
_OTHER_CODE = "if it is text, write it as UTF-8 (iconv -f LATIN1 -t UTF-8)"
# Rows of a table that are read together.
_ROWS = 1024

# A row, and its place for messages. A row that cannot be read is the InputError that says why.
Row = tuple[str, Any]


def rows_of_lines(content: bytes, file: Path, before: int) -> Iterator[Row]:
    """Yield the rows in whole lines of a text file, after ``before`` others.

    A row of a ``.txt`` file is a mapping with the column ``text``.
    """
    if form_of(file) == ".txt":
        for blank, paragraph in groupby(_text_lines(content, file, before), key=_is_blank):
            if not blank:
                yield _paragraph(list(paragraph))
        return
    for number, line in enumerate(BytesIO(content), before + 1):
        if line.strip():
            yield f"{file}:{number}", _object_of(line, file, number)


def rows_of_hub(name: str, split: str) -> Iterator[Row]:
    """Yield every row of the data set ``name`` on the hub."""
    return _table_rows(f"hf:{name}", name, split=split)


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


def _text_lines(content: bytes, file: Path, before: int) -> Iterator[tuple[str, str | InputError]]:
    """Yield the place and the text of every line, without its end: LF, CRLF or CR."""
    number = before
    for several in BytesIO(content):
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
        remedy = f"{_OTHER_CODE}; {TABLE['readable']}"
        if line.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            remedy = "write it as UTF-8, as by iconv -f UTF-16 -t UTF-8"
        raise unreadable(f"expected UTF-8 text, found {byte}", where, remedy) from None
    if "\0" in text:
        raise unreadable("expected text, found binary data", where)
    return text


def _object_of(line: bytes, file: Path, number: int) -> Any:
    """Return the object of a line, or the InputError that says why there is none."""
    try:
        text = _decoded(line, f"{file}:{number}")
        return _parsed(text, file, number, _LINES)
    except InputError as error:
        return error


def begins_list(content: bytes) -> bool:
    """Return whether a file that begins with ``content`` is one JSON list, not an object a line."""
    return content.removeprefix(BOM_UTF8).lstrip().startswith(b"[")


def rows_of_list(contents: Iterable[bytes], file: Path) -> Iterator[Row]:
    """Yield the rows of a file that is one JSON list; ``contents`` are all its lines."""
    lines = enumerate(chain.from_iterable(map(BytesIO, contents)), 1)
    whole = "".join(_decoded(line, f"{file}:{number}") for number, line in lines)
    for number, row in enumerate(_parsed(whole, file, 1, "one JSON list"), 1):
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
        if line == 1 and error.pos <= 1 and form_of(file) != ".jsonl":
            remedy = f"plain text is read from a file named {file.stem}.txt; {TABLE['readable']}"
        if expected == _LINES and (not rest or rest.startswith("{")):
            remedy = "write each object on a line of its own, as by jq -c ."
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
            f"datasets, which reads Parquet and Arrow, cannot be imported: {first_line(error)}",
            hint="run this inside a primus image",
        ) from None
    # It would print an error beside the one that it raises.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def rows_of_table(file: Path, form: str) -> Iterator[Row]:
    """Yield the rows of a table: Parquet, CSV, TSV or Arrow."""
    if TABLE["tables"].get(form) == "csv":
        return _rows_of_cells(file, "\t" if form == ".tsv" else ",")
    name, options = _table(file, form)
    return _table_rows(str(file), name, **options)


def _rows_of_cells(file: Path, separator: str) -> Iterator[Row]:
    """Yield the rows of CSV or TSV, whose cells are text.

    ``datasets`` takes cells for numbers, truth values or null if all before them look like these.
    """
    try:
        import pandas
    except ImportError as error:
        raise HostError(
            f"pandas, which reads CSV, cannot be imported: {first_line(error)}",
            hint="run this inside a primus image",
        ) from None
    with _reading(str(file)) as place, file.open("rb") as packed:
        head = packed.peek(8)
        with unpacked(packed, head) as content:
            frames = pandas.read_csv(
                content, sep=separator, dtype=str, keep_default_na=False, chunksize=_ROWS
            )
            for frame in frames:
                # pandas takes the first fields for names of lines
                has_names = not isinstance(frame.index, pandas.RangeIndex)
                if has_names:
                    raise ValueError(
                        "lines have more fields than the first one: quote those that contain the "
                        "separator"
                    )
                for row in frame.to_dict("records"):
                    place.row += 1
                    yield f"{file}: row {place.row}", row


def has_columns(form: str) -> bool:
    """Return whether a table of this form is stored by columns of one type: Parquet or Arrow."""
    return TABLE["tables"].get(form, "parquet") in ("parquet", "arrow")


def tables_of_file(file: Path, form: str) -> Iterator[Any]:
    """Yield up to 1,024 rows at a time of a file with columns, as tables of PyArrow.

    Raises as reading its rows does, but some rows earlier.
    """
    name, options = _table(file, form)
    load_dataset = datasets_library().load_dataset
    with _reading(str(file)):
        table = load_dataset(name, streaming=True, **options)
        yield from table.with_format("arrow").iter(batch_size=_ROWS)


def _table(file: Path, form: str) -> tuple[str, dict[str, Any]]:
    kind = TABLE["tables"].get(form, "parquet")
    options: dict[str, Any] = {"data_files": escape(str(file)), "split": "train"}
    if kind == "parquet":
        # datasets would read as many rows at a time as the first group has, which may be none.
        options["batch_size"] = _ROWS
    return kind, options


def _table_rows(shown: str, name: str, **options: Any) -> Iterator[Row]:
    load_dataset = datasets_library().load_dataset
    with _reading(shown) as place:
        table = load_dataset(name, streaming=True, **options)
        kinds = table.features or {}
        for row in table:
            place.row += 1
            yield f"{shown}: row {place.row}", _columns(row, kinds)


def rows_of_columns(content: bytes, shown: str, before: int) -> Iterator[Row]:
    """Yield the rows of a table in Arrow's form, after ``before`` others of ``shown``."""
    from pyarrow import ipc

    features = datasets_library().Features
    with _reading(shown, before) as place:
        table = ipc.open_stream(content).read_all()
        kinds = features.from_arrow_schema(table.schema)
        for row in table.to_pylist():
            columns = _columns(kinds.decode_example(row), kinds)
            place.row += 1
            yield f"{shown}: row {place.row}", columns


def _columns(row: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _without_nulls(value, kinds.get(name)) for name, value in row.items()}


@dataclass
class _Place:
    """The ``row`` of a table that is read."""

    row: int = 0


@contextmanager
def _reading(shown: str, before: int = 0) -> Iterator[_Place]:
    """Raise the errors of reading a table with the number of the row, after ``before`` others."""
    place = _Place(row=before)
    try:
        yield place
    except ConnectionError as error:
        raise HostError(
            f"cannot be read: {first_line(error)}",
            where=shown,
            hint="allow this machine to reach the hub (HF_TOKEN for what is not public), or "
            "name a file",
        ) from None
    except Exception as error:
        message = f"cannot be read after row {place.row}: {first_line(error)}"
        remedy = f"copy the file again if it is damaged; {TABLE['readable']}"
        if isinstance(error, UnicodeDecodeError):
            remedy = _OTHER_CODE
        if "datasets dtype equivalent" in message:
            remedy = "write the table without the column of this type"
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
