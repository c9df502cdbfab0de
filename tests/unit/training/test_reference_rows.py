"""The reference reads a corpus by its own code, as `datasets` and the run's reader do."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from primus_images.training.judge.reference.rows import files_of, rows_of

ROWS = [{"text": "one\ntwo"}, {"text": "three"}]
LINES = "\n".join(json.dumps(row) for row in ROWS) + "\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "one\ntwo\n \n\nthree\n"),
        ("a.jsonl", LINES),
        ("a.jsonl", "\ufeff" + LINES + "\n\n"),
        ("a.json", json.dumps(ROWS)),
        ("a.json", json.dumps([row["text"] for row in ROWS])),
        ("a.csv", '\ufefftext\r\n"one\ntwo"\r\n\r\nthree\r\n'),
        ("a.tsv", 'text\n"one\ntwo"\nthree\n'),
    ],
)
@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)],
)
def test_rows_of_a_file(
    name: str, text: str, suffix: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    file = tmp_path / (name + suffix)
    file.write_bytes(pack(text.encode()))
    assert list(rows_of(file, None)) == ROWS


def test_every_cell_is_text(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("prompt,completion,prompt\n007,1e5,x\nNaN\n", encoding="utf-8")
    wanted = [{"prompt": "007", "completion": "1e5"}, {"prompt": "NaN", "completion": ""}]
    assert list(rows_of(file, None)) == wanted


@pytest.mark.parametrize(
    ("names", "split", "chosen"),
    [
        (["b.txt", "a.txt"], None, ["a.txt", "b.txt"]),
        (["a.txt", "README.md", ".hidden.txt", "__x__/b.txt", "LICENSE"], None, ["a.txt"]),
        (["train.txt", "test.txt"], None, ["train.txt"]),
        (["train.txt", "dev.txt"], "validation", ["dev.txt"]),
        (["training/x.txt", "eval/y.txt"], "test", ["eval/y.txt"]),
        (["only-test.txt"], None, ["only-test.txt"]),
        (
            ["train_sft-00001-of-00002.txt", "train_sft-00000-of-00002.txt", "test_sft.txt"],
            "train_sft",
            ["train_sft-00000-of-00002.txt", "train_sft-00001-of-00002.txt"],
        ),
        (["dataset_dict.json", "train/a.txt", "test/a.txt"], "test", ["test/a.txt"]),
    ],
)
def test_files_of_a_split(
    names: list[str], split: str | None, chosen: list[str], tmp_path: Path
) -> None:
    for name in names:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("x")
    files = files_of(tmp_path, split)
    assert [str(file.relative_to(tmp_path)) for file in files] == chosen
