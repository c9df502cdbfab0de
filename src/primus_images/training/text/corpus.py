"""Text to train on: the files of a corpus, their rows, and the columns that hold the text.

A corpus is a file, a folder of files of one form, or a data set on the hub:

* ``.txt``: documents separated by blank lines;
* Parquet, CSV, TSV and Arrow, which ``datasets`` reads: one document per row;
* anything else is JSON: one object per line, or a list of objects.

Text may be compressed by gzip, bzip2, xz or zstd. Nothing here needs a tokenizer: see
:mod:`primus_images.training.text.encoder`.
"""

import bz2
import gzip
import io
import json
import lzma
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from glob import escape
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any

from primus_images.errors import HostError, InputError, PrimusError, nearest
from primus_images.files import below, reason_of, refuse_pointer, refuse_special
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.weights import HUB, downloaded
from primus_images.schema import distinct_keys
from primus_images.yamlfile import read_values

_TABLE: Mapping[str, Any] = read_values(Path(__file__).with_name("corpus.yaml")).data
TOKENIZER_FILES: Sequence[str] = _TABLE["tokenizer"]
WEIGHTS: Sequence[str] = _TABLE["weights"]
_BLOCK = 1 << 20
_ROLES = ("user", "assistant")
_OPENERS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_BESIDE = re.compile("|".join(_TABLE["beside"]), re.IGNORECASE)
# Files of one split, except data-00000-of-00001.arrow, which `save_to_disk` writes to the folder of
# each split.
_PART = re.compile(r"(?!data-)([A-Za-z0-9_.]+)-\d{5}-of-\d{5}")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The text of a job: a path or ``hf:OWNER/NAME``, its ``tokenizer`` (a folder or ``hf:``), and
    what to take of it.

    Without ``column``, the columns of the first row decide. Without ``split``, it is
    ``usual_split`` if there are several. With ``completions``, only the words of the assistant, or
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
    name = _named(recipe, "eval.corpus")
    split = recipe.find("eval.split", "") or None
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
    """The files of a corpus in order, the ``split`` that they are (None: there is only one), and
    the others.
    """

    paths: Sequence[Path]
    split: str | None = None
    others: Sequence[str] = ()


def files_of(corpus: Corpus) -> Files:
    """Return the files to read. Raises InputError if they are of several forms, or if the split
    must be chosen.
    """
    root = Path(corpus.name)
    if not root.is_dir():
        refuse_special(root, str(root))
        if corpus.split:
            raise InputError(
                f"data.split: {root} is one file, which has no splits", where=str(root)
            )
        return Files(paths=[root])
    every = sorted(below(root, hidden=False))
    for file in every:
        if not file.exists():
            raise InputError(
                "the link leads nowhere", where=file, hint="remove it, or restore its file"
            )
        refuse_special(file, str(file))
    # datasets reads no folder like __pycache__ either.
    data = [
        file
        for file in every
        if not any(part.startswith("__") for part in file.relative_to(root).parts[:-1])
    ]
    splits = _splits_of_card(root, every) or _splits(
        root, [file for file in data if not _BESIDE.fullmatch(file.name)]
    )
    chosen = corpus.split or (corpus.usual_split if len(splits) > 1 else next(iter(splits), None))
    names = ", ".join(sorted(split for split in splits if split))
    if len(splits) > 1 and None in splits and not corpus.split:
        file_text = splits[None][0].relative_to(root)
        raise InputError(
            f"{file_text} belongs to no split, and other files do",
            where=root,
            hint=f"data.split=NAME (eval.split=NAME) chooses one of {names}; or remove the file",
        )
    if splits and chosen not in splits:
        raise InputError(
            f"the folder has no split {chosen}, only {names}",
            where=root,
            hint="data.split=NAME (eval.split=NAME) chooses one",
        )
    files = splits.get(chosen, [])
    forms = {_form(file) for file in files}
    if len(forms) != 1:
        kinds = ", ".join(sorted(form or "no suffix" for form in forms)) or "no files"
        raise _unreadable(f"expected files of one form in the folder, found {kinds}", str(root))
    others = sorted({*every} - {*files})
    return Files(paths=files, split=chosen, others=[str(file.relative_to(root)) for file in others])


def _splits_of_card(root: Path, files: Sequence[Path]) -> dict[str | None, list[Path]]:
    """As ``datasets`` reads the ``configs`` of a README.md; empty if there are none."""
    card = root / "README.md"
    if not card.is_file() or b"\nconfigs:" not in card.read_bytes().partition(b"\n---")[0]:
        return {}
    datasets = _datasets()
    places = {file.resolve(): file for file in files}
    try:
        named = datasets.load_dataset_builder(str(root.resolve())).config.data_files or {}
    except Exception as error:
        raise InputError(
            f"datasets cannot choose files: {first_line(error)}",
            where=f"{card}: configs",
            hint="assets.corpus names one of its files",
        ) from None
    return {
        str(split): [places.get(Path(name).resolve(), Path(name)) for name in named[split]]
        for split in named
    }


def _splits(root: Path, files: Sequence[Path]) -> dict[str | None, list[Path]]:
    names = {file: _split_in(file.name) for file in files}
    if (root / "dataset_dict.json").exists():  # of `save_to_disk`: each split is a folder
        names = {file: file.relative_to(root).parts[0] for file in files}
    elif not any(names.values()):
        names = {
            file: next(filter(None, map(_split_in, file.relative_to(root).parts[:-1])), None)
            for file in files
        }
    return {split: [file for file in files if names[file] == split] for split in {*names.values()}}


def _split_in(name: str) -> str | None:
    part = _PART.match(name)
    if part:
        return part[1]
    for split, words in _TABLE["splits"].items():
        if re.search(rf"(?:^|[-._ 0-9])(?:{'|'.join(words)})(?:[-._ 0-9]|$)", name, re.IGNORECASE):
            return str(split)
    return None


def _form(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in _TABLE["packed"]:
        suffixes.pop()
    form = ""
    if suffixes:
        form = suffixes[-1]
    if form in (".json", ".ndjson"):
        return ".jsonl"
    return form


def rows(corpus: Corpus, files: Files) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of every row. A row of a text file is a mapping with the column ``text``.

    Raises InputError, with file and line or row, at one that cannot be read.
    """
    if corpus.name.startswith(HUB):
        yield from _table_rows(
            corpus.name, corpus.name.removeprefix(HUB), split=corpus.split or corpus.usual_split
        )
    for file in files.paths:
        form = _form(file)
        head = _head(file)
        refuse_pointer(file)
        if form in _TABLE["tables"] or head.startswith(b"PAR1"):
            kind = _TABLE["tables"].get(form, "parquet")
            # Of Parquet, datasets would read as many rows at a time as the first group has, which
            # may be none.
            options: Any = (
                {"sep": "\t"}
                if form == ".tsv"
                else {"batch_size": 1024}
                if kind == "parquet"
                else {}
            )
            yield from _table_rows(
                str(file), kind, data_files=escape(str(file)), split="train", **options
            )
        elif form == ".txt":
            for blank, paragraph in groupby(
                _lines(file, head), key=lambda line: not line[1].strip()
            ):
                if not blank:
                    places, texts = zip(*paragraph, strict=True)
                    yield places[0], {"text": "".join(texts).strip("\r\n")}
        else:
            yield from _json_rows(file, head)


def _unreadable(message: str, where: str) -> InputError:
    return InputError(message, where=where, hint=_TABLE["readable"])


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(8)
    except OSError as error:
        raise InputError(f"cannot be read: {reason_of(error)}", where=str(file)) from error


def _open(file: Path, head: bytes) -> IO[bytes]:
    if head.startswith(b"PK\x03\x04"):
        if file.suffix.lower() in (".xlsx", ".ods"):
            raise InputError(
                "expected text, found a spreadsheet", where=file, hint="save it as CSV"
            )
        raise InputError("expected text, found a zip archive", where=file, hint="unpack it")
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        from pyarrow import input_stream

        return io.BufferedReader(input_stream(str(file), compression="zstd"), _BLOCK)
    opener: Any = next(
        (opener for magic, opener in _OPENERS.items() if head.startswith(magic)), open
    )
    return opener(file, "rb")  # type: ignore[no-any-return]


def _lines(file: Path, head: bytes) -> Iterator[tuple[str, str]]:
    number = 0
    try:
        with _open(file, head) as stream:
            for number, line in enumerate(stream, 1):
                where = f"{file}:{number}"
                try:
                    text = line.decode("utf-8-sig")
                except UnicodeDecodeError as error:
                    raise _unreadable(
                        f"expected UTF-8 text, found the byte 0x{line[error.start]:02x}", where
                    ) from None
                if "\0" in text:
                    raise _unreadable("expected text, found binary data", where)
                yield where, text
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise _unreadable(f"cannot be read: {error}", f"{file}:{number + 1}") from error


def _json_rows(file: Path, head: bytes) -> Iterator[tuple[str, Any]]:
    lines = _lines(file, head)
    for number, (where, line) in enumerate(lines, 1):
        if number == 1 and line.lstrip().startswith("["):
            whole = line + "".join(text for _, text in lines)
            for item, row in enumerate(_parsed(whole, file, 1, "one JSON list"), 1):
                yield f"{file}: item {item}", {"text": row} if isinstance(row, str) else row
        elif line.strip():
            yield where, _parsed(line, file, number, "one JSON object per line")


def _parsed(text: str, file: Path, line: int, expected: str) -> Any:
    try:
        return json.loads(text.rstrip(), object_pairs_hook=distinct_keys)
    except RecursionError:
        raise _unreadable("the JSON is nested too deeply", f"{file}:{line}") from None
    except json.JSONDecodeError as error:
        where = f"{file}:{line + error.lineno - 1}:{error.colno}"
        rest = text[error.pos :].strip()[:40]
        raise _unreadable(
            f"expected {expected}, found {repr(rest) if rest else 'the end'}", where
        ) from None
    except ValueError as error:  # a number with thousands of digits
        raise _unreadable(f"the JSON cannot be read: {error}", f"{file}:{line}") from None


def _datasets() -> Any:
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


def _table_rows(shown: str, name: str, **options: Any) -> Iterator[tuple[str, Any]]:
    load_dataset = _datasets().load_dataset
    number = 0
    try:
        for number, row in enumerate(load_dataset(name, streaming=True, **options), 1):
            if (
                name == "csv" and "__index_level_0__" in row
            ):  # pandas takes the first fields for names of lines
                raise ValueError(
                    "lines have more fields than the first one: quote those that contain the "
                    "separator"
                )
            yield (
                f"{shown}: row {number}",
                {name: _without_nulls(value) for name, value in row.items()},
            )
    except ConnectionError as error:
        raise HostError(
            f"cannot be read: {first_line(error)}",
            where=shown,
            hint="allow this machine to reach the hub (HF_TOKEN for what is not public), or "
            "name a file",
        ) from None
    except Exception as error:
        raise _unreadable(
            f"cannot be read after row {number}: {first_line(error)}", shown
        ) from None


def first_line(error: Exception) -> str:
    """Return the first line of the message of ``error``, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _without_nulls(value: Any) -> Any:
    # Tables add the keys that other messages and tools have, as null.
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document. ``prompt`` characters of ``text``, and everything before message ``first``, are
    not trained.

    With ``messages``, the chat template of the tokenizer makes the text; ``text`` is used if there
    is no template.
    """

    text: str = ""
    prompt: int = 0
    messages: Sequence[Mapping[str, Any]] | None = None
    first: int = 0
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The ``columns`` that hold the text or the ``chat`` of every row, and those that are
    ``unused``.
    """

    columns: Sequence[str]
    chat: bool = False
    unused: Sequence[str] = ()

    @property
    def prompted(self) -> bool:
        """Whether a row has words that it only answers: of users, or of a prompt."""
        return self.chat or len(self.columns) > 1


def layout_of(row: Any, column: str | None, where: str) -> Layout:
    """Return the layout of a corpus whose first row is ``row``. Raises InputError if no column is
    known.
    """
    row = _mapping(row, where)
    if column:
        columns = (column,)
    else:
        columns = next(
            (names for names in _TABLE["layouts"] if all(map(row.__contains__, names))), None
        )
    judged = columns != ["text"] and isinstance(row.get("label"), bool)
    if column is None and (judged or row.keys() & {"chosen", "rejected"}):
        names_text = ", ".join(map(str, row))
        raise InputError(
            f"these are preferences ({names_text}), for DPO or KTO: trained as they are, "
            "rejected answers would be good ones",
            where=where,
            hint="data.column=NAME names a column of whole chats or texts to train",
        )
    if columns is None or columns[0] not in row:
        raise _missing(row, columns or ("text",), where)
    if column is None and columns == ["text"] and isinstance(row.get("messages"), list):
        raise InputError(
            "there are both the text and the messages of a chat",
            where=where,
            hint="data.column=messages, or data.column=text",
        )
    # Messages that are stored as text would be trained as they are written.
    chat = columns[0] in ("messages", "conversations") or isinstance(row[columns[0]], list)
    beside = ()
    if columns[0] == "instruction":
        beside = ("input", "history")
    used = {*columns, *beside, *(_TABLE["beside_chats"] if chat or beside else ())}
    return Layout(
        columns=columns, chat=chat, unused=[str(name) for name in row if name not in used]
    )


def _missing(row: Mapping[Any, Any], columns: Sequence[str], where: str) -> PrimusError:
    name = next((name for name in columns if name not in row), columns[0])
    keys = ", ".join(map(str, row)) or "no columns"
    return InputError(
        f"expected the column {name!r}, found {keys}{nearest(name, map(str, row))}",
        where=where,
        hint="data.column=NAME names the column of the text or of the chat messages; also "
        "known are messages, conversations, prompt and completion, instruction and "
        "output",
    )


def _mapping(row: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(row, Mapping):
        kind = {list: "a list", str: "text", type(None): "null"}.get(type(row), "a number")
        raise _unreadable(f"expected a JSON object, found {kind}", where)
    return row


def document_of(row: Any, layout: Layout, where: str) -> Document:
    """Return the document of a row. Raises InputError if a column is missing, or holds something
    else.
    """
    row = _mapping(row, where)
    if any(name not in row for name in layout.columns):
        raise _missing(row, layout.columns, where)
    several = len(layout.columns) > 1
    if layout.columns[0] == "instruction" and several:
        return _alpaca(row, where)
    if not layout.chat:
        texts = [_text(row[name], name, where) for name in layout.columns]
        return Document(text="".join(texts), prompt=len(texts[0]) if several else 0)
    chats = [_messages(row[name], name, where) for name in layout.columns]
    return _chat(row, list(chain(*chats)), len(chats[0]) if several else 0, where)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise _neither(value, name, where)
    _refuse_surrogates(value, where)
    return value


def _refuse_surrogates(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}, which is half a character (a lone surrogate)"
        raise _unreadable(f"expected text, found {half}", where) from None


def _neither(value: Any, name: str, where: str) -> InputError:
    shown = json.dumps(value, ensure_ascii=False, default=str)[:60]
    return _unreadable(
        f"expected text or chat messages (role and content) in {name!r}, found {shown}", where
    )


def _messages(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    if not (isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value)):
        raise _neither(value, name, where)
    wrong = [turn for turn in value if any(turn.get(key) not in (None, 0, 1) for key in WEIGHTS)]
    if wrong:
        shown = json.dumps(wrong[0], ensure_ascii=False, default=str)[:80]
        raise InputError(f"a message is trained or not (weight 1 or 0), found {shown}", where=where)
    if all(
        _TABLE["senders"].get(str(turn.get("from"))) and isinstance(turn.get("value"), str)
        for turn in value
    ):
        value = [
            {**turn, "role": _TABLE["senders"][turn["from"]], "content": turn["value"]}
            for turn in value
        ]
    for turn in value:
        calls = [*(turn.get("tool_calls") or ()), *filter(None, [turn.get("function_call")])]
        whole = all(
            isinstance(call, Mapping) and isinstance(call.get("function", call), Mapping)
            for call in calls
        )
        content = turn.get("content")
        if not (isinstance(turn.get("role"), str) and whole) or (content is None and not calls):
            raise _neither(turn, name, where)
        for part in content if isinstance(content, list) else ():
            if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
                raise InputError(
                    f"expected text in every part of a message, found {str(part)[:60]}", where=where
                )
    return [dict(turn) for turn in value]


def _chat(
    row: Mapping[Any, Any], messages: list[dict[str, Any]], first: int, where: str
) -> Document:
    system, tools, options = (
        row.get(name) or None for name in ("system", "tools", "chat_template_kwargs")
    )
    if system is not None:
        if messages[0]["role"] != "system":
            begin = {"role": "system", "content": _text(system, "system", where)}
            messages = [begin, *messages]
            first = first + bool(first)
        elif messages[0]["content"] != system:
            raise InputError(
                "the column 'system' differs from the chat's own system message", where=where
            )
    with suppress(ValueError, RecursionError):
        if isinstance(tools, str):
            tools = json.loads(tools)
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise InputError("expected a list of tools (JSON schemas) in 'tools'", where=where)
    if options is not None and not isinstance(options, Mapping):
        raise InputError(
            "expected an object of the template's variables in 'chat_template_kwargs'", where=where
        )
    _refuse_surrogates(json.dumps(messages, ensure_ascii=False, default=str), where)
    return Document(messages=messages, first=first, tools=tools or None, options=options or {})


def _alpaca(row: Mapping[Any, Any], where: str) -> Document:
    instruction, output = (_text(row[name], name, where) for name in ("instruction", "output"))
    if row.get("input") is None:
        context = ""
    else:
        context = _text(row["input"], "input", where)
    more = ""
    if context:
        more = ", paired with an input that provides further context"
    text = _TABLE["alpaca"].format(
        more, instruction, f"### Input:\n{context}\n\n" if context else ""
    )
    turns = [
        {"role": "user", "content": f"{instruction}\n{context}" if context else instruction},
        {"role": "assistant", "content": output},
    ]
    if row.get("history") is None:
        before = []
    else:
        before = row["history"]
    if not (
        isinstance(before, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in before)
    ):
        raise _neither(before, "history", where)
    said = [
        (role, _text(word, "history", where))
        for pair in before
        for role, word in zip(_ROLES, pair, strict=True)
    ]
    chat = _chat(row, [*({"role": role, "content": word} for role, word in said), *turns], 0, where)
    # Alpaca's text has no place for a system prompt, tools or earlier turns.
    plain = chat.messages == turns and not chat.tools
    return replace(chat, text=text + output if plain else "", prompt=len(text))


def tokenizer_folder(name: str) -> Path:
    """Return the folder of a tokenizer; that of ``hf:OWNER/NAME`` is downloaded once."""
    if name.startswith(HUB):
        return downloaded(name, *TOKENIZER_FILES, "*config.json")
    return Path(name)
