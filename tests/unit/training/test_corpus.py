"""Which text a corpus holds, and that one that cannot be read is refused with the place and what was expected."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from primus.errors import InputError
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.training.backend import backend_of
from primus.training.corpus import Corpus, check, documents

CHAT = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Two."}]


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def test_every_form_gives_its_documents(tmp_path: Path) -> None:
    cases = {
        "prose.txt": ("one\nstill one\n\n\n two\n", None, ["one\nstill one", " two"]),
        "plain.jsonl": (rows({"text": "a"}, {"text": ""}, {"text": "b"}), None, ["a", "b"]),
        "marked.jsonl": (b"\xef\xbb\xbf" + rows({"text": "ä"}).encode(), None, ["ä"]),
        "named.jsonl": (rows({"content": "a", "text": "other"}), "content", ["a"]),
    }
    for name, (content, column, wanted) in cases.items():
        corpus = Corpus(path=written(tmp_path, name, content), column=column)
        check(corpus)
        assert list(documents(corpus)) == wanted, name


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    for number in range(30):
        written(tmp_path, f"part-{number:02}.jsonl", rows({"text": str(number)}))
    written(tmp_path, "_SUCCESS", "")
    corpus = Corpus(path=tmp_path)
    check(corpus)
    assert list(documents(corpus)) == [str(number) for number in range(30)]


GOOD = rows(*({"text": f"document {n}"} for n in range(3000)))


@pytest.mark.parametrize(
    ("name", "content", "column", "place", "said"),
    [
        ("a.jsonl", "Once upon a time\n", None, "a.jsonl:1:1", "expected one JSON object per line, found 'Once upon"),
        ("b.jsonl", rows({"text": "a"}) + "\n{\"text\": \n", None, "b.jsonl:3:", "expected one JSON object per line"),
        ("c.jsonl", rows({"prompt": "a", "texts": "b"}), None, "c.jsonl:1", "prompt, texts; did you mean 'texts'?"),
        ("d.jsonl", rows({"text": "a"}), "body", "d.jsonl:1", "expected the column 'body', found text"),
        ("e.jsonl", rows({"text": "a"}, {"text": None}), None, "e.jsonl:2", "in 'text', found null"),
        ("f.jsonl", rows({"text": 7}), None, "f.jsonl:1", "found 7"),
        ("g.jsonl", rows(["a"]), None, "g.jsonl:1", "expected a JSON object, found a list"),
        ("h.jsonl", rows({"messages": [{"from": "human", "value": "a"}]}), None, "h.jsonl:1", "role and content"),
        ("i.jsonl", rows({"messages": CHAT}), None, "i.jsonl:1", "has no chat template"),
        ("j.jsonl", "", None, "j.jsonl", "contains no text"),
        ("k.jsonl", rows({"text": "  "}), None, "k.jsonl", "contains no text"),
        ("l.json", json.dumps([{"text": "a"}], indent=1), None, "l.json:1:", "expected one JSON object per line"),
        ("m.jsonl", GOOD + "{broken}\n" * 500 + GOOD, None, "m.jsonl:3", "expected one JSON object per line"),
        ("n.txt", b"caf\xe9\n", None, "n.txt:1", "expected UTF-8 text, found the byte 0xe9"),
        ("o.txt", b"a\0b\n", None, "o.txt:1", "binary data"),
        ("p.txt", "\n \n", None, "p.txt", "contains no text"),
        ("q.jsonl", b"\x1f\x8b\x08\0\0\0\0", None, "q.jsonl", "compressed by gzip"),
        ("r.jsonl", "[" * 200_000 + "\n", None, "r.jsonl:1", "nested too deeply"),
        ("s.jsonl", rows({"text": "a"}, {"text": "b \ud800"}), None, "s.jsonl:2", "\\ud800, which is half a character"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_place(
    tmp_path: Path, name: str, content: str | bytes, column: str | None, place: str, said: str
) -> None:
    corpus = Corpus(path=written(tmp_path, name, content), column=column, tokenizer=tmp_path)
    with pytest.raises(InputError) as refused:
        check(corpus)
    assert f"{tmp_path}/{place}" in (refused.value.where or "")
    assert said in refused.value.message
    with pytest.raises(InputError):
        if not list(documents(corpus)):
            raise InputError("empty")


def test_a_very_long_line_is_text(tmp_path: Path) -> None:
    corpus = Corpus(path=written(tmp_path, "long.jsonl", "\n" + rows({"text": "word " * 500_000})))
    check(corpus)
    assert len(list(documents(corpus))) == 1


@pytest.mark.parametrize("names", [(), ("a.txt", "b.jsonl")])
def test_a_folder_without_one_form_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        written(tmp_path, name, rows({"text": "a"}))
    with pytest.raises(InputError, match=r"expected files of one form in the folder, found"):
        check(Corpus(path=tmp_path))


def test_the_size_of_a_corpus_costs_no_time(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 33)  # sparse: zeros after its first lines
        file.seek(0)
        file.write(GOOD.encode())
    started = time.monotonic()
    with pytest.raises(InputError, match="binary data"):
        check(Corpus(path=path))
    assert time.monotonic() - started < 5


def test_fewer_documents_than_ranks_that_each_need_one(tmp_path: Path) -> None:
    path = written(tmp_path, "few.jsonl", rows({"text": "a"}, {"text": "b"}))
    check(Corpus(path=path), ranks=2)
    with pytest.raises(InputError, match="has 2 documents, and each of the 3 data-parallel ranks needs one") as caught:
        check(Corpus(path=path), ranks=3)
    assert "--ranks 2" in str(caught.value)


def test_torchtitan_divides_documents_among_ranks(tmp_path: Path) -> None:
    path = written(tmp_path, "one.jsonl", rows({"text": "a"}))
    given = [f"assets.corpus={path}", "ranks=2"]
    recipe = resolve("llama3-proxy", given, Choices(gpu="cpu"))
    with pytest.raises(InputError, match="has 1 document,"):
        backend_of(recipe).check_data(recipe)
    own_loop = resolve("mistral-7b", given, Choices(gpu="cpu", backend="fsdp", proxy=True))
    backend_of(own_loop).check_data(own_loop)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", "text,id\nx,1\n", "pandas.read_csv('{file}')"),
        ("a.json", '[{"text": "a"}]', "pandas.read_json('{file}')"),
        ("a.jsonl", '{"body": "a"}\n', "data.column=NAME"),
    ],
)
def test_a_file_of_another_form_has_its_own_remedy(name: str, text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        check(Corpus(path=file))
    assert (refused.value.hint or "").find(told.format(file=file)) >= 0
