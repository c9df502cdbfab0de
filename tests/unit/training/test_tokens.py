"""Which documents are written, and where, with a tokenizer of one token a character."""

import bz2
import gzip
import json
import lzma
import random
import re
from array import array
from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.errors import InputError
from primus_images.training.text import batches, encoder, pieces, tokens
from primus_images.training.text.batches import Shard
from primus_images.training.text.corpus import Corpus

ASKED = {"role": "user", "content": "How many?"}


class Texts:
    """What :func:`tokens.write` uses of a reader."""

    corpus = Corpus(name="made")
    share = 0.25

    def __init__(self, *documents: Sequence[int], masked: bool = False) -> None:
        self.documents = documents
        self.masked = masked
        self.skipped: list[InputError] = []

    def shards(self, folder: Path) -> Generator[Shard]:
        for number, document in enumerate(self.documents):
            shard = Shard(tokens=folder / f"{number}.tokens", mask=folder / f"{number}.mask")
            shard.write(iter([(array("I", document), b"\1" * len(document))]))
            yield shard


def nothing(_line: str) -> None:
    pass


def numbers(file: Path, kind: str) -> list[int]:
    values = array(kind)
    values.frombytes(file.read_bytes())
    return list(values)


def test_tokens_and_ends_of_documents_are_written(tmp_path: Path) -> None:
    tokens.write(Texts([5, 6], [], [7]), tmp_path, progress=nothing)  # type: ignore[arg-type]
    assert numbers(tmp_path / "train.tokens", "I") == [5, 6, 7]
    assert numbers(tmp_path / "train.ends", "q") == [2, 2, 3]
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["train.ends", "train.tokens"]


def test_the_mask_is_kept_if_only_some_tokens_are_trained(tmp_path: Path) -> None:
    made = Texts([5, 6], masked=True)
    tokens.write(made, tmp_path, name="mine", progress=nothing)  # type: ignore[arg-type]
    assert (tmp_path / "mine.mask").read_bytes() == b"\1\1"


def test_held_out_documents_are_evenly_spread(tmp_path: Path) -> None:
    made = Texts(*([number] for number in range(10)))
    tokens.write(made, tmp_path, held_out=0.3, progress=nothing)  # type: ignore[arg-type]
    assert numbers(tmp_path / "eval.tokens", "I") == [3, 6, 9]
    assert numbers(tmp_path / "train.tokens", "I") == [0, 1, 2, 4, 5, 7, 8]


def test_a_long_run_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    lines: list[str] = []
    made = Texts(*([number] for number in range(6)))
    tokens.write(made, tmp_path, progress=lines.append)  # type: ignore[arg-type]
    assert lines == [
        "2 documents tokenized, 25% of the corpus; about 2 min to go",
        "4 documents tokenized, 25% of the corpus; about 4 min to go",
        "6 documents tokenized, 25% of the corpus; about 6 min to go",
    ]
    made.share = None  # type: ignore[assignment]
    tokens.write(made, tmp_path, progress=lines.append)  # type: ignore[arg-type]
    assert lines[3] == "2 documents tokenized"


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz"])
def test_the_share_of_files_that_are_read(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openers: dict[str, Any] = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    draw = random.Random(1)
    lines = [b'{"text": "%s"}\n' % draw.randbytes(400).hex().encode() for _ in range(800)]
    for name in "ab":
        with openers[suffix](tmp_path / f"{name}.jsonl{suffix}", "wb") as file:
            file.writelines(lines)
    reader = texts_of(tmp_path, 0.0, monkeypatch)
    shares = [reader.share for number, _ in enumerate(reader) if number % 200 == 0]
    assert shares == sorted(shares)  # type: ignore[type-var]
    assert 0 < shares[0] <= 0.5 < shares[-2] <= 1  # type: ignore[operator]
    assert reader.share == 1


def test_too_few_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains no text"):
        tokens.write(Texts([]), tmp_path, progress=nothing)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"too few documents for eval\.fraction=0\.1"):
        tokens.write(Texts([5]), tmp_path, held_out=0.1, progress=nothing)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_chat_without_answers_is_refused_if_only_they_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = SimpleNamespace(
        bos_token_id=None,
        eos_token_id=None,
        eos_token="",
        chat_template="{{ messages[0].content }}",
        get_chat_template=lambda *_: "",
        apply_chat_template=lambda chats, **_: [chat[0]["content"] for chat in chats],
    )

    class Tokenizer(SimpleNamespace):
        def __call__(self, text: str, **_: object) -> "Encoding":
            return Encoding(input_ids=[*map(ord, text)])

        def __len__(self) -> int:
            return 256

    class Encoding(dict[str, list[int]]):
        def char_to_token(self, place: int) -> int:
            return place

    monkeypatch.setattr(encoder, "_loaded", lambda *_: Tokenizer(**vars(tokenizer)))
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": [ASKED]}) + "\n")
    whole = tokens.Reader(Corpus(name=str(file), completions=False))
    assert [list(mask) for _, mask in whole] == [[1] * len(ASKED["content"])]
    with pytest.raises(InputError, match="the roles are user"):
        list(tokens.Reader(Corpus(name=str(file))))


def test_packs_fill_the_sample_with_the_least_room() -> None:
    assert tokens.packs([4, 3, 3, 2, 1], 6) == [[0, 3], [1, 2], [4]]
    assert tokens.packs([6, 6], 6) == [[0], [1]]
    assert tokens.packs([], 6) == []


def test_figures_are_those_of_what_is_trained_after_the_cut(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    made = tokens.Tokens(
        tokens=np.asarray([2, 7, 7, 7, 3, 2, 7, 3], np.uint32),
        ends=np.asarray([5, 8]),
        mask=np.asarray([1, 0, 0, 1, 1, 0, 0, 1], np.uint8),
    )
    encoder = SimpleNamespace(begin=2, end=3)
    shares = {4: (3 / 8, 1.0), 3: (2 / 8, 0.5), 2: (1 / 8, 0.5), 1: (0.0, 0.0)}
    for seq_len, (trained, end) in shares.items():
        figures = tokens.figures_of(made, seq_len, encoder)  # type: ignore[arg-type]
        assert (figures["trained"], figures["end"]) == (trained, end), seq_len


def texts_of(file: Path, skip: float, monkeypatch: pytest.MonkeyPatch) -> tokens.Reader:
    tokenizer = SimpleNamespace(
        texts=lambda texts: [[len(text)] for text in texts], remarks={}, begin=None, end=None
    )
    monkeypatch.setattr(tokens, "Encoder", lambda *_: tokenizer)
    return tokens.Reader(Corpus(name=str(file), skip=skip))


@pytest.mark.parametrize(
    ("name", "text", "divided"),
    [
        ("a.txt", "one\n\ntwo\n", True),
        ("a.txt", "one\ntwo\n", False),
        ("a.jsonl", '{"text": "one"}\n{"text": "two"}\n', False),
    ],
)
def test_a_line_says_that_blank_lines_divide_text(
    name: str, text: str, divided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(text)
    made = texts_of(tmp_path / name, 0.0, monkeypatch)
    figures = dict.fromkeys(("tokens", "longest", "longer", "begin", "end", "left_out"), 0)
    figures["documents"] = len(list(made))
    assert ("blank lines divide 1 file; JSON keeps them" in made.sentence(figures, 8)) == divided


@pytest.mark.parametrize(
    ("names", "read"), [(["train", "test"], "split train"), (["a", "b"], None)]
)
def test_a_line_names_the_split_that_was_read(
    names: list[str], read: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text('{"text": "one"}\n')
    made = texts_of(tmp_path, 0.0, monkeypatch)
    figures = dict.fromkeys(("tokens", "longest", "longer", "begin", "end", "left_out"), 0)
    figures["documents"] = len(list(made))
    parts = made.sentence(figures, 8).split("; ")
    assert [part for part in parts if part.startswith("split")] == ([read] if read else [])


def is_open(file: Path) -> bool:
    descriptors = [*Path("/proc/self/fd").iterdir()]
    return file in [entry.readlink() for entry in descriptors if entry.is_symlink()]


BAD = ('{"text": 7}', '{"text": "cut', '{"body": "a"}', '["a"]', '{"text": "\\ud83d"}', "\xff")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_wrong_rows_are_left_out_up_to_a_share(
    bad: str, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ['{"text": "a"}'] * 4
    lines.insert(place, bad)
    if place == 0 and bad.startswith("["):
        pytest.skip("a file that begins with [ is one list")
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    made = texts_of(tmp_path / "a.jsonl", 0.2, monkeypatch)
    tokens.write(made, tmp_path, progress=nothing)
    assert numbers(tmp_path / "train.tokens", "I") == [1, 1, 1, 1]
    assert tokens.counts(tmp_path) == (4, 4)
    assert tokens.counts(tmp_path, "eval") == (0, 0)
    (named,) = (tmp_path / "train.skipped.jsonl").read_text(encoding="utf-8").splitlines()
    assert f"a.jsonl:{place + 1}" in named
    for skip, words in (
        (0.19, r"1 of 5 rows cannot be read, more than data\.skip=19%"),
        (0.0, "."),
    ):
        with pytest.raises(InputError, match=words) as caught:
            list(texts_of(tmp_path / "a.jsonl", skip, monkeypatch))
        assert f"a.jsonl:{place + 1}" in str(caught.value.where)
        assert not is_open(tmp_path / "a.jsonl"), "an error that is kept keeps the file open"
        if place and not skip:
            assert "data.skip=1%" in str(caught.value.hint)


def test_a_corpus_of_wrong_rows_alone_names_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n' * 3)
    with pytest.raises(InputError, match="no column has a usual name") as caught:
        texts_of(tmp_path / "a.jsonl", 0.5, monkeypatch)
    assert str(caught.value.where).endswith("a.jsonl:1")


def test_blocks_are_all_documents_and_leave_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np = pytest.importorskip("numpy")
    monkeypatch.setattr(tokens, "_BLOCK", 10_000)
    lengths = [3_000, 0, 6_999, 1, 1, 25_000, 400]
    values = np.arange(sum(lengths), dtype=np.uint32)
    values.tofile(tmp_path / "train.tokens")
    (values % 2).astype(np.uint8).tofile(tmp_path / "train.mask")
    np.cumsum(lengths, dtype=np.int64).tofile(tmp_path / "train.ends")
    whole = tokens.stored(tmp_path)
    read = []
    sizes = []
    for block in whole.blocks():
        assert block.mask is not None
        assert (block.mask == block.tokens % 2).all()
        sizes.append(len(block.tokens))
        read += [block.tokens[block.document(n)].tolist() for n in range(len(block.ends))]
    assert sizes == [10_000, 1, 25_000, 400]
    assert [number for document in read for number in document] == values.tolist()
    assert [len(document) for document in read] == lengths
    mapped = Path("/proc/self/smaps").read_text(encoding="utf-8").partition("train.tokens")[2]
    assert re.search(r"Rss:\s+(\d+) kB", mapped)[1] == "0"  # type: ignore[index]


def test_rows_without_text_count_as_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n{"text": " "}\n\n{"text": 7}\n{"text": "b"}\n')
    with pytest.raises(InputError, match=r"1 of 4 rows cannot be read, more than data\.skip=24%"):
        list(texts_of(file, 0.24, monkeypatch))
    assert len(list(texts_of(file, 0.25, monkeypatch))) == 2


LINES = [
    b'{"text": "one"}',
    b"",
    b'{"text": " "}',
    b'{"text": 7}',
    b'{"text": "t\xc3\xa9"}',
    b"\xff",
]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("held_out", [0.0, 0.3])
def test_pieces_of_any_size_give_the_same_files(
    end: bytes, suffix: str, held_out: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(2)
    jsonl = end.join(draw.choices(LINES, weights=[9, 1, 1, 1, 9, 1], k=90))
    txt = end.join(draw.choices([b"", b" ", b"\xc2\xa0", b"one", b"two\rtoo", b"\xff"], k=200))
    opened = gzip.open if suffix else open
    for name, content in (("a.jsonl", jsonl), ("a.txt", txt)):
        file = tmp_path / f"{name}{suffix}"
        with opened(file, "wb") as stream:
            stream.write(content)
        found = []
        for size in (1 << 20, 300, 40, 1):
            monkeypatch.setattr(pieces, "_PIECE", size)
            # Many processes for pieces of some rows, none for those of one.
            monkeypatch.setattr(batches, "_ALONE", 5 if size > 1 else 1000)
            folder = tmp_path / f"{name} {size}"
            folder.mkdir()
            made = texts_of(file, 0.9, monkeypatch)
            tokens.write(made, folder, held_out=held_out, progress=nothing)
            found.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert all(files == found[0] for files in found), name
        assert len(found[0]) == (3 if not held_out else 5)
        assert b":2" in found[0]["train.skipped.jsonl"]


def test_a_file_that_gets_shorter_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_PIECE", 30)
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n' * 9)
    made = texts_of(file, 0.0, monkeypatch)
    monkeypatch.setattr(batches, "_ALONE", 99)
    file.write_text('{"text": "a"}\n')
    with pytest.raises(InputError, match="the file got shorter") as caught:
        list(made)
    assert str(caught.value.where).endswith("a.jsonl:1")


def test_the_rows_of_a_table_are_those_of_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(pieces, "_PIECE", 500)
    rows = [{"text": "a" * (number % 50), "of": [{"n": number, "m": None}]} for number in range(99)]
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=20)
    several = list(pieces.pieces_of_file(file))
    assert len(several) > 5
    assert {type(piece) for piece in several[:-1]} == {pieces.Columns}
    assert sum(piece.size for piece in several) == file.stat().st_size
    read = [row for piece in several for row in piece.rows()]
    assert [where for where, _ in read] == [f"{file}: row {number + 1}" for number in range(99)]
    theirs = datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True)
    assert [row for _, row in read] == list(theirs)
