"""Documents become the same tokens in this process and in several."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from primus_images.errors import HostError, InputError
from primus_images.training.text import batches
from primus_images.training.text.document import Document, Layout
from primus_images.training.text.pieces import Listed, Piece, Unreadable

WRONG = InputError("expected text", where="a.jsonl:7", hint="correct the row")


class Letters:
    """A tokenizer of one token a character, which cannot tokenize ``refused``.

    With a folder ``meeting``, a process waits there until another one tokenizes as well.
    """

    def __init__(self) -> None:
        self.remarks: Counter[str] = Counter()
        self.meeting: Path | None = None

    def _meet(self) -> None:
        if self.meeting is None:
            return
        (self.meeting / str(os.getpid())).touch()
        end = time.monotonic() + 60
        while len(list(self.meeting.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.01)

    def texts(self, texts: list[str]) -> list[list[int]]:
        self._meet()
        assert texts, "transformers raises IndexError without any"
        return [[*map(ord, text), os.getpid()] for text in texts]

    def document(
        self, document: Document, where: str, *, completions: bool
    ) -> tuple[list[int], list[int]]:
        self._meet()
        if document.text == "refused":
            raise InputError("the template refuses it", where=where)
        if document.text == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        self.remarks["thoughts"] += 1
        tokens = [*map(ord, document.text), os.getpid()]
        return tokens, [int(completions)] * len(tokens)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_CHARACTERS", 10)
    monkeypatch.setattr(batches, "_ALONE", 2)


def pieces(*texts: str | InputError) -> Iterator[Piece]:
    for number, text in enumerate(texts):
        row: object = text
        if isinstance(text, str):
            row = {"prompt": text, "completion": "", "text": text}
        yield Listed(listed=[(f"{number}", row)])


def work(folder: Path, *, prompted: bool, meeting: Path | None = None) -> batches.Work:
    encoder: Any = Letters()
    encoder.meeting = meeting
    columns = ["text"]
    if prompted:
        columns = ["prompt", "completion"]
    return batches.Work(
        encoder=encoder, layout=Layout(columns=columns), completions=True, folder=folder
    )


@pytest.mark.parametrize("prompted", [False, True])
def test_several_processes_keep_the_order_of_documents_and_errors(
    *, prompted: bool, tmp_path: Path
) -> None:
    texts: list[str | InputError] = [f"document {number}" for number in range(40)]
    texts[30] = WRONG
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    job = work(tmp_path, prompted=prompted, meeting=meeting)
    made = list(batches.tokenized(job, pieces(*texts)))
    owners = set()
    for text, shard in zip(texts, made, strict=True):
        if isinstance(text, InputError):
            ((before, error),) = shard.errors
            assert (before, str(error)) == (0, str(WRONG))
            continue
        ((tokens, mask),) = shard.documents()
        *letters, owner = tokens
        assert "".join(map(chr, letters)) == text
        assert list(mask) == [1] * len(tokens) * prompted
        owners.add(owner)
    assert os.getpid() not in owners, "one thread of Python computes at a time"
    assert len(owners) > 1
    remarks = sum((shard.remarks for shard in made), Counter())
    assert remarks["thoughts"] == 39 * prompted


def test_a_small_corpus_needs_no_other_process(tmp_path: Path) -> None:
    first, second = batches.tokenized(work(tmp_path, prompted=False), pieces("one", "two"))
    for shard in (first, second):
        ((tokens, _),) = shard.documents()
        assert tokens[-1] == os.getpid()


def test_a_piece_may_have_no_text(tmp_path: Path) -> None:
    (shard,) = batches.tokenized(work(tmp_path, prompted=False), pieces(WRONG))
    assert shard.errors == [(0, WRONG)]
    assert not list(shard.documents())


def test_rows_of_a_piece_keep_their_order(tmp_path: Path) -> None:
    rows = [("1", {"text": "a" * 20}), ("2", WRONG), ("3", {"text": " "}), ("4", {"text": "b"})]
    piece = Listed(listed=rows, size=7)
    (shard,) = batches.tokenized(work(tmp_path, prompted=False), iter([piece]))
    assert list(shard.lengths) == [21, 2]
    assert shard.errors == [(1, WRONG)]
    assert (shard.blank, shard.size) == (1, 7)
    shard.remove()
    assert not list(tmp_path.iterdir())


def test_a_document_that_a_process_refuses_is_an_error_in_its_place(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(9)]
    made = batches.tokenized(work(tmp_path, prompted=True), pieces(*texts, "refused", "the last"))
    errors = [shard.errors for shard in made]
    ((_, refused),) = errors.pop(9)
    assert str(refused) == "9: the template refuses it"
    assert errors == [[]] * 10


def test_a_document_too_long_for_the_memory_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_LONGEST", 9)
    rows = [("1", {"text": "nine byte"}), ("2", {"text": "ten  bytes"}), ("3", {"text": "b"})]
    (shard,) = batches.tokenized(work(tmp_path, prompted=False), iter([Listed(listed=rows)]))
    assert list(shard.lengths) == [10, 2]
    ((before, error),) = shard.errors
    assert (before, error.where) == (1, "2")
    assert "10 characters" in error.message


def test_what_cannot_be_read_is_refused_after_all_before_it(tmp_path: Path) -> None:
    several = chain(pieces(*"abcdefgh"), [Unreadable(error=WRONG)], pieces("i"))
    read = []
    with pytest.raises(InputError, match="expected text"):
        for shard in batches.tokenized(work(tmp_path, prompted=False), several):
            read += [chr(tokens[0]) for tokens, _ in shard.documents()]
    assert "".join(read) == "abcdefgh"


def test_a_killed_process_is_a_sentence(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(9)]
    made = batches.tokenized(work(tmp_path, prompted=True), pieces(*texts, "killed", "the last"))
    with pytest.raises(HostError, match="a process that tokenizes was killed"):
        list(made)


def test_no_process_outlives_what_reads_its_tokens(tmp_path: Path) -> None:
    made = batches.tokenized(work(tmp_path, prompted=False), pieces(*(["a document"] * 200)))
    owners = set()
    for _ in range(8):
        ((tokens, _),) = next(made).documents()
        owners.add(tokens[-1])
    made.close()
    assert owners
    for owner in owners:
        with pytest.raises(ProcessLookupError):
            os.kill(owner, 0)
