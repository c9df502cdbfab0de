"""Which text a corpus holds, and that one that cannot be read is refused with the place and what was expected.

Forms, columns and tokens that need datasets or transformers are in ``integration/inside/own_text.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primus.errors import InputError
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.training.backend import backend_of
from primus.training.corpus import Corpus, Document, document_of, files_of, layout_of, rows

CHAT = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Two."}]


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def documents(corpus: Corpus) -> list[Document]:
    layout, read = None, []
    for where, row in rows(corpus, files_of(corpus)):
        layout = layout or layout_of(row, corpus.column, where)
        read.append(document_of(row, layout, where))
    return read


@pytest.mark.parametrize(
    ("name", "content", "column", "wanted"),
    [
        ("prose.txt", "one\nstill one\n\n\n two\n", None, ["one\nstill one", " two"]),
        ("marks.txt", b"\xef\xbb\xbfone\r\ntwo\r\n \n\n three\n\nfour", None, ["one\r\ntwo", " three", "four"]),
        ("plain.jsonl", lines({"text": "a"}, {"text": ""}, {"text": "b"}), None, ["a", "", "b"]),
        ("marked.jsonl", b"\xef\xbb\xbf" + lines({"text": "ä"}).encode(), None, ["ä"]),
        ("named.jsonl", lines({"content": "a", "text": "other"}), "content", ["a"]),
        ("separator.jsonl", '{"text": "a\u2028b"}\n\n{"text": "c"}', None, ["a\u2028b", "c"]),
        ("list.json", json.dumps([{"text": "a"}, {"text": "[b"}], indent=1), None, ["a", "[b"]),
        ("texts.json", '["a", "b"]', None, ["a", "b"]),
        ("long.jsonl", "\n" + lines({"text": "word " * 500_000}), None, ["word " * 500_000]),
    ],
)
def test_every_form_gives_its_documents(
    tmp_path: Path, name: str, content: str | bytes, column: str | None, wanted: list[str]
) -> None:
    corpus = Corpus(name=str(written(tmp_path, name, content)), column=column)
    assert [document.text for document in documents(corpus)] == wanted


def test_layouts_are_recognized_by_their_columns() -> None:
    turns = [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "Two."}]
    for row, columns, first in (
        ({"messages": CHAT, "id": 1}, ("messages",), 0),
        ({"conversations": turns}, ("conversations",), 0),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, ("prompt", "completion"), 1),
    ):
        layout = layout_of(row, None, "")
        assert (layout.columns, layout.prompted, layout.chat) == (columns, True, True)
        document = document_of(row, layout, "")
        assert (document.messages, document.first) == (CHAT, first)
    layout = layout_of({"text": "a", "id": 1}, None, "")
    assert (layout.prompted, layout.unused) == (False, ["id"])
    answer = {"prompt": "a ", "completion": "b"}
    assert document_of(answer, layout_of(answer, None, ""), "") == Document(text="a b", prompt=2)


@pytest.mark.parametrize(
    ("name", "content", "column", "place", "said"),
    [
        ("a.jsonl", "Once upon a time\n", None, "a.jsonl:1:1", "expected one JSON object per line, found 'Once upon"),
        ("b.jsonl", lines({"text": "a"}) + "\n{\"text\": \n", None, "b.jsonl:3:", "expected one JSON object per line"),
        ("c.jsonl", lines({"prompt": "a", "texts": "b"}), None, "c.jsonl:1", "prompt, texts; did you mean 'texts'?"),
        ("d.jsonl", lines({"text": "a"}), "body", "d.jsonl:1", "expected the column 'body', found text"),
        ("e.jsonl", lines({"text": "a"}, {"text": None}), None, "e.jsonl:2", "in 'text', found null"),
        ("f.jsonl", lines({"text": 7}), None, "f.jsonl:1", "found 7"),
        ("g.jsonl", lines(["a"], ["b"]), None, "g.jsonl:1", "expected a JSON object, found a list"),
        ("h.jsonl", lines({"messages": [{"from": "ghost", "value": "a"}]}), None, "h.jsonl:1", "role and content"),
        ("n.txt", b"caf\xe9\n", None, "n.txt:1", "expected UTF-8 text, found the byte 0xe9"),
        ("o.txt", b"a\0b\n", None, "o.txt:1", "binary data"),
        ("p.jsonl", b"PK\x03\x04", None, "p.jsonl", "zip archive"),
        ("q.jsonl", b"\x1f\x8b\x08\0\0\0\0\0", None, "q.jsonl", "cannot be read"),
        ("r.jsonl", '{"text":' + "[" * 200_000 + "\n", None, "r.jsonl:1", "nested too deeply"),
        ("s.jsonl", lines({"text": "a"}, {"text": "b \ud800"}), None, "s.jsonl:2", "\\ud800, which is half a"),
        ("t.jsonl", lines({"messages": CHAT}, {"messages": "a"}), None, "t.jsonl:2", "role and content"),
        ("u.jsonl", lines({"messages": json.dumps(CHAT)}), None, "u.jsonl:1", "role and content"),
        ("v.json", '[{"text": "a"}, {"text"', None, "v.json", "item 2 of the JSON list"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_place(
    tmp_path: Path, name: str, content: str | bytes, column: str | None, place: str, said: str
) -> None:
    corpus = Corpus(name=str(written(tmp_path, name, content)), column=column)
    with pytest.raises(InputError) as refused:
        documents(corpus)
    assert f"{tmp_path}/{place}" in (refused.value.where or "")
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("names", "split", "read", "split_read"),
    [
        (("b.jsonl", "_part.jsonl", "_SUCCESS", ".hidden", "README.md"), None, ["_part.jsonl", "b.jsonl"], None),
        (("train.jsonl", "test.jsonl", "my-val-1.jsonl"), None, ["train.jsonl"], "train"),
        (("train/a.jsonl", "test/a.jsonl"), "test", ["test/a.jsonl"], "test"),
        (("x-00000-of-00002.jsonl", "x-00001-of-00002.jsonl"), None,
         ["x-00000-of-00002.jsonl", "x-00001-of-00002.jsonl"], "x"),
        (("latest.jsonl", "constraint.jsonl"), None, ["constraint.jsonl", "latest.jsonl"], None),
        (("dev.jsonl",), None, ["dev.jsonl"], "validation"),
    ],
)  # fmt: skip
def test_a_folder_is_its_files_of_one_split(
    tmp_path: Path, names: tuple[str, ...], split: str | None, read: list[str], split_read: str | None
) -> None:
    for name in names:
        written(tmp_path, name, lines({"text": name}))
    files = files_of(Corpus(name=str(tmp_path), split=split))
    assert [str(path.relative_to(tmp_path)) for path in files.paths] == read
    assert files.split == split_read
    assert {*read, *files.others} == {name for name in names if not name.startswith(".")}


@pytest.mark.parametrize(
    ("names", "split", "said"),
    [
        ((), None, "expected files of one form in the folder, found no files"),
        (("a.txt", "b.jsonl"), None, "expected files of one form in the folder, found .jsonl, .txt"),
        (("train.jsonl", "test.jsonl", "more.jsonl"), None, "more.jsonl belongs to no split"),
        (("dev.jsonl", "test.jsonl"), None, "has no split train, only test, validation"),
        (("train.jsonl",), "test", "has no split test, only train"),
    ],
)
def test_a_folder_that_is_not_clear_is_refused(
    tmp_path: Path, names: tuple[str, ...], split: str | None, said: str
) -> None:
    for name in names:
        written(tmp_path, name, lines({"text": "a"}))
    with pytest.raises(InputError, match=said):
        files_of(Corpus(name=str(tmp_path), split=split))


def test_links_are_followed_once_and_none_is_skipped(tmp_path: Path) -> None:
    written(tmp_path, "elsewhere/z.jsonl", lines({"text": "z"}))
    written(tmp_path, "data/a.jsonl", lines({"text": "a"}))
    (tmp_path / "data/b.jsonl").symlink_to("../elsewhere/z.jsonl")
    (tmp_path / "data/c").symlink_to("../elsewhere")
    (tmp_path / "data/d").symlink_to("../data")
    corpus = Corpus(name=str(tmp_path / "data"))
    assert [document.text for document in documents(corpus)] == ["a", "z", "z"]
    (tmp_path / "data/e.jsonl").symlink_to("gone")
    with pytest.raises(InputError, match="the link leads nowhere"):
        files_of(corpus)


def test_text_needs_a_tokenizer() -> None:
    recipe = resolve("llama3-proxy", ["assets.tokenizer=mock"], Choices(gpu="cpu"))
    with pytest.raises(InputError, match="mock, but the corpus is text"):
        backend_of(recipe).check_data(recipe)
