"""The rows of a corpus, read without the code by which a run reads them."""

import bz2
import csv
import glob
import gzip
import json
import lzma
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any

from primus_images.yamlfile import read_values

Row = dict[str, Any]

# The words and names of formats. How they are used is not taken from the run's own reader.
_TABLE: Mapping[str, Any] = read_values(Path(__file__).parents[2] / "text/corpus.yaml").data
LAYOUTS: list[list[str]] = _TABLE["layouts"]
_MAGIC = {b"\x1f\x8b": gzip, b"BZh": bz2, b"\xfd7zXZ": lzma}
_ZSTD = b"\x28\xb5"
_PARQUET = b"PAR1"
# Megatron-LM's code of the type of a token → its letter in ``struct``.
_TOKENS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def rows_of(corpus: Path, split: str | None) -> Iterator[Row]:
    """Yield the rows of ``corpus``, a file or a folder, in the order in which they are trained."""
    for file in files_of(corpus, split):
        yield from _rows(file)


def tokens_of(index: Path) -> Iterator[list[int]]:
    """Yield the tokens of each document of Megatron-LM's ``index`` that is not empty.

    After nine bytes of magic and eight of the version come the code of the type of a token, the
    number of sequences and the length of the list of documents. Then come the length of each
    sequence, its first byte in the file of tokens, and the first sequence of each document.
    """
    head = struct.Struct("<9sQBQQ")
    content = index.read_bytes()
    _, _, code, sequences, entries = head.unpack_from(content)
    lists = struct.Struct(f"<{sequences}i{sequences}q{entries}q")
    numbers = lists.unpack_from(content, head.size)
    lengths = numbers[:sequences]
    places = numbers[sequences : 2 * sequences]
    firsts = numbers[2 * sequences :]
    token = struct.Struct("<" + _TOKENS[code])
    whole = index.with_suffix(".bin").read_bytes()
    for number in range(entries - 1):
        tokens: list[int] = []
        for sequence in range(firsts[number], firsts[number + 1]):
            begin = places[sequence]
            end = begin + lengths[sequence] * token.size
            part = whole[begin:end]
            tokens += [value for (value,) in token.iter_unpack(part)]
        if tokens:
            yield tokens


# -- files -----------------------------------------------------------------------------------------


def files_of(corpus: Path, split: str | None) -> list[Path]:
    """Return the files of a split, as ``datasets`` chooses them; of the first one by default."""
    if not corpus.is_dir():
        return [corpus]
    card = corpus / "README.md"
    if card.is_file():
        head, _, _ = card.read_text().partition("\n---")
        if "\nconfigs:" in head:
            return _files_of_card(corpus, split)
    files = _data_files(corpus)
    wanted = split or "train"
    shards = [file for file in files if _without_shard(file.name) == wanted]
    if shards:
        return shards
    folders = {file: file.relative_to(corpus).parts[:-1] for file in files}
    if (corpus / "dataset_dict.json").exists():
        return [file for file in files if file.relative_to(corpus).parts[0] == wanted]
    by_name = _files_by_split(files, lambda file: [file.name])
    by_folder = _files_by_split(files, folders.__getitem__)
    named = by_name or by_folder
    if named:
        return named[split or _default_split(named)]
    return files


def _files_of_card(corpus: Path, split: str | None) -> list[Path]:
    from datasets import load_dataset_builder

    named = load_dataset_builder(str(corpus)).config.data_files
    return [Path(name) for name in named[split or _default_split(named)]]


def _default_split(named: Mapping[str, Any]) -> str:
    if len(named) > 1:
        return "train"
    return next(iter(named))


def _data_files(corpus: Path) -> list[Path]:
    """Return the files that hold rows. A folder that is linked twice counts once."""
    seen: set[str] = set()
    files = []
    for folder, _, names in os.walk(corpus, followlinks=True):
        place = os.path.realpath(folder)
        if place in seen:
            continue
        seen.add(place)
        files += [Path(folder, name) for name in names]
    return sorted(file for file in files if _is_data(file, corpus))


def _is_data(file: Path, corpus: Path) -> bool:
    if re.search(r"(^|/)(\.|__.*/)", str(file.relative_to(corpus))):
        return False
    return not any(re.fullmatch(name, file.name, re.IGNORECASE) for name in _TABLE["beside"])


def _without_shard(name: str) -> str:
    return re.sub(r"-\d{5}-of-\d{5}.*", "", name)


def _files_by_split(files: list[Path], names_of: Any) -> dict[str, list[Path]]:
    """Return split → the files in whose names one of its words stands."""
    named = {}
    for split, words in _TABLE["splits"].items():
        members = []
        for file in files:
            parts = re.split(r"[-._ 0-9]", " ".join(names_of(file)).lower())
            if not set(words).isdisjoint(parts):
                members.append(file)
        if members:
            named[split] = members
    return named


# -- rows ------------------------------------------------------------------------------------------


def _rows(file: Path) -> Iterable[Row]:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    suffixes = [suffix for suffix in suffixes if suffix not in _TABLE["packed"]]
    suffix = ""
    if suffixes:
        suffix = suffixes[-1]
    content = file.read_bytes()
    kind = _TABLE["tables"].get(suffix)
    if content.startswith(_PARQUET):
        kind = "parquet"
    if kind in ("parquet", "arrow"):
        return _rows_of_table(file, kind)
    text = _unpacked(content).decode()
    if kind:
        return _rows_of_cells(text.removeprefix("\ufeff"), suffix)
    if suffix == ".txt":
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = [line.removeprefix("\ufeff") for line in text.split("\n")]
    if suffix == ".txt":
        return _paragraphs(lines)
    if lines[0].lstrip().startswith("["):
        return [_as_row(value) for value in json.loads("\n".join(lines))]
    return [json.loads(line) for line in lines if line.strip()]


def _rows_of_cells(text: str, suffix: str) -> list[Row]:
    """Return the rows of CSV or TSV, in which every cell is text."""
    separator = ","
    if suffix == ".tsv":
        separator = "\t"
    names, *lines = csv.reader(StringIO(text, newline=""), delimiter=separator)
    rows = []
    for line in filter(None, lines):
        cells = [*line, *[""] * (len(names) - len(line))]
        # Of columns with the same name, it is the first.
        rows.append(dict(reversed([*zip(names, cells, strict=True)])))
    return rows


def _rows_of_table(file: Path, kind: str) -> list[Row]:
    from datasets import load_dataset

    table = load_dataset(kind, data_files=glob.escape(str(file)), split="train", streaming=True)
    return [_as_written(row, table.features) for row in table]


def _as_written(value: Any, kind: Any) -> Any:
    """Return a value of a table, which has the keys of all rows in each, as its writer had it."""
    if repr(kind).startswith("Json("):
        return value
    if isinstance(value, dict):
        kinds = {}
        if isinstance(kind, dict):
            kinds = kind
        written = {}
        for key, item in value.items():
            kind_of_item = kinds.get(key)
            # A column of nulls alone has that type, and was written so.
            if item is not None or repr(kind_of_item) == "Value('null')":
                written[key] = _as_written(item, kind_of_item)
        return written
    if isinstance(value, list):
        kind_of_item = getattr(kind, "feature", None)
        return [_as_written(item, kind_of_item) for item in value]
    return value


def _unpacked(content: bytes) -> bytes:
    if content.startswith(_ZSTD):
        from pyarrow import BufferReader, CompressedInputStream

        unpacked: bytes = CompressedInputStream(BufferReader(content), "zstd").read()
        return unpacked
    for magic, module in _MAGIC.items():
        if content.startswith(magic):
            return module.decompress(content)
    return content


def _paragraphs(lines: list[str]) -> list[Row]:
    """Return the documents of a text file, which blank lines divide."""
    documents = []
    for filled, paragraph in groupby(lines, key=lambda line: bool(line.strip())):
        if filled:
            documents.append({"text": "\n".join(paragraph).strip("\r\n")})
    return documents


def _as_row(value: Any) -> Row:
    if isinstance(value, str):
        return {"text": value}
    row: Row = value
    return row
