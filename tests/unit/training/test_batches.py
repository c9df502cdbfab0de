"""Documents become the same tokens in this process and in several."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from primus_images.errors import HostError, InputError
from primus_images.training.text import batches
from primus_images.training.text.document import Document

WRONG = InputError("expected text", where="a.jsonl:7", hint="correct the row")


class Letters:
    """A tokenizer of one token a character, which cannot tokenize ``refused``."""

    def __init__(self) -> None:
        self.remarks: Counter[str] = Counter()
        self.processes: set[int] = set()

    def texts(self, texts: list[str]) -> list[list[int]]:
        assert texts, "transformers raises IndexError without any"
        return [[*map(ord, text), os.getpid()] for text in texts]

    def document(
        self, document: Document, where: str, *, completions: bool
    ) -> tuple[list[int], list[int]]:
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


def rows(*texts: str | InputError) -> Iterator[batches.Row]:
    for number, text in enumerate(texts):
        if isinstance(text, InputError):
            yield f"{number}", text
        else:
            yield f"{number}", Document(text=text)


def work(*, prompted: bool) -> batches.Work:
    encoder: Any = Letters()
    return batches.Work(encoder=encoder, prompted=prompted, completions=True)


@pytest.mark.parametrize("prompted", [False, True])
def test_several_processes_keep_the_order_of_documents_and_errors(*, prompted: bool) -> None:
    texts: list[str | InputError] = [f"document {number}" for number in range(40)]
    texts[30] = WRONG
    made = list(batches.tokenized(work(prompted=prompted), rows(*texts)))
    documents = [document for batch in made for document in batch.encoded]
    owners = set()
    for text, document in zip(texts, documents, strict=True):
        if isinstance(text, InputError):
            assert isinstance(document, InputError)
            assert str(document) == str(WRONG)
            continue
        assert isinstance(document, tuple)
        tokens, mask = document
        *letters, owner = tokens
        assert "".join(map(chr, letters)) == text
        assert list(mask) == [1] * len(tokens) * prompted
        owners.add(owner)
    assert os.getpid() in owners, "the first batches need no other process"
    assert len(owners) > 1
    remarks = sum((batch.remarks for batch in made), Counter())
    assert remarks["thoughts"] == 39 * prompted


def test_a_batch_may_have_no_text() -> None:
    (batch,) = batches.tokenized(work(prompted=False), rows(WRONG))
    assert batch.encoded == [WRONG]


def test_a_document_that_a_process_refuses_is_an_error_in_its_place() -> None:
    texts = [f"document {number}" for number in range(9)]
    made = batches.tokenized(work(prompted=True), rows(*texts, "refused", "the last"))
    documents = [document for batch in made for document in batch.encoded]
    refused = documents[9]
    assert isinstance(refused, InputError)
    assert str(refused) == "9: the template refuses it"
    assert len(documents) == 11


def test_a_killed_process_is_a_sentence() -> None:
    texts = [f"document {number}" for number in range(9)]
    made = batches.tokenized(work(prompted=True), rows(*texts, "killed", "the last"))
    with pytest.raises(HostError, match="a process that tokenizes was killed"):
        list(made)


def test_no_process_outlives_what_reads_its_tokens() -> None:
    made = batches.tokenized(work(prompted=False), rows(*(["a document"] * 200)))
    owners = set()
    for _ in range(8):
        for document in next(made).encoded:
            assert isinstance(document, tuple)
            owners.add(document[0][-1])
    made.close()  # type: ignore[attr-defined]
    owners.remove(os.getpid())
    assert owners
    for owner in owners:
        with pytest.raises(ProcessLookupError):
            os.kill(owner, 0)
