"""Run by Python with torch. Odd tokenizers, chat templates, corpora and columns, each compared with transformers,
tokenizers or datasets themselves: the same tokens and the same mask, or an InputError that names file and field.
"""

# ruff: noqa: E501, templates are long lines

import bz2
import csv
import gzip
import io
import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from cases import try_all
from pyarrow.parquet import write_table
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from primus.errors import InputError
from primus.training import tokens
from primus.training.corpus import Corpus, document_of, files_of, layout_of, rows
from primus.training.reference.data import _tokenized as reference

MARKS = [
    "<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>",
    "<|system|>", "<|end|>", "<|endoftext|>", "<think>", "</think>", "<|Assistant|>", "<|User|>",
]  # fmt: skip
TEXTS = [
    "Hello world, says Ada.",
    " two  spaces\n\nand lines\t",
    "ünïcode 漢字 🙂",
    "<s> inside </s> text",
    " ".join(map(str, range(100))),
]


def trained(model: Any = None, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model or models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=MARKS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, __doc__ or ""] * 3, trainer)
    return tokenizer


BASE = trained()
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def folder_of(
    where: Path, config: dict[str, Any] | None = None, change: Callable[[dict[str, Any]], None] | None = None,
    files: dict[str, Any] | None = None, base: Tokenizer = BASE,
) -> Path:  # fmt: skip
    where.mkdir(parents=True, exist_ok=True)
    content = json.loads(base.to_str())
    if change:
        change(content)
    (where / "tokenizer.json").write_text(json.dumps(content))
    for name, value in {"tokenizer_config.json": CONFIG if config is None else config, **(files or {})}.items():
        (where / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return where


def written(where: Path, name: str, *values: object) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    (where / name).write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values))
    return where / name


def ours(corpus: Path, tokenizer: Path, **choices: Any) -> list[tuple[list[int], list[int]]]:
    data = {"train_on": "completions" if choices.pop("completions", True) else "all", **choices}
    known = {key: value for key, value in data.items() if key in ("column", "split")}
    reader = tokens.Reader(
        Corpus(name=str(corpus), tokenizer=str(tokenizer), completions=data["train_on"] == "completions", **known)
    )
    documents = [(list(ids), list(mask)) for ids, mask in reader]
    if not reader.masked:
        documents = [(ids, []) for ids, _ in documents]
    job = {"assets": {"corpus": str(corpus), "tokenizer": str(tokenizer)}, "data": data}
    judged = [(ids, [int(part) for part in mask or ()]) for ids, mask in reference(job, 0)]
    assert judged == documents, f"the reference reads {judged[:1]}, and the run {documents[:1]}"
    return documents


def shaped(kind: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update({kind: values})


TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 3, "pad_type_id": 0,
    "pad_token": "<pad>",
}  # fmt: skip
BEGINS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
BOTH = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
NO_MARKS = {"tokenizer_class": "PreTrainedTokenizerFast"}
NEW = {"content": "<new>", "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}

# name → (folder_of's arguments, the BOS and EOS that AutoTokenizer or the model's config name)
TOKENIZERS: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "plain": ({}, "<s>", "</s>"),
    "truncation": ({"change": shaped("truncation", **TRUNCATION)}, "<s>", "</s>"),
    "padding": ({"change": shaped("padding", **PADDING)}, "<s>", "</s>"),
    "padding to the longest": ({"change": shaped("padding", **PADDING | {"strategy": "BatchLongest"})}, "<s>", "</s>"),
    "both": ({"change": lambda c: c.update(truncation=TRUNCATION, padding=PADDING)}, "<s>", "</s>"),
    "short model_max_length": ({"config": CONFIG | {"model_max_length": 4}}, "<s>", "</s>"),
    "begins by itself": ({"base": trained(post_processor=BEGINS)}, "<s>", "</s>"),
    "begins and ends by itself": ({"base": trained(post_processor=BOTH)}, "<s>", "</s>"),
    "special_tokens_map": ({"config": NO_MARKS, "files": {
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>"}}}, "<s>", "</s>"),
    "special_tokens_map of objects": ({"config": NO_MARKS, "files": {
        "special_tokens_map.json": {"eos_token": {"content": "</s>", "lstrip": True}}}}, None, "</s>"),
    "special_tokens_map against the config": ({"files": {
        "special_tokens_map.json": {"bos_token": "<pad>", "eos_token": "<s>"}}}, "<pad>", "<s>"),
    "added_tokens_decoder": ({"config": NO_MARKS | {"eos_token": "<new>", "added_tokens_decoder": {
        str(BASE.get_vocab_size()): NEW}}}, None, "<new>"),
    "EOS in config.json": ({"config": NO_MARKS, "files": {
        "config.json": {"model_type": "llama", "eos_token_id": 1}}}, None, "</s>"),
    "EOS in generation_config.json": ({"config": NO_MARKS, "files": {
        "generation_config.json": {"eos_token_id": [5, 1]}}}, None, "<|im_end|>"),
    "add_bos_token false": ({"config": CONFIG | {"add_bos_token": False}}, None, "</s>"),
    "add_bos_token true": ({"config": CONFIG | {"add_bos_token": True, "add_eos_token": True}}, "<s>", "</s>"),
    "null BOS": ({"config": CONFIG | {"bos_token": None}}, None, "</s>"),
    "BOS is EOS": ({"config": CONFIG | {"bos_token": "</s>"}}, "</s>", "</s>"),
    "no marks": ({"config": NO_MARKS}, None, None),
    "unknown class": ({"config": CONFIG | {"tokenizer_class": "FooTokenizer"}}, "<s>", "</s>"),
    "marks as objects": ({"config": CONFIG | {"eos_token": {"__type": "AddedToken", **NEW, "content": "</s>"}}},
                         "<s>", "</s>"),
    "BOS and EOS switched on": ({"config": CONFIG | {"add_bos_token": True, "add_eos_token": True}}, "<s>", "</s>"),
    "special tokens split": ({"config": CONFIG | {"split_special_tokens": True}}, "<s>", "</s>"),
    "EOS is the padding": ({"config": CONFIG | {"pad_token": "</s>"}}, "<s>", "</s>"),
    "an EOS that is added": ({"config": CONFIG | {"eos_token": "<|nope|>"}}, "<s>", "<|nope|>"),
    "a class that is unknown": ({"config": CONFIG | {"tokenizer_class": "MyTokenizer"}}, "<s>", "</s>"),
    "Llama's class": ({"config": CONFIG | {"tokenizer_class": "LlamaTokenizerFast"}}, "<s>", "</s>"),
    "Qwen's class": ({"config": CONFIG | {"tokenizer_class": "Qwen2Tokenizer"}}, "<s>", "</s>"),
    "lower case": ({"base": trained(normalizer=normalizers.Lowercase())}, "<s>", "</s>"),
    "NFKC and strip": ({"base": trained(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()]))},
                       "<s>", "</s>"),
    "prefix space": ({"base": trained(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))}, "<s>", "</s>"),
    "digits apart": ({"base": trained(pre_tokenizer=pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]))},
        "<s>", "</s>"),
}  # fmt: skip


def check_tokenizer(case: str, where: Path) -> None:
    arguments, begin, end = TOKENIZERS[case]
    folder = folder_of(where / "tokenizer", **arguments)
    corpus = written(where, "text.jsonl", *({"text": text} for text in TEXTS))
    authority = AutoTokenizer.from_pretrained(folder)
    for text, (ids, mask) in zip(TEXTS, ours(corpus, folder), strict=True):
        wanted = authority(text, truncation=False, padding=False)["input_ids"]
        assert len(wanted) > 2
        first, last = (None if mark is None else authority.convert_tokens_to_ids(mark) for mark in (begin, end))
        wanted = wanted if first is None or wanted[0] == first else [first, *wanted]
        wanted = wanted if last is None or wanted[-1] == last else [*wanted, last]
        assert (ids, mask) == (wanted, []), (text, ids, wanted)


TEMPLATES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("chat_templates.yaml").read_text(encoding="utf-8"))
ASKED, SAID = {"role": "user", "content": "How many <b>?"}, {"role": "assistant", "content": "Two, ünïcode 🙂."}
SYSTEM = {"role": "system", "content": "Be brief."}
CHATS = {
    "one turn": [ASKED, SAID],
    "several turns": [ASKED, SAID, {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Three."}],
    "a system prompt": [SYSTEM, ASKED, SAID],
    "no answer": [ASKED],
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "ä <b>", "parameters": {"type": "object"}}}]
CALLS = [
    ASKED, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": "ü"}}}]},
    {"role": "tool", "content": "3"}, SAID,
]  # fmt: skip


def check_template(case: str, where: Path) -> None:
    template, none = TEMPLATES[case], "{% if false %}{% endif %}"
    chats = [{"messages": chat} for chat in CHATS.values()]
    if "tools" in case:
        chats += [{"messages": CALLS, "tools": TOOLS}, {"messages": CALLS, "tools": json.dumps(TOOLS)}]
    corpus = written(where, "chats.jsonl", *chats)
    marked_text = template.replace("«", "{% generation %}").replace("»", "{% endgeneration %}")
    marked = folder_of(where / "marked", CONFIG | {"chat_template": marked_text})
    plain = folder_of(
        where / "plain", CONFIG, files={"chat_template.jinja": template.replace("«", none).replace("»", none)}
    )
    authority = AutoTokenizer.from_pretrained(marked)
    wanted = []
    for row in chats:
        encoded = authority.apply_chat_template(
            row["messages"],
            tools=TOOLS if "tools" in row else None,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        wanted.append((encoded["input_ids"], encoded["assistant_masks"]))
    assert all(sum(mask) > 0 for _, mask in wanted[:3])
    assert ours(corpus, marked) == wanted, "with markers"
    assert ours(corpus, plain) == wanted, f"without markers: {ours(corpus, plain)} {wanted}"
    assert ours(corpus, plain, completions=False) == [(ids, []) for ids, _ in wanted], "every token"


LINES = [{"text": text, "n": number} for number, text in enumerate(TEXTS)]
TEXT_BYTES = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES).encode()


def arrow(where: Path) -> None:
    with pa.OSFile(str(where), "wb") as file, pa.ipc.new_stream(file, pa.table({"text": TEXTS}).schema) as stream:
        stream.write_table(pa.table({"text": TEXTS}))


def table(delimiter: str) -> bytes:
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=delimiter)
    writer.writerows([["text", "n"], *([text, number] for number, text in enumerate(TEXTS))])
    return stream.getvalue().encode()


# name → a function that makes it, of ``text`` and its folder; the files, read by datasets itself, must say the same.
Maker = Callable[[Path], Any]
CORPORA: dict[str, tuple[str, Maker]] = {
    "lines": ("a.jsonl", lambda f: f.write_bytes(TEXT_BYTES)),
    "byte order mark": ("a.jsonl", lambda f: f.write_bytes(b"\xef\xbb\xbf" + TEXT_BYTES)),
    "CRLF and blank lines": ("a.jsonl", lambda f: f.write_bytes(TEXT_BYTES.replace(b"\n", b"\r\n"))),
    "no last newline": ("a.ndjson", lambda f: f.write_bytes(TEXT_BYTES.rstrip())),
    "a list": ("a.json", lambda f: f.write_text(json.dumps(LINES))),
    "an indented list": ("a.json", lambda f: f.write_text(json.dumps(LINES, indent=2, ensure_ascii=False))),
    "a list of texts": ("a.json", lambda f: f.write_text(json.dumps(TEXTS, indent=1))),
    "compressed table": ("a.csv.gz", lambda f: f.write_bytes(gzip.compress(table(",")))),
    "gzip": ("a.jsonl.gz", lambda f: f.write_bytes(gzip.compress(TEXT_BYTES))),
    "bzip2": ("a.jsonl.bz2", lambda f: f.write_bytes(bz2.compress(TEXT_BYTES))),
    "xz": ("a.jsonl.xz", lambda f: f.write_bytes(lzma.compress(TEXT_BYTES))),
    "zstd": ("a.jsonl.zst", lambda f: f.write_bytes(pa.compress(TEXT_BYTES, "zstd", asbytes=True))),
    "an upper-case suffix": ("A.JSONL", lambda f: f.write_bytes(TEXT_BYTES)),
    "gzip without its suffix": ("a.jsonl", lambda f: f.write_bytes(gzip.compress(TEXT_BYTES))),
    "two gzip members": ("a.jsonl.gz", lambda f: f.write_bytes(b"".join(map(gzip.compress, TEXT_BYTES.splitlines(True))))),
    "two zstd frames": ("a.jsonl.zst", lambda f: f.write_bytes(b"".join(
        pa.compress(line, "zstd", asbytes=True) for line in TEXT_BYTES.splitlines(True)))),
    "numbers beyond JSON": ("a.jsonl", lambda f: f.write_bytes(TEXT_BYTES.replace(b'"n": 1', b'"n": NaN'))),
    "Parquet of large strings": ("a.parquet", lambda f: write_table(
        pa.table({"text": pa.array(TEXTS, pa.large_string())}), f)),
    "Parquet of a dictionary": ("a.parquet", lambda f: write_table(
        pa.table({"text": pa.array(TEXTS).dictionary_encode()}), f)),
    "Parquet": ("a.parquet", lambda f: write_table(pa.table({"text": TEXTS, "n": range(5)}), f)),
    "Parquet by another name": ("a[1] b.parquet", lambda f: write_table(pa.table({"text": TEXTS}), f)),
    "CSV": ("a.csv", lambda f: f.write_bytes(table(","))),
    "TSV": ("a.tsv", lambda f: f.write_bytes(table("\t"))),
    "Arrow": ("a.arrow", arrow),
    "other columns in some rows": ("a.jsonl", lambda f: written(f.parent, f.name, *LINES[:2], *(
        line | {"more": [1, "a", {"k": None}]} for line in LINES[2:]))),
}  # fmt: skip


def check_corpus(case: str, where: Path) -> None:
    name, make = CORPORA[case]
    make(where / name)
    folder = folder_of(where / "tokenizer")
    wanted = [tokens_of[0] for tokens_of in ours(written(where, "wanted.jsonl", *LINES), folder)]
    assert [ids for ids, _ in ours(where / name, folder)] == wanted


def linked(where: Path) -> Path:
    folder = where / "data"
    written(folder, "a.jsonl", {"text": "a"})
    written(where / "elsewhere", "z.jsonl", {"text": "z"})
    for name, target in {"b.jsonl": "../elsewhere/z.jsonl", "c": "../elsewhere", "d": ".."}.items():
        (folder / name).symlink_to(target)
    return folder


def named(where: Path, *names: str) -> Path:
    for name in names:
        place = where / "data" / name
        written(place.parent, place.name, {"text": name})
    return where / "data"


# name → (folder, choice of a split, the files that are read in order)
FOLDERS: dict[str, tuple[Callable[[Path], Path], dict[str, str], list[str]]] = {
    "parts": (lambda w: named(w, "_part-1.jsonl", "part-0.jsonl", "_SUCCESS"), {}, ["_part-1.jsonl", "part-0.jsonl"]),
    "hidden files": (lambda w: named(w, ".part.crc", "a.jsonl", ".git/x.jsonl"), {}, ["a.jsonl"]),
    "a page beside": (lambda w: named(w, "README.md", "LICENSE", "a.jsonl"), {}, ["a.jsonl"]),
    "splits": (lambda w: named(w, "test.jsonl", "train.jsonl", "dev.jsonl"), {}, ["train.jsonl"]),
    "the test split": (lambda w: named(w, "test.jsonl", "train.jsonl"), {"split": "test"}, ["test.jsonl"]),
    "folders of splits": (lambda w: named(w, "train/a.jsonl", "test/a.jsonl"), {}, ["train/a.jsonl"]),
    "shards": (lambda w: named(w, "data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl",
                               "data/test-00000-of-00001.jsonl"), {},
               ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]),
    "words within words": (lambda w: named(w, "latest.jsonl", "restrained.jsonl"), {},
                           ["latest.jsonl", "restrained.jsonl"]),
    "words apart": (lambda w: named(w, "my_val.jsonl", "my_train-2.jsonl"), {}, ["my_train-2.jsonl"]),
    "one split": (lambda w: named(w, "validation.jsonl"), {}, ["validation.jsonl"]),
    "nested": (lambda w: named(w, "x/y/a.jsonl", "x/b.jsonl"), {}, ["x/b.jsonl", "x/y/a.jsonl"]),
}  # fmt: skip


def check_folder(case: str, where: Path) -> None:
    make, choice, wanted = FOLDERS[case]
    folder, tokenizer = make(where), folder_of(where / "tokenizer")
    authority = AutoTokenizer.from_pretrained(tokenizer)
    read = [authority.decode(ids[1:-1]) for ids, _ in ours(folder, tokenizer, **choice)]
    assert read == wanted, read
    if len(wanted) == 1 and case not in ("hidden files", "a page beside", "one split"):
        from datasets import load_dataset

        theirs = load_dataset(str(folder), split=choice.get("split", "train"), streaming=True)
        assert [row["text"] for row in theirs] == wanted, "datasets reads other files"


def check_links(_case: str, where: Path) -> None:
    corpus = Corpus(name=str(linked(where)))
    read = [row["text"] for _, row in rows(corpus, files_of(corpus))]
    assert read == ["a", "z", "z"] or sorted(set(read)) == ["a", "z"], read


ALPACA = {"instruction": "Add.", "input": "1 and 1", "output": "2"}
TURNS = [{"from": "human", "value": "How many <b>?"}, {"from": "gpt", "value": "Two, ünïcode 🙂."}]
COLUMNS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "messages": ({"messages": [ASKED, SAID], "id": 1}, [ASKED, SAID]),
    "conversations": ({"conversations": TURNS}, [ASKED, SAID]),
    "conversations with a system prompt": ({"conversations": TURNS, "system": "Be brief."}, [SYSTEM, ASKED, SAID]),
    "chats under another name": ({"dialog": [ASKED, SAID]}, [ASKED, SAID]),
    "a prompt and a completion of messages": ({"prompt": [ASKED], "completion": [SAID]}, [ASKED, SAID]),
    "Alpaca": (ALPACA, [{"role": "user", "content": "Add.\n1 and 1"}, {"role": "assistant", "content": "2"}]),
    "Alpaca with a history": (ALPACA | {"history": [[ASKED["content"], SAID["content"]]]}, [
        ASKED, SAID, {"role": "user", "content": "Add.\n1 and 1"}, {"role": "assistant", "content": "2"}]),
    "two questions, two answers, a system message in the middle": (
        {"messages": [ASKED, ASKED, SAID, SAID, SYSTEM, ASKED, SAID]}, [ASKED, ASKED, SAID, SAID, SYSTEM, ASKED, SAID]),
    "an answer like its question": (
        {"messages": [ASKED, {"role": "assistant", "content": ASKED["content"]}] * 2},
        [ASKED, {"role": "assistant", "content": ASKED["content"]}] * 2),
    "words of templates and special tokens": (
        {"messages": [{"role": "user", "content": "{{ x }} {% generation %}<|im_end|>\n<|im_start|>assistant\n"}, SAID]},
        [{"role": "user", "content": "{{ x }} {% generation %}<|im_end|>\n<|im_start|>assistant\n"}, SAID]),
    "ShareGPT with a system turn": ({"conversations": [{"from": "system", "value": "Be brief."}, *TURNS]},
                                    [SYSTEM, ASKED, SAID]),
    "Alpaca without input": (ALPACA | {"input": ""},
                             [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "2"}]),
}  # fmt: skip


def check_columns(case: str, where: Path) -> None:
    row, messages = COLUMNS[case]
    text = TEMPLATES["chatml"].replace("«", "{% generation %}").replace("»", "{% endgeneration %}")
    tokenizer = folder_of(where / "tokenizer", CONFIG | {"chat_template": text})
    encoded = AutoTokenizer.from_pretrained(tokenizer).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    choice = {"column": "dialog"} if "dialog" in row else {}
    read = ours(written(where, "rows.jsonl", row, row), tokenizer, **choice)
    assert read == [(encoded["input_ids"], encoded["assistant_masks"])] * 2, read


def check_answers(case: str, where: Path) -> None:
    """Only the completion is trained, and its end."""
    row = {"prompt": "One and one is", "completion": " two."} if case == "texts" else ALPACA
    tokenizer = folder_of(where / "tokenizer")
    authority = AutoTokenizer.from_pretrained(tokenizer)
    ((ids, mask),) = ours(written(where, "rows.jsonl", row), tokenizer)
    trained_ids = [number for number, part in zip(ids, mask, strict=True) if part]
    assert authority.decode(trained_ids) == (" two.</s>" if case == "texts" else "2</s>")
    ((whole, _),) = ours(written(where, "rows.jsonl", row), tokenizer, completions=False)
    assert whole == ids


def made(name: str, content: bytes) -> Maker:
    def make(where: Path) -> Path:
        (where / name).write_bytes(content)
        return where / name

    return make


def row_file(*values: object) -> Maker:
    return lambda where: written(where, "a.jsonl", *values)


def tokenizer_with(**files: Any) -> Maker:
    return lambda where: folder_of(where / "other", files=files)


BAD_TEMPLATE = {"chat_template.jinja": "{% for m in messages %}{{ m.content }}"}
NO_PREFIX = {"chat_template.jinja": "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"}
CONTENTS = "{% for m in messages %}{{ m.content }}{{ '\\n' }}{% endfor %}"
REFUSES = {"chat_template.jinja": "{{ raise_exception('roles must alternate') }}"}
# name → (corpus, tokenizer or None, choices, the place, words of the sentence)
REFUSED: dict[str, tuple[Maker, Maker | None, dict[str, Any], str, str]] = {
    "a zip archive": (made("a.jsonl", b"PK\x03\x04rest"), None, {}, "a.jsonl", "zip"),
    "broken Parquet": (made("a.parquet", b"PAR1rest"), None, {}, "a.parquet", "cannot be read"),
    "null in Parquet": (lambda w: (write_table(pa.table({"text": ["a", None]}), w / "a.parquet"), w / "a.parquet")[1],
                        None, {}, "row 2", "found null"),
    "a list per line": (made("a.jsonl", b'["a"]\n["b"]\n'), None, {}, "a.jsonl:2:1", "one JSON list"),
    "no text": (made("a.jsonl", b""), None, {}, "a.jsonl", "contains no text"),
    "a link that leads nowhere": (lambda w: (named(w, "a.jsonl"), (w / "data/b.jsonl").symlink_to("gone"))[0], None, {},
                                  "b.jsonl", "leads nowhere"),
    "two forms": (lambda w: named(w, "a.jsonl", "b.txt"), None, {}, "data", "files of one form"),
    "a file of no split": (lambda w: named(w, "train.jsonl", "test.jsonl", "extra.jsonl"), None, {}, "data",
                           "extra.jsonl belongs to no split"),
    "two splits, none to train": (lambda w: named(w, "dev.jsonl", "test.jsonl"), None, {}, "data", "has no split train"),
    "a split that is not there": (lambda w: named(w, "train.jsonl"), None, {"split": "test"}, "data", "no split test"),
    "a split of one file": (row_file({"text": "a"}), None, {"split": "test"}, "a.jsonl", "one file"),
    "an empty folder": (lambda w: (w / "data").mkdir() or w / "data", None, {}, "data", "no files"),
    "a column less": (row_file({"text": "a"}, {"body": "a"}), None, {}, "a.jsonl:2", "found body"),
    "a number": (row_file({"text": 7}), None, {}, "a.jsonl:1", "found 7"),
    "an unknown sender": (row_file({"conversations": [{"from": "ghost", "value": "a"}]}), None, {}, "a.jsonl:1",
                          "role and content"),
    "tools that are no JSON": (row_file({"messages": [ASKED, SAID], "tools": "[oops"}), None, {}, "a.jsonl:1", "tools"),
    "no template": (row_file({"messages": [ASKED, SAID]}), None, {}, "a.jsonl:1", "no chat template"),
    "a template that does not end": (row_file({"messages": [ASKED, SAID]}), tokenizer_with(**BAD_TEMPLATE), {},
                                     "a.jsonl:1", "refuses the messages"),
    "a template that refuses": (row_file({"messages": [ASKED, SAID]}), tokenizer_with(**REFUSES), {}, "a.jsonl:1",
                                "roles must alternate"),
    "a beginning that changes": (row_file({"messages": [ASKED, SAID]}), tokenizer_with(**NO_PREFIX), {}, "a.jsonl:1",
                                 "cannot be told from the rest"),
    "a broken tokenizer": (row_file({"text": "a"}), tokenizer_with(**{"tokenizer.json": "{oops"}), {}, "other",
                           "cannot be loaded"),
    "a tokenizer with its own code": (row_file({"text": "a"}), tokenizer_with(**{"tokenizer_config.json": {
        "tokenizer_class": "Foo", "auto_map": {"AutoTokenizer": ["foo.Foo", None]}}}), {}, "other", "custom code"),
    "tools that the template leaves out": (row_file({"messages": [ASKED, SAID], "tools": TOOLS}), tokenizer_with(
        **{"chat_template.jinja": CONTENTS}), {}, "a.jsonl:1", "leaves out the tool 'add'"),
    "calls that the template leaves out": (row_file({"messages": CALLS}), tokenizer_with(
        **{"chat_template.jinja": CONTENTS}), {}, "a.jsonl:1", "leaves out the tool 'add'"),
    "parts that the template shows as Python": (
        row_file({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, SAID]}),
        tokenizer_with(**{"chat_template.jinja": CONTENTS}), {}, "a.jsonl:1", "no text, [{"),
    "an answer that is null": (row_file({"messages": [ASKED, {"role": "assistant", "content": None}]}), None, {},
                               "a.jsonl:1", "role and content"),
    "a weight of a half": (row_file({"messages": [ASKED, SAID | {"weight": 0.5}]}), None, {}, "a.jsonl:1", "0.5"),
    "a history that is no list of pairs": (row_file(ALPACA | {"history": ["a"]}), None, {}, "a.jsonl:1", "history"),
    "messages stored as text": (row_file({"messages": json.dumps([ASKED, SAID])}), None, {}, "a.jsonl:1", "in 'messages'"),
    "preferences": (row_file({"prompt": "q", "chosen": "a", "rejected": "b"}), None, {}, "a.jsonl:1", "prompt, chosen"),
    "two objects on a line": (made("a.jsonl", b'{"text": "a"}{"text": "b"}'), None, {}, "a.jsonl:1:14", "one JSON object"),
    "a lone surrogate": (made("a.jsonl", b'{"text": "a\\ud83d"}'), None, {}, "a.jsonl:1", "lone surrogate"),
    "latin-1": (made("a.jsonl", '{"text": "ü"}'.encode("latin-1")), None, {}, "a.jsonl:1", "the byte 0xfc"),
    "a cut gzip file": (made("a.jsonl.gz", gzip.compress(TEXT_BYTES)[:-9]), None, {}, "a.jsonl.gz", "cannot be read"),
    "a word that pandas reads as null": (made("a.csv", b"text,n\nNA,1\n"), None, {}, "row 1", "found null"),
    "bytes in Parquet": (lambda w: (write_table(pa.table({"text": [b"a"]}), w / "a.parquet"), w / "a.parquet")[1],
                         None, {}, "row 1", "b'a'"),
    "an EOS that is no token": (row_file({"text": "a"}), lambda w: folder_of(w / "other", NO_MARKS, files={
        "config.json": {"model_type": "llama", "eos_token_id": 9999}}), {}, "config.json: eos_token_id", "no token"),
    "an unsafe template": (row_file({"messages": [ASKED, SAID]}), tokenizer_with(
        **{"chat_template.jinja": "{{ ''.__class__.__mro__ }}"}), {}, "a.jsonl:1", "unsafe"),
    "an empty tokenizer": (row_file({"text": "a"}), lambda w: (w / "none").mkdir() or w / "none", {}, "none",
                           "cannot be loaded"),
}  # fmt: skip


def check_refused(case: str, where: Path) -> None:
    make, tokenizer, choices, place, words = REFUSED[case]
    folder = tokenizer(where) if tokenizer else folder_of(where / "tokenizer")
    corpus = make(where)
    try:
        reader = tokens.Reader(Corpus(name=str(corpus), tokenizer=str(folder), **choices))
        tokens.write(reader, where, progress=print)
    except InputError as error:
        assert place in str(error.where), (error.where, place)
        assert words in str(error), error
    else:
        raise AssertionError("it was read")


def check_a_prompt_is_not_trained(_case: str, where: Path) -> None:
    """The assistant's turns of a prompt are not, those of its completion are."""
    row = {"prompt": CHATS["several turns"][:3], "completion": CHATS["several turns"][3:]}
    document = document_of(row, layout_of(row, None, ""), "")
    for markers in (("", ""), ("{% generation %}", "{% endgeneration %}")):
        text = TEMPLATES["chatml"].replace("«", markers[0]).replace("»", markers[1])
        encoder = tokens.Encoder(str(folder_of(where / f"of {len(markers[0])}", CONFIG | {"chat_template": text})))
        ids, mask = encoder.document(document, "")
        said = encoder.tokenizer.decode([number for number, part in zip(ids, mask, strict=True) if part])
        assert said == "Three.<|im_end|>\n", said


def check_a_turn_that_is_not_trained(case: str, where: Path) -> None:
    """As in axolotl and Mistral's own trainer: ``weight`` 0, or ``train`` false, on a message."""
    key, value = case.split()
    chat = [dict(turn) for turn in CHATS["several turns"]]
    chat[1][key] = json.loads(value)
    names = {"user": "human", "assistant": "gpt"}
    share = [{"from": names[turn["role"]], "value": turn["content"], **{key: turn.get(key, 1)}} for turn in chat]
    for number, row in enumerate(({"messages": chat}, {"conversations": share})):
        for markers in (("", ""), ("{% generation %}", "{% endgeneration %}")):
            text = TEMPLATES["chatml"].replace("«", markers[0]).replace("»", markers[1])
            folder = folder_of(where / f"{number} {len(markers[0])}", CONFIG | {"chat_template": text})
            ((ids, mask),) = ours(written(where, "rows.jsonl", row), folder)
            said = AutoTokenizer.from_pretrained(folder).decode([n for n, part in zip(ids, mask, strict=True) if part])
            assert said == "Three.<|im_end|>\n", said


def check_nulls_of_a_table(_case: str, where: Path) -> None:
    """Parquet adds a null for every key that another message has; templates ask whether a key exists."""
    rows_of = [{"messages": CHATS["one turn"], "tools": None}, {"messages": CALLS, "tools": TOOLS}]
    write_table(pa.Table.from_pylist(rows_of), where / "rows.parquet")
    text = "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{{ m.tool_calls[0].function.name }}"
    text += "{% else %}{{ m.content }}{{ '\\n' }}{% endif %}{% endfor %}{{ tools | tojson if tools else '' }}"
    folder = folder_of(where / "tokenizer", CONFIG | {"chat_template": text})
    plain = [{"messages": CHATS["one turn"]}, {"messages": CALLS, "tools": TOOLS}]
    wanted = ours(written(where, "rows.jsonl", *plain), folder, completions=False)
    assert ours(where / "rows.parquet", folder, completions=False) == wanted


def check_no_torch(_case: str, where: Path) -> None:
    """The command that starts a run tokenizes, and must not wait for torch."""
    code = "import sys; from primus.training.tokens import Encoder, without_torch; without_torch(); "
    code += f"Encoder({str(folder_of(where / 'tokenizer', CONFIG))!r}); assert 'torch' not in sys.modules"
    subprocess.run(["env", sys.executable, "-c", code], check=True)


try_all((
    (check_no_torch, ["here"]), (check_tokenizer, TOKENIZERS), (check_template, TEMPLATES), (check_corpus, CORPORA), (check_folder, FOLDERS),
    (check_links, ["links"]), (check_columns, COLUMNS), (check_answers, ["texts", "Alpaca"]),
    (check_refused, REFUSED),
    (check_a_turn_that_is_not_trained, ["weight 0", "train false", "loss false", "trainable false"]), (check_nulls_of_a_table, ["null"]), (check_a_prompt_is_not_trained, ["prompt"]),
))  # fmt: skip
