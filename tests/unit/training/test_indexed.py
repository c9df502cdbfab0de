"""Tokenized corpora of Megatron-LM, as the run and as the reference read them."""

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.recipes.indexed import named
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.judge.reference.rows import tokens_of
from primus_images.training.text.indexed import documents

CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "H": 8}
# Two sequences are one document, and one is empty.
SEQUENCES = ([1, 2, 3], [4, 5], [], [6, 7, 8, 9])
FIRSTS = (0, 2, 3, 4)


def write(
    folder: Path,
    sequences: Sequence[Sequence[int]] = SEQUENCES,
    firsts: Sequence[int] = FIRSTS,
    token: str = "H",
) -> Path:
    """Write both files by the layout in Megatron-LM's indexed_dataset.py. Returns what they are
    called there.
    """
    size = struct.calcsize(token)
    lengths = [len(sequence) for sequence in sequences]
    places = [size * sum(lengths[:number]) for number in range(len(lengths))]
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[token], len(lengths), len(firsts))
    index += struct.pack(
        f"<{len(lengths)}i{len(lengths)}q{len(firsts)}q", *lengths, *places, *firsts
    )
    (folder / "mine_text_document.idx").write_bytes(index)
    with (folder / "mine_text_document.bin").open("wb") as tokens:
        for sequence in sequences:
            tokens.write(struct.pack(f"<{len(sequence)}{token}", *sequence))
    return folder / "mine_text_document"


@pytest.mark.parametrize("token", CODES)
def test_the_run_and_the_reference_read_the_same_documents(tmp_path: Path, token: str) -> None:
    index = named(write(tmp_path, token=token))
    assert [list(document) for document in documents(index)] == [
        [1, 2, 3, 4, 5],
        [],
        [6, 7, 8, 9],
    ]
    assert list(tokens_of(index)) == [[1, 2, 3, 4, 5], [6, 7, 8, 9]]


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_either_file_or_what_their_names_share_names_both(tmp_path: Path, ending: str) -> None:
    prefix = write(tmp_path)
    choices = Choices(gpu="cpu", backend="fsdp", mode="pretrain", proxy=True)
    recipe = resolve("llama3.1-8b", (f"assets.corpus={prefix}{ending}",), choices)
    assert recipe.asset("corpus") == prefix.with_suffix(".idx")
    before = recipe.asset_digests["corpus"]
    write(tmp_path, [*SEQUENCES[:-1], [6, 7, 8, 1]])
    again = resolve("llama3.1-8b", (f"assets.corpus={prefix}{ending}",), choices)
    assert again.asset_digests["corpus"] != before


@pytest.mark.parametrize(
    ("index", "tokens", "says"),
    [
        (b"text", b"", "no index of Megatron-LM"),
        (b"MMIDIDX\0\0", b"", "no index of Megatron-LM"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 2, 8, 0, 1), b"", "version 2"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 7, 0, 1), b"", "tokens of type 7"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 9, 9), b"", "ends too early"),
        (
            struct.pack("<9sQBQQiqqq", b"MMIDIDX\0\0", 1, 8, 1, 2, 5, 0, 0, 1),
            b"1234",
            "more tokens than the 2",
        ),
        (
            struct.pack("<9sQBQQiqqq", b"MMIDIDX\0\0", 1, 8, 1, 2, 5, 0, 1, 0),
            b"1234",
            "lists its documents wrongly",
        ),
        (
            struct.pack("<9sQBQQiqqq", b"MMIDIDX\0\0", 1, 8, 1, 2, 5, -2, 0, 1),
            b"1234",
            "a negative place",
        ),
        (
            struct.pack("<9sQBQQiqqq", b"MMIDIDX\0\0", 1, 3, 1, 2, 1, 0, 0, 1),
            b"\xff\xff",
            "token -1 is negative",
        ),
        (struct.pack("<9sQBQQiqqq", b"MMIDIDX\0\0", 1, 8, 1, 2, 5, 0, 0, 1), b"123", "within"),
        (struct.pack("<9sQBQQiqqq", b"MMIDIDX\0\0", 1, 8, 1, 2, 5, 0, 0, 1), None, "no such file"),
    ],
)
def test_what_megatron_does_not_write_is_refused_with_its_file(
    tmp_path: Path, index: bytes, tokens: bytes | None, says: str
) -> None:
    (tmp_path / "x.idx").write_bytes(index)
    if tokens is not None:
        (tmp_path / "x.bin").write_bytes(tokens)
    with pytest.raises(InputError, match=f"(?i){says}") as caught:
        list(documents(tmp_path / "x.idx"))
    assert str(caught.value.where).startswith(str(tmp_path / "x."))
    assert "preprocess_data.py" in str(caught.value.hint)
