"""Run by Python with torch. Odd tokenizers, chat templates, corpora and columns, each compared with
transformers, tokenizers or datasets themselves: the same tokens and the same mask, or an InputError
that names file and field.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import yaml
from cases import try_all
from pyarrow.parquet import write_table
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

from primus_images.errors import InputError
from primus_images.training.judge.reference.data import _tokenized as reference
from primus_images.training.text import tokens
from primus_images.training.text.corpus import Corpus, files_of, pieces
from primus_images.training.text.document import document_of, layout_of
from primus_images.training.text.encoder import Encoder

TABLE: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
MARKS, CONFIG, TEXTS = (
    TABLE["special tokens"],
    TABLE["config"],
    [*TABLE["texts"], " ".join(map(str, range(100)))],
)


def trained(model: Any = None, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model or models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, __doc__ or ""] * 3, trainer)
    return tokenizer


BASE = trained()


def folder_of(
    where: Path,
    config: dict[str, Any] | None = None,
    content: dict[str, Any] | None = None,
    files: dict[str, Any] | None = None,
    base: Tokenizer = BASE,
) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    (where / "tokenizer.json").write_text(json.dumps(json.loads(base.to_str()) | (content or {})))
    for name, value in {
        "tokenizer_config.json": CONFIG if config is None else config,
        **(files or {}),
    }.items():
        (where / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return where


def written(where: Path, name: str, *values: object) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    (where / name).write_text(
        "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    )
    return where / name


def ours(corpus: Path, tokenizer: Path, **choices: Any) -> list[tuple[list[int], list[int]]]:
    template = choices.pop("template", None)
    data = {"train_on": "completions" if choices.pop("completions", True) else "all", **choices}
    known = {
        key: value
        for key, value in data.items()
        if key in ("column", "split", "question", "answer")
    }
    reader = tokens.Reader(
        Corpus(
            name=str(corpus),
            tokenizer=str(tokenizer),
            completions=data["train_on"] == "completions",
            template=template,
            **known,
        )
    )
    documents = [(list(ids), list(mask)) for ids, mask in reader]
    if not reader.masked:
        documents = [(ids, []) for ids, _ in documents]
    assets = {"corpus": str(corpus), "tokenizer": str(tokenizer)}
    if template:
        assets["chat_template"] = str(template)
    job = {"assets": assets, "data": data}
    judged = [(read.tokens, list(map(int, read.trained or ()))) for read in reference(job)]
    assert judged == documents, f"the reference reads {judged[:1]}, and the run {documents[:1]}"
    return documents


def rows_of(corpus: Corpus) -> list[Any]:
    found = []
    for piece in pieces(corpus, files_of(corpus)):
        found += [row for _, row in piece.rows()]
    return found


BEGINS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
BOTH = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
TOKENIZERS = {
    "begins by itself": trained(post_processor=BEGINS),
    "begins and ends by itself": trained(post_processor=BOTH),
    "lower case": trained(normalizer=normalizers.Lowercase()),
    "NFKC and strip": trained(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    ),
    "prefix space": trained(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits apart": trained(
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    ),
}


def check_tokenizer(case: str, where: Path) -> None:
    row = json.loads(
        json.dumps(TABLE["tokenizers"][case]).replace('"next"', f'"{BASE.get_vocab_size()}"')
    )
    begin, end = row.pop("marks", ("<s>", "</s>"))
    folder = folder_of(where / "tokenizer", base=TOKENIZERS.get(case, BASE), **row)
    corpus = written(where, "text.jsonl", *({"text": text} for text in TEXTS))
    authority = AutoTokenizer.from_pretrained(folder)
    for text, (ids, mask) in zip(TEXTS, ours(corpus, folder), strict=True):
        wanted = authority(text, truncation=False, padding=False)["input_ids"]
        assert len(wanted) > 2
        first, last = (
            None if mark is None else authority.convert_tokens_to_ids(mark) for mark in (begin, end)
        )
        wanted = wanted if first is None or wanted[0] == first else [first, *wanted]
        wanted = wanted if last is None or wanted[-1] == last else [*wanted, last]
        assert (ids, mask) == (wanted, []), (text, ids, wanted)


TEMPLATES: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("chat_templates.yaml").read_text(encoding="utf-8")
)
ASKED, SAID, TOOLS, CALLS, ALPACA, CHATS = (
    TABLE[key] for key in ("asked", "said", "tools", "calls", "alpaca", "chats")
)


def check_template(case: str, where: Path) -> None:
    template, none = TEMPLATES[case], "{% if false %}{% endif %}"
    chats = [{"messages": chat} for chat in CHATS.values()]
    if "tools" in case:
        chats += [
            {"messages": CALLS, "tools": TOOLS},
            {"messages": CALLS, "tools": json.dumps(TOOLS)},
        ]
    corpus = written(where, "chats.jsonl", *chats)
    marked_text = template.replace("«", "{% generation %}").replace("»", "{% endgeneration %}")
    marked = folder_of(where / "marked", CONFIG | {"chat_template": marked_text})
    plain = folder_of(
        where / "plain",
        CONFIG,
        files={"chat_template.jinja": template.replace("«", none).replace("»", none)},
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
    other = folder_of(where / "other", CONFIG | {"chat_template": "another"})
    file = plain / "chat_template.jinja"
    assert ours(corpus, other, template=file) == wanted, "of a file"


# name → a template that takes a rare form alone, a chat, and its rare form.
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
FORMS: dict[str, tuple[str, list[Any], list[Any]]] = {
    "parts of lists": (
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
        "{% endfor %}",
        [ASKED, SAID],
        [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in (ASKED, SAID)],
    ),
    "JSON text": (
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}",
        *(
            [ASKED, CALL | {"tool_calls": [{"function": {"name": "add", "arguments": form}}]}]
            for form in ({"a": "ü"}, '{"a": "ü"}')
        ),
    ),
}


def check_form(case: str, where: Path) -> None:
    words, chat, rare = FORMS[case]
    template = (
        "{% for m in messages %}<|{{ m.role }}|>" + words + "<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    corpus = written(where, "chats.jsonl", {"messages": chat})
    folder = folder_of(where / "w", CONFIG, files={"chat_template.jinja": template})
    wanted = AutoTokenizer.from_pretrained(folder).apply_chat_template(rare, return_dict=True)
    ((ids, mask),) = ours(corpus, folder)
    assert ids == wanted["input_ids"]
    assert sum(mask) > 1


LINES = [{"text": text, "n": number} for number, text in enumerate(TEXTS)]
TEXT_BYTES = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES).encode()


def arrow(where: Path) -> None:
    with (
        pa.OSFile(str(where), "wb") as file,
        pa.ipc.new_stream(file, pa.table({"text": TEXTS}).schema) as stream,
    ):
        stream.write_table(pa.table({"text": TEXTS}))


def table(delimiter: str) -> bytes:
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=delimiter)
    writer.writerows([["text", "n"], *([text, number] for number, text in enumerate(TEXTS))])
    return stream.getvalue().encode()


# name → a function that makes it, of ``text`` and its folder; the files, read by datasets itself,
# must say the same.
Maker = Callable[[Path], Any]
CORPORA: dict[str, tuple[str, Maker]] = {
    "lines": ("a.jsonl", lambda f: f.write_bytes(TEXT_BYTES)),
    "byte order mark": ("a.jsonl", lambda f: f.write_bytes(b"\xef\xbb\xbf" + TEXT_BYTES)),
    "CRLF and blank lines": (
        "a.jsonl",
        lambda f: f.write_bytes(TEXT_BYTES.replace(b"\n", b"\r\n")),
    ),
    "no last newline": ("a.ndjson", lambda f: f.write_bytes(TEXT_BYTES.rstrip())),
    "a list": ("a.json", lambda f: f.write_text(json.dumps(LINES))),
    "an indented list": (
        "a.json",
        lambda f: f.write_text(json.dumps(LINES, indent=2, ensure_ascii=False)),
    ),
    "a list of texts": ("a.json", lambda f: f.write_text(json.dumps(TEXTS, indent=1))),
    "compressed table": ("a.csv.gz", lambda f: f.write_bytes(gzip.compress(table(",")))),
    "gzip": ("a.jsonl.gz", lambda f: f.write_bytes(gzip.compress(TEXT_BYTES))),
    "bzip2": ("a.jsonl.bz2", lambda f: f.write_bytes(bz2.compress(TEXT_BYTES))),
    "xz": ("a.jsonl.xz", lambda f: f.write_bytes(lzma.compress(TEXT_BYTES))),
    "zstd": ("a.jsonl.zst", lambda f: f.write_bytes(pa.compress(TEXT_BYTES, "zstd", asbytes=True))),
    "an upper-case suffix": ("A.JSONL", lambda f: f.write_bytes(TEXT_BYTES)),
    "gzip without its suffix": ("a.jsonl", lambda f: f.write_bytes(gzip.compress(TEXT_BYTES))),
    "two gzip members": (
        "a.jsonl.gz",
        lambda f: f.write_bytes(b"".join(map(gzip.compress, TEXT_BYTES.splitlines(True)))),
    ),
    "two zstd frames": (
        "a.jsonl.zst",
        lambda f: f.write_bytes(
            b"".join(
                pa.compress(line, "zstd", asbytes=True) for line in TEXT_BYTES.splitlines(True)
            )
        ),
    ),
    "numbers beyond JSON": (
        "a.jsonl",
        lambda f: f.write_bytes(TEXT_BYTES.replace(b'"n": 1', b'"n": NaN')),
    ),
    "Parquet of large strings": (
        "a.parquet",
        lambda f: write_table(pa.table({"text": pa.array(TEXTS, pa.large_string())}), f),
    ),
    "Parquet of a dictionary": (
        "a.parquet",
        lambda f: write_table(pa.table({"text": pa.array(TEXTS).dictionary_encode()}), f),
    ),
    "Parquet": ("a.parquet", lambda f: write_table(pa.table({"text": TEXTS, "n": range(5)}), f)),
    "Parquet by another name": (
        "a[1] b.parquet",
        lambda f: write_table(pa.table({"text": TEXTS}), f),
    ),
    "CSV": ("a.csv", lambda f: f.write_bytes(table(","))),
    "TSV": ("a.tsv", lambda f: f.write_bytes(table("\t"))),
    "Arrow": ("a.arrow", arrow),
    "other columns in some rows": (
        "a.jsonl",
        lambda f: written(
            f.parent,
            f.name,
            *LINES[:2],
            *(line | {"more": [1, "a", {"k": None}]} for line in LINES[2:]),
        ),
    ),
}


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


def named(where: Path, *names: str, card: str = "") -> Path:
    for name in names:
        place = where / "data" / name
        written(place.parent, place.name, {"text": name})
    if card:
        (where / "data/README.md").write_text(f"---\n{card}---\n# About\n")
    return where / "data"


def check_folder(case: str, where: Path) -> None:
    row = TABLE["folders"][case]
    folder, tokenizer = (
        named(where, *row["names"], card=row.get("card", "")),
        folder_of(where / "tokenizer"),
    )
    split = row.get("split")
    authority = AutoTokenizer.from_pretrained(tokenizer)
    read = [
        authority.decode(ids[1:-1])
        for ids, _ in ours(folder, tokenizer, **({"split": split} if split else {}))
    ]
    assert read == row["reads"], read
    if row.get("datasets"):
        from datasets import load_dataset

        theirs = load_dataset(str(folder), split=split or "train", streaming=True)
        assert [line["text"] for line in theirs] == read, "datasets reads other files"


def check_links(_case: str, where: Path) -> None:
    corpus = Corpus(name=str(linked(where)))
    read = [row["text"] for row in rows_of(corpus)]
    assert read == ["a", "z", "z"] or sorted(set(read)) == ["a", "z"], read


def check_columns(case: str, where: Path) -> None:
    row, messages = TABLE["columns"][case]
    text = TEMPLATES["qwen2.5 with tools"]
    text = text.replace("«", "{% generation %}").replace("»", "{% endgeneration %}")
    tokenizer = folder_of(where / "tokenizer", CONFIG | {"chat_template": text})
    encoded = AutoTokenizer.from_pretrained(tokenizer).apply_chat_template(
        messages,
        tools=row.get("tools") or None,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    choice = {"column": "dialog"} if "dialog" in row else {}
    if "asked" in row:
        choice = {"question": "asked", "answer": "said"}
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


def cut_gzip(where: Path) -> Path:
    (where / "a.jsonl.gz").write_bytes(gzip.compress(TEXT_BYTES)[:-9])
    return where / "a.jsonl.gz"


def parquet(*values: object) -> Callable[[Path], Path]:
    def make(where: Path) -> Path:
        write_table(pa.table({"text": values}), where / "a.parquet")
        return where / "a.parquet"

    return make


def broken_link(where: Path) -> Path:
    (named(where, "a.jsonl") / "b.jsonl").symlink_to("gone")
    return where / "data"


CORPORA_REFUSED = {
    "null in Parquet": parquet("a", None),
    "bytes in Parquet": parquet(b"a"),
    "no rows in Parquet": parquet(),
    "a cut gzip file": cut_gzip,
    "a link that leads nowhere": broken_link,
    "an empty folder": lambda where: Path(mkdtemp(dir=where, prefix="data")),
}


def corpus_of(case: str, row: dict[str, Any], where: Path) -> Path:
    if case in CORPORA_REFUSED:
        return CORPORA_REFUSED[case](where)
    if "names" in row:
        return named(where, *row["names"], card=row.get("card", ""))
    if "rows" in row:
        return written(where, "a.jsonl", *row["rows"])
    name, text = row["file"]
    (where / name).write_bytes(text.encode("latin-1"))
    return where / name


def check_refused(case: str, where: Path) -> None:
    row = TABLE["refused"][case]
    folder = where / "other"
    if row.get("tokenizer", {}) is None:
        folder.mkdir()
        if case == "a tokenizer of another form":
            (folder / "tokenizer.model").write_bytes(b"\n\x0c\n\x05<unk>")
    else:
        folder_of(folder, files=row.get("tokenizer"))
    corpus = Corpus(
        name=str(corpus_of(case, row, where)), tokenizer=str(folder), split=row.get("split")
    )
    try:
        tokens.write(tokens.Reader(corpus), where, progress=print)
    except InputError as error:
        assert row["place"] in str(error.where), error.where
        assert row["words"] in str(error), error
    else:
        raise AssertionError("it was read")


def check_a_prompt_is_not_trained(_case: str, where: Path) -> None:
    """The assistant's turns of a prompt are not, those of its completion are."""
    row = {"prompt": CHATS["several turns"][:3], "completion": CHATS["several turns"][3:]}
    document = document_of(row, layout_of(row, None, ""), "")
    for markers in (("", ""), ("{% generation %}", "{% endgeneration %}")):
        text = TEMPLATES["chatml"].replace("«", markers[0]).replace("»", markers[1])
        encoder = Encoder(
            str(folder_of(where / f"of {len(markers[0])}", CONFIG | {"chat_template": text}))
        )
        ids, mask = encoder.document(document, "")
        said = encoder.tokenizer.decode(
            [number for number, part in zip(ids, mask, strict=True) if part]
        )
        assert said == "Three.<|im_end|>\n", said


def check_a_turn_that_is_not_trained(case: str, where: Path) -> None:
    """As in axolotl and Mistral's own trainer: ``weight`` 0, or ``train`` false, on a message."""
    key, value = case.split()
    chat = [dict(turn) for turn in CHATS["several turns"]]
    chat[1][key] = json.loads(value)
    names = {"user": "human", "assistant": "gpt"}
    share = [
        {"from": names[turn["role"]], "value": turn["content"], **{key: turn.get(key, 1)}}
        for turn in chat
    ]
    marked = (
        TEMPLATES["chatml"].replace("«", "{% generation %}").replace("»", "{% endgeneration %}")
    )
    content = "{% generation %}{{ m.content }}{% endgeneration %}"
    words = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A"
        + content
        + "<|im_end|>{% else %}U{{ m.content }}"
    )
    templates = {
        TEMPLATES["chatml"].replace("«", "").replace("»", ""): "Three.<|im_end|>\n",
        marked: "Three.<|im_end|>\n",
        words + "{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}": "Three.",
    }
    for row, (text, trained) in product(
        ({"messages": chat}, {"conversations": share}), templates.items()
    ):
        folder = folder_of(Path(mkdtemp(dir=where)), CONFIG | {"chat_template": text})
        ((ids, mask),) = ours(written(where, "rows.jsonl", row), folder)
        said = AutoTokenizer.from_pretrained(folder).decode(
            [n for n, part in zip(ids, mask, strict=True) if part]
        )
        assert said == trained, said


def check_nulls_of_a_table(_case: str, where: Path) -> None:
    """Parquet adds a null for every key that another message has; templates ask whether a key
    exists.
    """
    rows_of = [{"messages": CHATS["one turn"], "tools": None}, {"messages": CALLS, "tools": TOOLS}]
    write_table(pa.Table.from_pylist(rows_of), where / "rows.parquet")
    text = (
        "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{{ "
        "m.tool_calls | tojson }}"
    )
    text += (
        "{% else %}{{ m.content }}{{ '\\n' }}{% endif %}{% endfor %}{{ tools | tojson if "
        "tools else '' }}"
    )
    folder = folder_of(where / "tokenizer", CONFIG | {"chat_template": text})
    plain = [{"messages": CHATS["one turn"]}, {"messages": CALLS, "tools": TOOLS}]
    wanted = ours(written(where, "rows.jsonl", *plain), folder, completions=False)
    assert ours(where / "rows.parquet", folder, completions=False) == wanted


def check_nulls_that_were_written(case: str, where: Path) -> None:
    """A key that is null in every row of a table, or in its JSON, is no key that the table adds."""
    from datasets import Dataset, Features, Json, List, Value

    parameters = {"a": {"type": "integer", "default": None}, "b": {"type": "string"}}
    tools = [{"function": {"name": "add", "parameters": {"properties": parameters}}}]
    row = {"messages": CHATS["one turn"], "tools": tools}
    if case == "JSON":
        turn = {"role": Value("string"), "content": Value("string")}
        kinds = Features({"messages": List(turn), "tools": List(Json())})
        Dataset.from_list([row], features=kinds).to_parquet(where / "rows.parquet")
    else:
        write_table(pa.Table.from_pylist([row]), where / "rows.parquet")
    text = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = folder_of(where / "tokenizer", CONFIG | {"chat_template": text})
    wanted = ours(written(where, "rows.jsonl", row), folder, completions=False)
    assert ours(where / "rows.parquet", folder, completions=False) == wanted


def check_line_ends(case: str, where: Path) -> None:
    """``datasets`` reads every end of a line as \\n."""
    from datasets import load_dataset

    end = {"LF": "\n", "CRLF": "\r\n", "CR": "\r"}[case]
    text = end.join(["one two", "three", "", "", "four", " five ", "", "six", ""])
    (where / "a.txt").write_bytes(text.encode())
    corpus = Corpus(name=str(where / "a.txt"))
    read = [row["text"] for row in rows_of(corpus)]
    assert read == ["one two\nthree", "four\n five ", "six"], read
    lines = load_dataset("text", data_files=str(where / "a.txt"), split="train", streaming=True)
    theirs = [line["text"] for line in lines if line["text"]]
    assert "\n".join(theirs) == "\n".join(read), theirs
    ours(where / "a.txt", folder_of(where / "tokenizer"))


def check_no_torch(_case: str, where: Path) -> None:
    """The command that starts a run tokenizes, and must not wait for torch."""
    code = (
        "import sys; from primus_images.training.text.encoder import Encoder, without_torch; "
        "without_torch(); "
    )
    code += (
        f"Encoder({str(folder_of(where / 'tokenizer', CONFIG))!r}); assert 'torch' not in "
        "sys.modules"
    )
    subprocess.run(["env", sys.executable, "-c", code], check=True)


try_all(
    (
        (check_no_torch, ["here"]),
        (check_tokenizer, TABLE["tokenizers"]),
        (check_template, TEMPLATES),
        (check_form, FORMS),
        (check_corpus, CORPORA),
        (check_folder, TABLE["folders"]),
        (check_links, ["links"]),
        (check_columns, TABLE["columns"]),
        (check_answers, ["texts", "Alpaca"]),
        (check_refused, TABLE["refused"]),
        (
            check_a_turn_that_is_not_trained,
            ["weight 0", "train false", "loss false", "trainable false"],
        ),
        (check_nulls_of_a_table, ["null"]),
        (check_nulls_that_were_written, ["null", "JSON"]),
        (check_line_ends, ["LF", "CRLF", "CR"]),
        (check_a_prompt_is_not_trained, ["prompt"]),
    )
)
