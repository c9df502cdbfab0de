"""Text to train on: the forms that can be read, their documents, and a check of a sample before any rank starts.

A corpus is a file, or a folder of files of one form:

* ``.txt``: documents separated by blank lines;
* Parquet: one document per row;
* anything else is JSON Lines: one JSON object per line.

In the last two the document is the text of one column. Chat messages (a list of ``role`` and ``content``) become
text through the tokenizer's own chat template.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from primus.errors import HostError, InputError, nearest
from primus.files import refuse_special
from primus.terminal import counted

COLUMN = "text"
HUB = "hf:"
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt",
    "*.tiktoken", "*.model",
)  # fmt: skip
_CHAT = "messages"
_HINT = (
    "readable: .txt (blank lines between documents), JSON Lines (one object per line) and Parquet; "
    "data.column=NAME names the column of the text or of the chat messages"
)
# A line of a file: its place for error messages, and its bytes.
_Line = tuple[Callable[[], str], bytes]
# How much is read before a run starts: enough to recognize the format, and fast for files of any size.
_FIRST_DOCUMENTS = 200
_PLACES = 40
_FILES = 20
_MOST_FILES = 100_000
_LONGEST_LINE = 1 << 20
# Lines before a sampled place are counted only if that is fast.
_COUNTED_BYTES = 1 << 30
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The location of the text: ``path``, the ``column`` in it, and the folder of the ``tokenizer`` (None: not
    available).

    If ``column`` is None, it is ``text`` if that exists, else ``messages``.
    """

    path: Path
    column: str | None = None
    tokenizer: Path | None = None


def check(corpus: Corpus, *, ranks: int = 1) -> None:
    """Read a sample: the beginning of each file, and places spread over it.

    Raises InputError, with file and line, if a document cannot be read, or if there are fewer documents than
    ``ranks``, each of which needs one. Raises HostError if the library for Parquet is missing.
    """
    files = _files(corpus.path)
    chosen = dict.fromkeys(files[number * (len(files) - 1) // (_FILES - 1)] for number in range(_FILES))
    samples = (islice(_of_file(corpus, file, _sampled_lines), _FIRST_DOCUMENTS + _PLACES) for file in chosen)
    # A list, because a generator would stop at the first text, and all of them must be read.
    has_text = any([bool(document.strip()) for sample in samples for document in sample])  # noqa: C419
    # Very long lines are not part of the sample.
    if not has_text and next(documents(corpus), None) is None:
        raise InputError("the corpus contains no text", where=str(corpus.path), hint=_HINT)
    if ranks > 1 and (few := sum(1 for _ in islice(documents(corpus), ranks))) < ranks:
        raise InputError(
            f"the corpus has {counted(few, 'document')}, and each of the {ranks} data-parallel ranks needs one",
            where=str(corpus.path),
            hint=f"add documents, or train on fewer ranks (--ranks {few})",
        )


def documents(corpus: Corpus) -> Iterator[str]:
    """Yield every document that is not empty, in order. Raises the errors of :func:`check` at an invalid document."""
    for file in _files(corpus.path):
        yield from filter(str.strip, _of_file(corpus, file, _lines))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        refuse_special(path, str(path))
        return [path]
    files: list[Path] = []
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder, name)
            if not name.startswith((".", "_")) and file.is_file():
                files.append(file)
        if len(files) > _MOST_FILES:
            raise InputError(
                f"the folder has more than {_MOST_FILES:,} files", where=str(path), hint="name one below it"
            )
    forms = {file.suffix.lower() for file in files}
    if len(forms) != 1:
        kinds = ", ".join(sorted(form or "no suffix" for form in forms)[:_FILES]) or "no files"
        raise InputError(f"expected files of one form in the folder, found {kinds}", where=str(path), hint=_HINT)
    return sorted(files)


def _of_file(corpus: Corpus, file: Path, lines: Callable[[Path], Iterator[_Line]]) -> Iterator[str]:
    form = _form(file)
    if form == "parquet":
        return _of_rows(corpus, _parquet_rows(file))
    if form == "text":
        return _paragraphs(_decoded(where, line) for where, line in lines(file))
    return _of_rows(corpus, _json_rows(file, lines(file)))


def _form(file: Path) -> Literal["parquet", "text", "json"]:
    try:
        with file.open("rb") as stream:
            head = stream.read(6)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(file)) from error
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            raise InputError(f"expected text, found a file compressed by {name}", where=str(file), hint="decompress it")
    if head.startswith(b"PAR1") or file.suffix.lower() == ".parquet":
        return "parquet"
    return "text" if file.suffix.lower() == ".txt" else "json"


def _lines(file: Path) -> Iterator[_Line]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            yield partial(_numbered, file, number), line


def _sampled_lines(file: Path) -> Iterator[_Line]:
    """Yield the first lines of ``file``, then one line at each of several places spread evenly over the rest."""
    with file.open("rb") as stream:
        for number in range(1, _FIRST_DOCUMENTS + 1):
            line = stream.readline(_LONGEST_LINE)
            if not line or (len(line) == _LONGEST_LINE and number > 1):
                return
            yield partial(_numbered, file, number), line
            if len(line) == _LONGEST_LINE:
                return
        read, size = stream.tell(), file.stat().st_size
        for place in range(1, _PLACES + 1):
            stream.seek(read + (size - read) * place // (_PLACES + 1))
            at, rest = stream.tell(), stream.readline(_LONGEST_LINE)
            line = rest if b"\0" in rest else b""
            if rest.endswith(b"\n"):
                at, line = stream.tell(), stream.readline(_LONGEST_LINE)
            if line and (len(line) < _LONGEST_LINE or b"\0" in line):
                yield partial(_place, file, at), line


def _numbered(file: Path, line: int) -> str:
    return f"{file}:{line}"


def _place(file: Path, offset: int) -> str:
    """Return ``file:line`` of a byte offset, or the offset itself if counting the lines before it would take long."""
    if offset > _COUNTED_BYTES:
        return f"{file} (byte {offset:,})"
    lines, remaining = 1, offset
    with file.open("rb") as stream:
        while remaining and (block := stream.read(min(remaining, 1 << 20))):
            lines, remaining = lines + block.count(b"\n"), remaining - len(block)
    return f"{file}:{lines}"


def _decoded(where: Callable[[], str], line: bytes) -> str:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data" and len(line) == _LONGEST_LINE:
            return line.decode("utf-8", errors="ignore")
        raise InputError(
            f"expected UTF-8 text, found the byte 0x{line[error.start]:02x}", where=where(), hint=_HINT
        ) from None
    if "\0" in text:
        raise InputError("expected text, found binary data", where=where(), hint=_HINT)
    return text


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    paragraph: list[str] = []
    for line in lines:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "".join(paragraph).strip("\r\n")
            paragraph = []
    if paragraph:
        yield "".join(paragraph).strip("\r\n")


def _json_rows(file: Path, lines: Iterator[_Line]) -> Iterator[tuple[str, Any]]:
    for where, raw in lines:
        line = _decoded(where, raw)
        if not line.strip():
            continue
        if len(raw) == _LONGEST_LINE:  # the sample ends inside this line
            return
        try:
            row = json.loads(line)
        except ValueError as error:
            column = f":{error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            start = f"{line.strip()[:40]!r}"
            raise InputError(
                f"expected one JSON object per line, found {start}", where=f"{where()}{column}",
                hint=_converted(file, line),
            ) from None  # fmt: skip
        except RecursionError:
            raise InputError("the JSON is nested too deeply", where=where(), hint=_HINT) from None
        if isinstance(row, list):
            raise InputError("expected a JSON object, found a list", where=where(), hint=_converted(file, line))
        yield where(), row


def _converted(file: Path, line: str) -> str:
    if file.suffix.lower() == ".csv":
        reader = "read_csv"
    elif line.lstrip().startswith("["):
        reader = "read_json"
    else:
        return _HINT
    script = f"import pandas; pandas.{reader}({str(file)!r}).to_json('rows.jsonl', orient='records', lines=True)"
    return f'convert it in the image: python3 -c "{script}"'


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise HostError(
            "pyarrow, which reads Parquet, is not installed", hint="run this inside a primus image"
        ) from None
    number = 0
    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}: row {number}", row
    except (ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"cannot be read as Parquet: {reason}", where=str(file), hint=_HINT) from None


def _of_rows(corpus: Corpus, rows: Iterator[tuple[str, Any]]) -> Iterator[str]:
    read = row_reader(corpus)
    return (_whole(read(row, where), where) for where, row in rows)


def _whole(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"expected text, found \\u{ord(text[error.start]):04x}, which is half a character (a lone surrogate)",
            where=where, hint=_HINT,
        ) from None  # fmt: skip
    return text


def row_reader(corpus: Corpus) -> Callable[[Any, str], str]:
    """Return a function that returns the text of a row. Its second argument is the row's place, for its InputError."""
    column, render = corpus.column, None

    def read(row: Any, where: str) -> str:
        nonlocal column, render
        if not isinstance(row, Mapping):
            kind = {list: "a list", str: "text", type(None): "null"}.get(type(row), "a number")
            raise InputError(f"expected a JSON object, found {kind}", where=where, hint=_HINT)
        if column is None:
            column = _CHAT if COLUMN not in row and _CHAT in row else COLUMN
        if column not in row:
            keys = ", ".join(map(str, row)) or "no columns"
            near = nearest(column, map(str, row))
            hint = "data.column=NAME names the column of the text or of the chat messages"
            raise InputError(f"expected the column {column!r}, found {keys}{near}", where=where, hint=hint)
        value = row[column]
        if isinstance(value, str):
            return value
        if not _is_chat(value):
            shown = json.dumps(value, ensure_ascii=False, default=str)[:60]
            raise InputError(
                f"expected text or chat messages (role and content) in {column!r}, found {shown}",
                where=where, hint=_HINT,
            )  # fmt: skip
        render = render or _chat_template(corpus.tokenizer, where)
        return render(value, where)

    return read


def _is_chat(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and "content" in turn for turn in value)
    )


def _chat_template(tokenizer: Path | None, where: str) -> Callable[[Any, str], str]:
    config = tokenizer_config(tokenizer) if tokenizer else {}
    file = tokenizer / "chat_template.jinja" if tokenizer else None
    template = file.read_text(encoding="utf-8") if file and file.is_file() else config.get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    if not isinstance(template, str):
        raise InputError(
            f"the corpus contains chat messages, but the tokenizer {tokenizer or ''} has no chat template", where=where,
            hint="assets.tokenizer=FOLDER of an instruction-tuned model: its tokenizer_config.json has chat_template",
        )  # fmt: skip
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise HostError(
            "jinja2, which chat templates need, is not installed", hint="run this inside a primus image"
        ) from None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    # No strftime_now: with the current date in the text, the tokens would change every day.
    marks = {name: mark(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    try:
        compiled = environment.from_string(template)
    except TemplateError as error:
        raise InputError(f"the chat template is not valid: {error}", where=str(tokenizer)) from None

    def render(messages: Any, where: str) -> str:
        try:
            text: str = compiled.render(messages=messages, add_generation_prompt=False, tools=None, **marks)
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(f"the tokenizer's chat template refuses the messages: {error}", where=where) from None
        return text.removeprefix(marks["bos_token"]).removesuffix(marks["eos_token"])

    return render


def mark(value: object) -> str:
    """Return the text of a special token, which some tokenizers store with its stripping rules; "" if there is none."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the contents of ``tokenizer_config.json`` in ``folder``; empty if it cannot be read."""
    try:
        content = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def hub_tokenizer(repository: str) -> Path:
    """Return the folder of the tokenizer of ``hf:OWNER/NAME``, downloaded once. The token is in HF_TOKEN."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repository.removeprefix(HUB), allow_patterns=list(TOKENIZER_FILES)))
