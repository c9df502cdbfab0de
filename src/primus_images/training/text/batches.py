"""The tokens of documents by all processors, batch by batch.

The first batches are tokenized in this process: most corpora are no longer. For the rest, each
processor has a process, since only one thread of Python computes at a time.
"""

import multiprocessing
import os
import signal
from array import array
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from primus_images.errors import HostError, InputError
from primus_images.training.run.processes import ending_with
from primus_images.training.text.document import Document
from primus_images.training.text.encoder import Encoder

# Characters of a batch: a process needs about 100 bytes for each.
_CHARACTERS = 1 << 18
# Batches that are tokenized before there are processes, and that wait for each of these.
_ALONE = 64
_WAITING = 2

# A document and its place; or the error of a row that has none.
Row = tuple[str, Document | InputError]
# The tokens of a document, and 1 for each that is trained; or why it has none.
Encoded: TypeAlias = "tuple[array[int], bytes] | InputError"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What became of the rows of a batch, in their order.

    ``remarks`` counts the documents with what may be a mistake of their author.
    """

    encoded: Sequence[Encoded]
    remarks: Counter[str]


@dataclass(frozen=True, kw_only=True)
class Work:
    """How documents become tokens: plain texts, or if ``prompted``, with a mask.

    Without ``completions``, all tokens are trained.
    """

    encoder: Encoder
    prompted: bool
    completions: bool

    def done(self, rows: Sequence[Row]) -> Batch:
        """Return the tokens of ``rows``."""
        self.encoder.remarks = Counter()
        if self.prompted:
            encoded = [self._prompted(where, document) for where, document in rows]
        else:
            encoded = self._plain(rows)
        return Batch(encoded=encoded, remarks=self.encoder.remarks)

    def _prompted(self, where: str, document: Document | InputError) -> Encoded:
        if isinstance(document, InputError):
            return document
        try:
            tokens, mask = self.encoder.document(document, where, completions=self.completions)
        except InputError as error:
            return error
        return array("I", tokens), bytes(mask)

    def _plain(self, rows: Sequence[Row]) -> list[Encoded]:
        texts = [document.text for _, document in rows if isinstance(document, Document)]
        tokens: Iterator[Sequence[int]] = iter(())
        if texts:  # transformers fails without any
            tokens = iter(self.encoder.texts(texts))
        encoded: list[Encoded] = []
        for _, document in rows:
            if isinstance(document, InputError):
                encoded.append(document)
            else:
                encoded.append((array("I", next(tokens)), b""))
        return encoded


def tokenized(work: Work, rows: Iterator[Row]) -> Generator[Batch]:
    """Yield the batches of ``rows`` in their order. Raises HostError if a process is killed."""
    batches = _batches(rows)
    for batch in islice(batches, _ALONE):
        yield work.done(batch)
    second = next(batches, None)
    if second is None:
        return
    yield from _by_processes(work, second, batches)


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = 0
    for where, document in rows:
        batch.append((where, document))
        if isinstance(document, Document):
            size += len(document.text) or len(str(document.messages))
        if size > _CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _by_processes(work: Work, first: list[Row], rest: Iterator[list[Row]]) -> Iterator[Batch]:
    processors = len(os.sched_getaffinity(0))
    # The tokenizer is loaded: a fork has it, and what it shares needs no memory.
    pool = ProcessPoolExecutor(
        processors,
        multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(work, os.getpid()),
    )
    waiting: deque[Future[Batch]] = deque([pool.submit(_done, first)])
    try:
        for batch in rest:
            waiting.append(pool.submit(_done, batch))
            if len(waiting) > _WAITING * processors:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise HostError(
            "a process that tokenizes was killed, perhaps for lack of memory",
            hint="allow more memory, or fewer processors (taskset)",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_work: Work | None = None


def _begin(work: Work, parent: int) -> None:
    """Begin a process: it leaves Ctrl-C to its parent, and ends with it."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ending_with(parent)()
    # The threads of the tokenizer are not in a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _done(rows: Sequence[Row]) -> Batch:
    assert _work is not None
    return _work.done(rows)
