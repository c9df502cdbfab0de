"""The tokens of the pieces of a corpus, by all processors.

A piece becomes two files: only the numbers of what is in them go to the main process. A corpus of a
few pieces is tokenized there. For a larger one, each processor has a process, since only one thread
of Python computes at a time.
"""

import multiprocessing
import os
import signal
from array import array
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TypeAlias

from primus_images.errors import HostError, InputError
from primus_images.training.run.processes import ending_with
from primus_images.training.text.document import (
    Document,
    Layout,
    document_of,
    refuse_other_spellings,
)
from primus_images.training.text.encoder import Encoder
from primus_images.training.text.pieces import Piece

# Characters that are tokenized together: a process needs about 100 bytes for each.
_CHARACTERS = 1 << 18
# Characters of the longest document: this many need about 40 GB.
_LONGEST = 1 << 28
# Pieces that are tokenized without processes of their own, and that wait for each of these.
_ALONE = 16
_WAITING = 2
# Documents of a shard that need not be tokenized.
_DOCUMENTS = 1000

# A document and its place; or the error of a row that has none.
_Row = tuple[str, Document | InputError]
# The tokens of a document, and 1 for each that is trained; or why it has none.
_Encoded: TypeAlias = "tuple[array[int], bytes] | InputError"


@dataclass(kw_only=True)
class Shard:
    """The documents of a piece: their tokens, and 1 for each that is trained, in two files.

    ``lengths`` are the numbers of tokens. ``errors`` are the rows that have no document, each after
    so many documents, and ``blank`` is the number of those without text. ``remarks`` counts the
    documents with what may be a mistake of their author, and ``roles`` are those of their messages.
    ``size`` is that of the piece.
    """

    tokens: Path
    mask: Path
    size: int = 0
    lengths: "array[int]" = field(default_factory=lambda: array("I"))
    errors: list[tuple[int, InputError]] = field(default_factory=list)
    blank: int = 0
    remarks: Counter[str] = field(default_factory=Counter)
    roles: set[str] = field(default_factory=set)

    def write(self, documents: Iterator[_Encoded]) -> None:
        """Write the tokens of ``documents``."""
        with self.tokens.open("wb") as tokens_file, self.mask.open("wb") as mask_file:
            for encoded in documents:
                if isinstance(encoded, InputError):
                    self.errors.append((len(self.lengths), encoded))
                    continue
                tokens, mask = encoded
                tokens_file.write(tokens)
                mask_file.write(mask)
                self.lengths.append(len(tokens))

    def documents(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yield the tokens and the mask of each document."""
        tokens = array("I", self.tokens.read_bytes())
        mask = self.mask.read_bytes()
        end = 0
        for length in self.lengths:
            begin = end
            end += length
            yield tokens[begin:end], mask[begin:end]

    def remove(self) -> None:
        """Remove the files."""
        self.tokens.unlink()
        self.mask.unlink()


@dataclass(frozen=True, kw_only=True)
class Work:
    """How rows become tokens: those of ``layout``, by ``encoder``, in files of ``folder``.

    Without ``completions``, all tokens are trained.
    """

    encoder: Encoder
    layout: Layout
    completions: bool
    folder: Path

    def done(self, number: int, piece: Piece) -> Shard:
        """Return the shard of a piece, of a ``number`` of its own."""
        shard = Shard(
            tokens=self.folder / f"{number}.tokens",
            mask=self.folder / f"{number}.mask",
            size=piece.size,
        )
        self.encoder.remarks = shard.remarks
        batches = _batches(self._documents(piece, shard))
        shard.write(chain.from_iterable(map(self._encoded, batches)))
        return shard

    def _documents(self, piece: Piece, shard: Shard) -> Iterator[_Row]:
        """Yield the document of each row, or why it has none. Blank texts are left out."""
        prompted = self.layout.prompted
        for where, row in piece.rows():
            try:
                document = document_of(row, self.layout, where)
                if prompted and self.completions:
                    refuse_other_spellings(document, where)
                _refuse_too_long(document, where)
            except InputError as error:
                yield where, error
                continue
            for message in document.messages or ():
                shard.roles.add(message["role"])
            if not prompted and not document.text.strip():
                shard.blank += 1
                continue
            yield where, document

    def _encoded(self, rows: Sequence[_Row]) -> Sequence[_Encoded]:
        if self.layout.prompted:
            return [self._prompted(where, document) for where, document in rows]
        return self._plain(rows)

    def _prompted(self, where: str, document: Document | InputError) -> _Encoded:
        if isinstance(document, InputError):
            return document
        try:
            tokens, mask = self.encoder.document(document, where, completions=self.completions)
        except InputError as error:
            return error
        return array("I", tokens), bytes(mask)

    def _plain(self, rows: Sequence[_Row]) -> Sequence[_Encoded]:
        texts = [document.text for _, document in rows if isinstance(document, Document)]
        tokens: Iterator[Sequence[int]] = iter(())
        if texts:  # transformers fails without any
            tokens = iter(self.encoder.texts(texts))
        encoded: list[_Encoded] = []
        for _, document in rows:
            if isinstance(document, InputError):
                encoded.append(document)
            else:
                encoded.append((array("I", next(tokens)), b""))
        return encoded


def _refuse_too_long(document: Document, where: str) -> None:
    if len(document.text) > _LONGEST:
        raise InputError(
            f"this document has {len(document.text):,} characters, and one is tokenized as a "
            f"whole, in memory: at most {_LONGEST:,}",
            where=where,
            hint="divide it: in .txt, blank lines separate documents",
        )


def _batches(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    batch: list[_Row] = []
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


def tokenized(work: Work, pieces: Iterator[Piece]) -> Generator[Shard]:
    """Yield the shards of ``pieces`` in their order. Raises HostError if a process is killed."""
    first = list(islice(pieces, _ALONE + 1))
    if len(first) > _ALONE:
        yield from _by_processes(work, chain(first, pieces))
        return
    for number, piece in enumerate(first):
        yield work.done(number, piece)


def written(documents: Iterator[Sequence[int]], folder: Path) -> Generator[Shard]:
    """Yield ``documents`` that are tokens already, in files of ``folder``."""
    for number, first in enumerate(documents):
        shard = Shard(tokens=folder / f"{number}.tokens", mask=folder / f"{number}.mask")
        tokens = chain([first], documents)
        shard.write((array("I", document), b"") for document in islice(tokens, _DOCUMENTS))
        yield shard


def _by_processes(work: Work, pieces: Iterator[Piece]) -> Iterator[Shard]:
    processors = len(os.sched_getaffinity(0))
    # The tokenizer is loaded: a fork has it, and what it shares needs no memory.
    pool = ProcessPoolExecutor(
        processors,
        multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(work, os.getpid()),
    )
    waiting: deque[Future[Shard]] = deque()
    try:
        for number, piece in enumerate(pieces):
            waiting.append(pool.submit(_done, number, piece))
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


def _done(number: int, piece: Piece) -> Shard:
    assert _work is not None
    return _work.done(number, piece)
