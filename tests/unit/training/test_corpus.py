"""A corpus that cannot be read is refused with the place and what was expected.

What can be read is compared with datasets and transformers in ``integration/inside/own_text.py``.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.backends.protocol import backend_of
from primus_images.training.text.corpus import Corpus, files_of, labels_of, parts_of, pieces
from primus_images.training.text.document import (
    Document,
    document_of,
    layout_of,
    refuse_other_spellings,
)
from primus_images.training.text.rows import form_of

CHAT = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Two."}]


def lines(*values: object) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def damaged(packed: bytes) -> bytes:
    return packed[:10] + b"\xff" * 20 + packed[30:]


def texts(path: Path, column: str | None = None) -> list[str]:
    corpus, layout, read = Corpus(name=str(path), column=column), None, []
    for piece in pieces(corpus, files_of(corpus)):
        for where, row in piece.rows():
            layout = layout or layout_of(row, column, where)
            read.append(document_of(row, layout, where).text)
    return read


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        (
            "marks.txt",
            b"\xef\xbb\xbfone\r\ntwo\r\n \n\n three\n\nfour",
            ["one\ntwo", " three", "four"],
        ),
        ("old.txt", b"one\rtwo\r\rthree\r", ["one\ntwo", "three"]),
        ("separator.jsonl", '{"text": "a\u2028b"}\n\n{"text": "c"}'.encode(), ["a\u2028b", "c"]),
        ("list.json", b'\n \n[\n{"text": "a"},\n{"text": "b"}]\n', ["a", "b"]),
    ],
)
def test_every_form_gives_its_documents(
    tmp_path: Path, name: str, content: bytes, wanted: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == wanted


@pytest.mark.parametrize(
    ("name", "content", "column", "place", "said"),
    [
        (
            "a.jsonl",
            b"Once upon a time\n",
            None,
            "a.jsonl:1:1",
            "expected one JSON object per line, found 'Once upon",
        ),
        (
            "b.jsonl",
            lines({"text": "a"}) + b'\n{"text": \n',
            None,
            "b.jsonl:3:9",
            "one JSON object per line",
        ),
        (
            "c.jsonl",
            lines({"prompt": "a", "texts": "b"}),
            None,
            "c.jsonl:1",
            "prompt, texts; did you mean 'texts'?",
        ),
        (
            "d.jsonl",
            lines({"text": "a"}),
            "body",
            "d.jsonl:1",
            "expected the column 'body', found text",
        ),
        (
            "e.jsonl",
            lines({"text": "a"}, {"text": None}),
            None,
            "e.jsonl:2",
            "in 'text', found null",
        ),
        ("n.txt", b"caf\xe9\n", None, "n.txt:1", "expected UTF-8 text, found the byte 0xe9"),
        ("o.txt", b"a\0b\n", None, "o.txt:1", "binary data"),
        ("q.jsonl", b"\x1f\x8b\x08\0\0\0\0\0", None, "q.jsonl", "cannot be read"),
        ("t.jsonl", b'{"text": "a", "text": "b"}\n', None, "t.jsonl:1", "duplicate key 'text'"),
        ("r.jsonl", b'{"text":' + b"[" * 200_000 + b"\n", None, "r.jsonl:1", "nested too deeply"),
        (
            "s.jsonl",
            lines({"text": "a"}, {"text": "b \ud800"}),
            None,
            "s.jsonl:2",
            "\\ud800, which is half a",
        ),
        (
            "t.jsonl",
            lines({"messages": CHAT}, {"messages": "a"}),
            None,
            "t.jsonl:2",
            "role and content",
        ),
        (
            "u.jsonl",
            lines({"messages": [{"role": "user", "content": "\ud800"}]}),
            None,
            "u.jsonl:1",
            "half a char",
        ),
        ("v.json", b'[{"text": "a"},\n {"text"', None, "v.json:2:9", "expected one JSON list"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(
    tmp_path: Path, name: str, content: bytes, column: str | None, place: str, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as refused:
        texts(tmp_path / name, column)
    assert (refused.value.where or "").startswith(f"{tmp_path}/{place}")
    assert said in refused.value.message


def test_text_needs_a_tokenizer() -> None:
    recipe = resolve("llama3-proxy", ["assets.tokenizer=mock"], Choices(gpu="cpu"))
    with pytest.raises(InputError, match="mock, but the corpus is text"):
        backend_of(recipe).check_data(recipe)


@pytest.mark.parametrize(
    ("names", "choice", "split", "read"),
    [
        (["a.jsonl", "b.jsonl"], {}, None, ["a.jsonl", "b.jsonl"]),
        (["test.jsonl", "train.jsonl"], {}, "train", ["train.jsonl"]),
        (["test.jsonl", "train.jsonl"], {"split": "test"}, "test", ["test.jsonl"]),
        (["train.jsonl", "dev.jsonl"], {"usual_split": "validation"}, "validation", ["dev.jsonl"]),
        (["validation.jsonl"], {}, "validation", ["validation.jsonl"]),
        (["train/a.jsonl", "test/a.jsonl"], {}, "train", ["train/a.jsonl"]),
        (["dataset_dict.json", "x/a.jsonl", "y/a.jsonl"], {"split": "y"}, "y", ["y/a.jsonl"]),
        (["README.md", "__pycache__/a.jsonl", "a.jsonl"], {}, None, ["a.jsonl"]),
    ],
)
def test_the_files_of_a_split(
    names: list[str], choice: dict[str, str], split: str | None, read: list[str], tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    files = files_of(Corpus(name=str(tmp_path), **choice))
    assert files.split == split
    assert [str(file.relative_to(tmp_path)) for file in files.paths] == read
    assert sorted([*read, *files.others]) == sorted(names)


@pytest.mark.parametrize(
    ("names", "choice", "words"),
    [
        (["train.jsonl", "test.jsonl", "extra.jsonl"], {}, "extra.jsonl belongs to no split"),
        (["dev.jsonl", "test.jsonl"], {}, "has no split train, only test, validation"),
        (["train.jsonl"], {"split": "test"}, "has no split test, only train"),
        (["a.jsonl", "b.txt"], {}, "files of one form in the folder, found .jsonl, .txt"),
        ([], {}, "found no files"),
        (["1.md", "2.md"], {}, "only files beside a corpus: 1.md, 2.md"),
    ],
)
def test_a_folder_without_one_split_is_refused(
    names: list[str], choice: dict[str, str], words: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(InputError) as caught:
        files_of(Corpus(name=str(tmp_path), **choice))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "leads"),
    [
        ("book.md", b"It was a dark night.\n", True),
        ("book", b"It was a dark night.\n", True),
        ("book.jsonl", b"It was a dark night.\n", False),
        ("book.data", b'{"text": "a"}\noops\n', False),
    ],
)
def test_plain_text_under_another_name_leads_to_its_name(
    name: str, content: bytes, leads: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match="expected one JSON object per line") as caught:
        texts(tmp_path / name)
    assert ("from a file named book.txt" in str(caught.value.hint)) == leads


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.txt", ".txt"),
        ("a.txt.gz", ".txt"),
        ("a.JSON", ".jsonl"),
        ("a.v1.ndjson.zst", ".jsonl"),
        ("a.parquet", ".parquet"),
        ("a.gz", ""),
        ("a", ""),
    ],
)
def test_the_form_of_a_file(name: str, form: str) -> None:
    assert form_of(Path(name)) == form


def test_packed_text_is_read(tmp_path: Path) -> None:
    for name, pack in (
        ("a.jsonl.gz", gzip.compress),
        ("b.bz2", bz2.compress),
        ("c", lzma.compress),
    ):
        (tmp_path / name).write_bytes(pack(lines({"text": "one"})))
        assert texts(tmp_path / name) == ["one"]


@pytest.mark.parametrize("label", [True, False, 1, 0, "1", "False"])
def test_labels_of_kto_are_refused(label: object) -> None:
    """Rejected answers would be trained as good ones."""
    with pytest.raises(InputError, match="these are preferences"):
        layout_of({"prompt": "a", "completion": "b", "label": label}, None, "a.jsonl:1")


@pytest.mark.parametrize("label", [2, "positive", None, 0.5])
def test_another_label_is_an_unused_column(label: object) -> None:
    layout = layout_of({"prompt": "a", "completion": "b", "label": label}, None, "a.jsonl:1")
    assert layout.unused == ["label"]


def test_a_class_beside_an_instruction_is_no_preference() -> None:
    row = {"instruction": "a", "output": "b", "label": 1}
    assert layout_of(row, None, "a.jsonl:1").unused == ["label"]
    with pytest.raises(InputError, match="these are preferences"):
        layout_of(row | {"label": True}, None, "a.jsonl:1")


@pytest.mark.parametrize("name", ["id;text", "id\ttext", "id|text"])
def test_another_separator_than_the_suffix_says_is_named(name: str) -> None:
    with pytest.raises(InputError) as refused:
        layout_of({name: "1;a"}, None, "a.csv: row 1")
    assert "separator of .csv is a comma" in (refused.value.hint or "")
    assert "did you mean" not in refused.value.message


def test_files_of_several_forms_lead_to_a_list_of_corpora(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.txt"):
        (tmp_path / name).write_bytes(lines({"text": "a"}))
    with pytest.raises(InputError, match=r"found .jsonl, .txt") as refused:
        files_of(Corpus(name=str(tmp_path)))
    assert "list several in a .yaml file" in (refused.value.hint or "")


MEMBERS = pytest.mark.parametrize(
    ("pack", "begin"), [(bz2.compress, 4), (lzma.compress, 6)], ids=["bzip2", "xz"]
)


@MEMBERS
def test_members_with_zeros_between_are_one_text(
    pack: Callable[[bytes], bytes], begin: int, tmp_path: Path
) -> None:
    several = [pack(lines({"text": str(number)})) for number in range(9)]
    (tmp_path / "a.jsonl").write_bytes((bytes(8) + pack(b"")).join(several) + bytes(4))
    assert texts(tmp_path / "a.jsonl") == list("012345678")


@MEMBERS
def test_a_damaged_begin_of_a_member_is_no_end_of_the_file(
    pack: Callable[[bytes], bytes], begin: int, tmp_path: Path
) -> None:
    """Python's readers end there in silence: the rest of the corpus would be missing."""
    first, second = pack(lines({"text": "one"})), pack(lines({"text": "two"}))
    for rest in (b"\xff" * begin + second[begin:], second[:begin]):
        (tmp_path / "a.jsonl").write_bytes(first + rest)
        with pytest.raises(InputError, match="cannot be read") as refused:
            texts(tmp_path / "a.jsonl")
        assert (refused.value.where or "").endswith("a.jsonl:2")


def test_frames_of_zstd_may_begin_with_one_to_skip(tmp_path: Path) -> None:
    """pzstd, which compresses in parallel, writes its sizes into such frames."""
    pyarrow = pytest.importorskip("pyarrow")
    content = b""
    for text in "ab":
        frame = pyarrow.compress(lines({"text": text}), "zstd", asbytes=True)
        content += b"\x50\x2a\x4d\x18\4\0\0\0" + len(frame).to_bytes(4, "little") + frame
    (tmp_path / "a.jsonl.zst").write_bytes(content)
    assert texts(tmp_path / "a.jsonl.zst") == ["a", "b"]


def test_a_table_may_begin_with_a_group_without_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["a", "b"]})
    with parquet.ParquetWriter(tmp_path / "a.parquet", table.schema) as file:
        file.write_table(table.slice(0, 0))
        file.write_table(table)
    assert texts(tmp_path / "a.parquet") == ["a", "b"]


def test_a_column_of_a_type_that_no_reader_has_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    columns = {"text": ["a"], "of": pyarrow.array([[("b", 1)]], kind)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="map<string, int64") as refused:
        texts(tmp_path / "a.parquet")
    assert refused.value.hint == "write the table without the column of this type"


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.tsv"])
def test_every_cell_is_text(name: str, tmp_path: Path) -> None:
    """An answer may be a number, or "None": the reader of datasets makes a type of either."""
    pytest.importorskip("pandas")
    answers = ["007", "1.50", "True", "NA", "null", "None", 'a, "b"\nc', "", "x"]
    stream = io.StringIO()
    rows = [[str(number), answer] for number, answer in enumerate(answers)]
    csv.writer(stream, "excel-tab" if ".tsv" in name else "excel").writerows([["n", "text"], *rows])
    content = stream.getvalue().encode("utf-8-sig")
    if name.endswith(".gz"):
        content = gzip.compress(content)
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == answers


def test_lines_with_more_fields_than_the_first_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    (tmp_path / "a.csv").write_text("text\na,b,c\nd\n")
    with pytest.raises(InputError, match="quote those that contain the separator"):
        texts(tmp_path / "a.csv")


def test_a_corpus_of_a_mixture_takes_its_columns_and_split_from_the_list_alone(
    tmp_path: Path,
) -> None:
    """What `data.` names is for a corpus alone: the corpora of a list have columns of their own."""
    mixture = tmp_path / "mix.yaml"
    mixture.write_text(
        "- {corpus: hf:owner/chats, split: dev, question: asked, answer: said}\n"
        "- {corpus: hf:owner/texts, column: body}\n"
    )
    corpus = Corpus(name=str(mixture), column="text", split="train", skip=0.1, completions=False)
    (chats, _), (texts, _) = parts_of(corpus)
    assert (chats.split, chats.question, chats.answer, chats.column) == (
        "dev",
        "asked",
        "said",
        None,
    )
    assert (texts.split, texts.question, texts.answer, texts.column) == (None, None, None, "body")
    for part in (chats, texts):
        assert (part.skip, part.completions) == (0.1, False)


@pytest.mark.parametrize(
    ("row", "said", "hint"),
    [
        (
            {"messages": [{"role": "user", "content": None}]},
            "the message of user has no content",
            "write its content, or remove it",
        ),
        (
            {"messages": [{"content": "How many?"}]},
            'expected a role and content in every message, found {"content": "How many?"}',
            "write its role, such as user or assistant",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, "b"]},
            'expected a role and content in every message, found "b"',
            "write its role, such as user or assistant",
        ),
        ({"messages": []}, "'messages' has no message", "write the chat, or remove it"),
        (
            {"conversations": [{"from": "alice", "value": "a"}]},
            "the sender 'alice' is unknown",
            "known are human, user, gpt",
        ),
        (
            {"conversations": [{"from": "human", "value": None}]},
            "the message of human has no value that is text, but null",
            "write its value, or remove it",
        ),
        (
            {"messages": [{"role": "user", "content": "\ud83d"}]},
            "half a character",
            "write the whole character, or remove it",
        ),
        ({"text": None}, "expected text in 'text', found null", "write text there"),
        (
            {"messages": "user: hello"},
            "expected a list of messages (role and content) in 'messages', found \"user: hello\"",
            "data.column=NAME names the column",
        ),
    ],
)
def test_a_row_of_something_else_is_refused_with_what_to_correct(
    row: dict[str, object], said: str, hint: str
) -> None:
    with pytest.raises(InputError) as refused:
        document_of(row, layout_of(row, None, "a:1"), "a:1")
    assert said in refused.value.message
    assert hint in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("role", "meant"), [("User", "user"), ("gpt", "assistant"), ("bot", "assistant")]
)
def test_another_spelling_of_a_role_is_refused(role: str, meant: str) -> None:
    chat = Document(messages=[*CHAT, {"role": role, "content": "a"}])
    with pytest.raises(InputError, match=f"the role '{role}' is none") as refused:
        refuse_other_spellings(chat, "a:1")
    assert refused.value.hint == f"write {meant}"


@pytest.mark.parametrize("role", ["system", "tool", "developer", "model", "function_call"])
def test_a_role_of_some_templates_is_left_to_them(role: str) -> None:
    refuse_other_spellings(Document(messages=[*CHAT, {"role": role, "content": "a"}]), "a:1")


def test_messages_that_a_table_holds_as_json_are_a_chat() -> None:
    row = {"messages": json.dumps(CHAT)}
    assert document_of(row, layout_of(row, None, "a:1"), "a:1").messages == CHAT


PACKED_LINES = gzip.compress(lines({"text": "a"}) * 99, mtime=0)
PACKED_NOISE = gzip.compress(random.Random(0).randbytes(999), mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("a.jsonl.gz", PACKED_LINES[:30], "copy the file again"),
        ("a.jsonl.gz", damaged(PACKED_NOISE), "copy the file"),
        ("a.jsonl", '{"text": "é"}\n'.encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
        ("a.jsonl", '{"text": "é"}\n'.encode("latin-1"), "iconv -f LATIN1 -t UTF-8"),
        ("a.jsonl", b'{"text": "a"}\r{"text": "b"}\r', "ends of lines are CR"),
    ],
    ids=["cut gzip", "damaged gzip", "UTF-16", "Latin-1", "CR"],
)
def test_a_damaged_file_is_refused_with_what_mends_it(
    tmp_path: Path, name: str, content: bytes, hint: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as refused:
        texts(tmp_path / name)
    assert hint in (refused.value.hint or "")


def test_corpora_of_one_name_have_labels_of_their_own() -> None:
    names = ("a/chats.jsonl", "b/chats.txt", "hf:owner/my data", "c/chats", "/")
    assert labels_of([(Corpus(name=name), 1.0) for name in names]) == [
        "chats",
        "chats-2",
        "my_data",
        "chats-3",
        "corpus",
    ]
