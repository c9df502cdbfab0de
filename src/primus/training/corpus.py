"""Text to train on: the files of a corpus, their rows, and the columns that hold the text.

A corpus is a file, a folder of files of one form, or a data set on the hub:

* ``.txt``: documents separated by blank lines;
* Parquet, CSV, TSV and Arrow, which ``datasets`` reads: one document per row;
* anything else is JSON: one object per line, or a list of objects.

Text may be compressed by gzip, bzip2, xz or zstd. Nothing here needs a tokenizer: see :mod:`primus.training.tokens`.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import IO, Any

from primus.errors import HostError, InputError, nearest
from primus.files import below, refuse_special
from primus.recipes.recipe import Recipe
from primus.recipes.weights import HUB, downloaded

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt",
    "*.tiktoken", "*.model",
)  # fmt: skip
_HINT = (
    "readable: .txt (blank lines between documents), JSON (one object per line, or a list), Parquet, CSV and Arrow; "
    "data.column=NAME names the column of the text or of the chat messages"
)
_MOST_FILES = 100_000
_BLOCK = 1 << 20
_OPENERS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_PACKED = (".gz", ".bz2", ".xz", ".zst")
_TABLES = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
# Files that describe a folder of data.
_BESIDES = re.compile(
    r"(README|LICENSE).*|.*\.md|_SUCCESS|_(common_)?metadata|_(started|committed)_.*|dataset_(dict|infos?)\.json"
    r"|state\.json",
    re.IGNORECASE,
)
# The words by which `datasets` recognizes a split, and the names of files of one split in several parts.
_SPLITS = {
    "train": ("train", "training"), "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}  # fmt: skip
_PART = re.compile(r"([A-Za-z0-9_.]+)-\d{5}-of-\d{5}")
# The columns of a row of each layout, first match first.
_LAYOUTS = (("text",), ("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
_SENDERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "function_call": "assistant", "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
# Keys of a message that say, by 0 or false, that it is not trained.
WEIGHTS = ("weight", "train", "training", "loss_mask")
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The text of a job: a path or ``hf:OWNER/NAME``, its ``tokenizer`` (a folder or ``hf:``), and what to take of it.

    Without ``column``, the columns of the first row decide. Without ``split``, it is ``usual_split`` if there are
    several. With ``completions``, only the words of the assistant, or
    of the completion, are trained.
    """

    name: str
    tokenizer: str = ""
    column: str | None = None
    split: str | None = None
    usual_split: str = "train"
    completions: bool = True


def held_out_corpus_of(recipe: Recipe) -> Corpus | None:
    """Return the corpus of ``recipe`` for evaluation, None if there is none of its own."""
    if "eval.corpus" not in recipe.settings:
        return None
    name, split = _named(recipe, "eval.corpus"), recipe.find("eval.split", "") or None
    return replace(corpus_of(recipe), name=name, split=split, usual_split="validation")


def _named(recipe: Recipe, key: str) -> str:
    return str(recipe.asset(key) or recipe.get(key, str))


def corpus_of(recipe: Recipe) -> Corpus:
    """Return the corpus of ``recipe``."""
    return Corpus(
        name=_named(recipe, "assets.corpus"),
        tokenizer=_named(recipe, "assets.tokenizer"),
        column=recipe.find("data.column", "") or None,
        split=recipe.find("data.split", "") or None,
        completions=recipe.find("data.train_on", "completions") == "completions",
    )


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of a corpus in order, the ``split`` that they are (None: there is only one), and the others."""

    paths: Sequence[Path]
    split: str | None = None
    others: Sequence[str] = ()


def files_of(corpus: Corpus) -> Files:
    """Return the files to read. Raises InputError if they are of several forms, or if the split must be chosen."""
    root = Path(corpus.name)
    if not root.is_dir():
        refuse_special(root, str(root))
        if corpus.split:
            raise InputError(f"data.split: {root} is one file, which has no splits", where=str(root))
        return Files(paths=[root])
    files = sorted(_shown(root))
    others = [str(file.relative_to(root)) for file in files if _BESIDES.fullmatch(file.name)]
    files = [file for file in files if not _BESIDES.fullmatch(file.name)]
    splits = _splits(root, files)
    chosen: str | None = None
    if corpus.split or len(splits) > 1:
        chosen = corpus.split or corpus.usual_split
        if None in splits and not corpus.split:
            raise InputError(
                f"{splits[None][0].relative_to(root)} belongs to no split, and other files do", where=str(root),
                hint=f"data.split=NAME (eval.split=NAME) chooses one of {_listed(splits)}; or remove the file",
            )  # fmt: skip
        if chosen not in splits:
            raise InputError(
                f"the folder has no split {chosen}, only {_listed(splits)}", where=str(root),
                hint="data.split=NAME (eval.split=NAME) chooses one",
            )  # fmt: skip
        others += [str(file.relative_to(root)) for split in splits if split != chosen for file in splits[split]]
    else:
        chosen = next(iter(splits), None)
    files = splits.get(chosen, [])
    forms = {_form(file) for file in files}
    if len(forms) != 1:
        kinds = ", ".join(sorted(form or "no suffix" for form in forms)) or "no files"
        raise InputError(f"expected files of one form in the folder, found {kinds}", where=str(root), hint=_HINT)
    return Files(paths=files, split=chosen, others=others)


def _shown(root: Path) -> Iterator[Path]:
    """Yield all files below ``root`` but hidden ones."""
    for number, file in enumerate(below(root, hidden=False)):
        if number >= _MOST_FILES:
            raise InputError(
                f"the folder has more than {_MOST_FILES:,} files", where=str(root), hint="name one below it"
            )
        if not file.exists():
            raise InputError("the link leads nowhere", where=str(file), hint="remove it, or restore its file")
        refuse_special(file, str(file))
        yield file


def _splits(root: Path, files: Sequence[Path]) -> dict[str | None, list[Path]]:
    names = {file: _split_in(file.name) for file in files}
    if not any(names.values()):
        names = {file: next(filter(None, map(_split_in, file.relative_to(root).parts[:-1])), None) for file in files}
    splits: dict[str | None, list[Path]] = {}
    for file, split in names.items():
        splits.setdefault(split, []).append(file)
    return splits


def _split_in(name: str) -> str | None:
    if part := _PART.match(name):
        return part[1]
    for split, words in _SPLITS.items():
        if re.search(rf"(?:^|[-._ 0-9])(?:{'|'.join(words)})(?:[-._ 0-9]|$)", name, re.IGNORECASE):
            return split
    return None


def _listed(splits: Mapping[str | None, object]) -> str:
    return ", ".join(sorted(split for split in splits if split))


def _form(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    form = suffixes[-1] if suffixes else ""
    return ".jsonl" if form in (".json", ".ndjson") else form


def rows(corpus: Corpus, files: Files) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of every row. A row of a text file is a mapping with the column ``text``.

    Raises InputError, with file and line or row, at one that cannot be read.
    """
    if corpus.name.startswith(HUB):
        yield from _table_rows(corpus.name, corpus.name.removeprefix(HUB), split=corpus.split or corpus.usual_split)
    for file in files.paths:
        form = _form(file)
        head = _head(file)
        if form in _TABLES or head.startswith(b"PAR1"):
            options = {"sep": "\t"} if form == ".tsv" else {}
            kind = _TABLES.get(form, "parquet")
            yield from _table_rows(str(file), kind, data_files=escape(str(file)), split="train", **options)
        elif form == ".txt":
            yield from ((where, {"text": text}) for where, text in _paragraphs(_lines(file, head)))
        else:
            yield from _json_rows(file, head)


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(8)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(file)) from error


def _open(file: Path, head: bytes) -> IO[bytes]:
    if head.startswith(b"PK\x03\x04"):
        raise InputError("expected text, found a zip archive", where=str(file), hint="unpack it")
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        from pyarrow import input_stream

        return io.BufferedReader(input_stream(str(file), compression="zstd"), _BLOCK)
    for magic, opener in _OPENERS.items():
        if head.startswith(magic):
            return opener(file, "rb")  # type: ignore[no-any-return, operator]
    return file.open("rb")


def _lines(file: Path, head: bytes) -> Iterator[tuple[str, str]]:
    number = 0
    try:
        with _open(file, head) as stream:
            for number, line in enumerate(stream, 1):
                yield f"{file}:{number}", _decoded(f"{file}:{number}", line)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise InputError(f"cannot be read: {error}", where=f"{file}:{number + 1}", hint=_HINT) from error


def _decoded(where: str, line: bytes) -> str:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"expected UTF-8 text, found the byte 0x{line[error.start]:02x}", where=where, hint=_HINT
        ) from None
    if "\0" in text:
        raise InputError("expected text, found binary data", where=where, hint=_HINT)
    return text


def _paragraphs(lines: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    paragraph: list[str] = []
    start = ""
    for where, line in lines:
        if line.strip():
            start = start if paragraph else where
            paragraph.append(line)
        elif paragraph:
            yield start, "".join(paragraph).strip("\r\n")
            paragraph = []
    if paragraph:
        yield start, "".join(paragraph).strip("\r\n")


def _json_rows(file: Path, head: bytes) -> Iterator[tuple[str, Any]]:
    lines = _lines(file, head)
    for where, line in lines:
        if line.lstrip().startswith("[") and (where.endswith(":1")):
            yield from _listed_rows(file, line, lines)
            return
        if not line.strip():
            continue
        try:
            yield where, json.loads(line)
        except ValueError as error:
            column = f":{error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise InputError(
                f"expected one JSON object per line, found {line.strip()[:40]!r}", where=f"{where}{column}", hint=_HINT
            ) from None
        except RecursionError:
            raise InputError("the JSON is nested too deeply", where=where, hint=_HINT) from None


def _listed_rows(file: Path, buffer: str, lines: Iterator[tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    """Yield the items of a JSON list that begins in ``buffer``, reading further lines only as they are needed."""
    decoder, place, number = json.JSONDecoder(), buffer.index("[") + 1, 0
    while True:
        while (rest := re.compile(r"[\s,]*").match(buffer, place)) and rest.end() == len(buffer):
            if not (more := next(lines, None)):
                raise InputError("the JSON list does not end", where=str(file), hint=_HINT)
            buffer, place = more[1], 0
        place = rest.end() if rest else place
        if buffer[place] == "]":
            if buffer[place + 1 :].strip() or any(line.strip() for _, line in lines):
                raise InputError("expected a JSON object, found a list", where=f"{file}:1", hint=_HINT)
            return
        count = 1
        while True:
            try:
                row, place = decoder.raw_decode(buffer, place)
                break
            except RecursionError:
                raise InputError("the JSON is nested too deeply", where=str(file), hint=_HINT) from None
            except ValueError:
                # Twice as many lines each time, so that a long item is not parsed again for each of its lines.
                more_lines = [line for _, (_, line) in zip(range(count), lines, strict=False)]
                if not more_lines:
                    raise InputError(
                        f"item {number + 1} of the JSON list cannot be read", where=str(file), hint=_HINT
                    ) from None
                buffer, place, count = buffer[place:] + "".join(more_lines), 0, 2 * count
        number += 1
        yield f"{file}: item {number}", {"text": row} if isinstance(row, str) else row


def _table_rows(shown: str, name: str, **options: Any) -> Iterator[tuple[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise HostError(
            "datasets, which reads Parquet, CSV and Arrow, is not installed", hint="run this inside a primus image"
        ) from None
    number = 0
    try:
        for number, row in enumerate(load_dataset(name, streaming=True, **options), 1):
            yield f"{shown}: row {number}", {name: _without_nulls(value) for name, value in row.items()}
    except Exception as error:  # noqa: BLE001, each reader has its own errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"cannot be read after row {number}: {reason}", where=shown, hint=_HINT) from None


def _without_nulls(value: Any) -> Any:
    """Leave out the keys that tables add, as null, to messages and tools that lack them."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document. ``prompt`` characters of ``text``, and everything before message ``first``, are not trained.

    With ``messages``, the chat template of the tokenizer makes the text; ``text`` is used if there is no template.
    """

    text: str = ""
    prompt: int = 0
    messages: Sequence[Mapping[str, Any]] | None = None
    first: int = 0
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The ``columns`` that hold the text or the ``chat`` of every row, and those that are ``unused``."""

    columns: Sequence[str]
    chat: bool = False
    unused: Sequence[str] = ()

    @property
    def prompted(self) -> bool:
        """Whether a row has words that it only answers: of users, or of a prompt."""
        return self.chat or len(self.columns) > 1


_BESIDE_CHATS = ("tools", "system", "chat_template_kwargs")


def layout_of(row: Any, column: str | None, where: str) -> Layout:
    """Return the layout of a corpus whose first row is ``row``. Raises InputError if no column is known."""
    row = _mapping(row, where)
    columns = (column,) if column else next((names for names in _LAYOUTS if all(map(row.__contains__, names))), None)
    if columns is None or columns[0] not in row:
        raise _missing(row, columns or ("text",), where)
    # Messages that are stored as text would be trained as they are written.
    chat = columns[0] in ("messages", "conversations") or isinstance(row[columns[0]], list)
    beside = ("input",) if columns[0] == "instruction" else ()
    used = {*columns, *beside, *(_BESIDE_CHATS if chat or beside else ())}
    return Layout(columns=columns, chat=chat, unused=[str(name) for name in row if name not in used])


def _missing(row: Mapping[Any, Any], columns: Sequence[str], where: str) -> InputError:
    name = next((name for name in columns if name not in row), columns[0])
    keys = ", ".join(map(str, row)) or "no columns"
    return InputError(
        f"expected the column {name!r}, found {keys}{nearest(name, map(str, row))}", where=where,
        hint="data.column=NAME names the column of the text or of the chat messages; also known are messages, "
        "conversations, prompt and completion, instruction and output",
    )  # fmt: skip


def _mapping(row: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(row, Mapping):
        kind = {list: "a list", str: "text", type(None): "null"}.get(type(row), "a number")
        raise InputError(f"expected a JSON object, found {kind}", where=where, hint=_HINT)
    return row


def document_of(row: Any, layout: Layout, where: str) -> Document:
    """Return the document of a row. Raises InputError if a column is missing, or holds something else."""
    row = _mapping(row, where)
    if any(name not in row for name in layout.columns):
        raise _missing(row, layout.columns, where)
    values = [row[name] for name in layout.columns]
    several = len(values) > 1
    if layout.columns[0] == "instruction" and several:
        return _alpaca(row, where)
    if not layout.chat:
        texts = [_text(value, name, where) for value, name in zip(values, layout.columns, strict=True)]
        return Document(text="".join(texts), prompt=len(texts[0]) if several else 0)
    chats = [_messages(value, name, where) for value, name in zip(values, layout.columns, strict=True)]
    return _chat(row, [turn for chat in chats for turn in chat], len(chats[0]) if several else 0, where)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise _neither(value, name, where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"expected text, found \\u{ord(value[error.start]):04x}, which is half a character (a lone surrogate)",
            where=where, hint=_HINT,
        ) from None  # fmt: skip
    return value


def _neither(value: Any, name: str, where: str) -> InputError:
    shown = json.dumps(value, ensure_ascii=False, default=str)[:60]
    sentence = f"expected text or chat messages (role and content) in {name!r}, found {shown}"
    return InputError(sentence, where=where, hint=_HINT)


def _messages(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Return chat messages as transformers expects them, from these or ShareGPT's ``from`` and ``value``."""
    if isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value):
        if wrong := [turn for turn in value if any(turn.get(key) not in (None, 0, 1) for key in WEIGHTS)]:
            shown = json.dumps(wrong[0], ensure_ascii=False, default=str)[:80]
            raise InputError(f"a message is trained or not (weight 1 or 0), found {shown}", where=where)
        if all(
            isinstance(turn.get("role"), str) and (turn.get("content") is not None or turn.get("tool_calls"))
            for turn in value
        ):
            return [dict(turn) for turn in value]
        if all(_SENDERS.get(str(turn.get("from"))) and isinstance(turn.get("value"), str) for turn in value):
            kept = ({key: turn[key] for key in WEIGHTS if key in turn} for turn in value)
            return [
                {"role": _SENDERS[turn["from"]], "content": turn["value"], **weight}
                for turn, weight in zip(value, kept, strict=True)
            ]
    raise _neither(value, name, where)


def _chat(row: Mapping[Any, Any], messages: list[dict[str, Any]], first: int, where: str) -> Document:
    system, tools = row.get("system"), row.get("tools")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages, first = [{"role": "system", "content": system}, *messages], first + bool(first)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except ValueError:
            raise InputError("expected a JSON list in 'tools'", where=where) from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InputError("expected a list of tools (JSON schemas) in 'tools'", where=where)
    for text in _strings(messages):
        _text(text, "messages", where)
    options = row.get("chat_template_kwargs")
    return Document(
        messages=messages, first=first, tools=tools or None, options=options if isinstance(options, Mapping) else {}
    )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(item)


def _alpaca(row: Mapping[Any, Any], where: str) -> Document:
    instruction, output = (_text(row[name], name, where) for name in ("instruction", "output"))
    given = _text(row.get("input") or "", "input", where)
    more = ", paired with an input that provides further context" if given else ""
    text = _ALPACA.format(more, instruction, f"### Input:\n{given}\n\n" if given else "")
    turns = [{"role": "user", "content": f"{instruction}\n{given}" if given else instruction},
             {"role": "assistant", "content": output}]  # fmt: skip
    return Document(text=text + output, prompt=len(text), messages=_chat(row, turns, 0, where).messages)


def tokenizer_folder(name: str) -> Path:
    """Return the folder of a tokenizer; that of ``hf:OWNER/NAME`` is downloaded once."""
    return downloaded(name, *TOKENIZER_FILES, "*config.json") if name.startswith(HUB) else Path(name)
