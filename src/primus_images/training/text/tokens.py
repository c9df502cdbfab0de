"""The tokens of a corpus, in files that ranks map into memory."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from primus_images.errors import InputError
from primus_images.files import write_file
from primus_images.recipes.weights import HUB
from primus_images.terminal import counted
from primus_images.training.text import corpus as corpora
from primus_images.training.text.corpus import Corpus, Files, Layout
from primus_images.training.text.encoder import Encoder

if TYPE_CHECKING:
    import numpy as np

# Characters that are tokenized in one call.
_BATCH = 1 << 20
_EVERY = 1_000_000


class Reader:
    """The documents of a corpus as tokens. ``layout`` is that of its first row. Raises InputError
    if it has none.
    """

    def __init__(self, corpus: Corpus, made: Iterable[str] | None = None) -> None:
        self.corpus = corpus
        if not corpus.name.startswith(HUB) and not corpus.tokenizer.startswith(HUB):
            os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        if made or corpus.name.startswith(HUB):
            self.files = Files(paths=[])
        else:
            self.files = corpora.files_of(corpus)
        if made:
            every = ((str(n), {"text": text}) for n, text in enumerate(made))
        else:
            every = corpora.rows(corpus, self.files)
        first = next(every, None)
        if first is None:
            raise InputError("the corpus contains no text", where=corpus.name)
        self.layout: Layout = corpora.layout_of(first[1], corpus.column, first[0])
        self._rows = chain([first], every)
        self.encoder = Encoder(corpus.tokenizer)

    @property
    def masked(self) -> bool:
        """Whether only some tokens are trained."""
        return self.layout.prompted and self.corpus.completions

    def __iter__(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yield the tokens of each document that is not empty, and 1 for each that is trained; no
        mask: all are.
        """
        texts = list[str]()
        size = 0
        roles = set[str]()
        for where, row in self._rows:
            document = corpora.document_of(row, self.layout, where)
            roles.update(turn["role"] for turn in document.messages or ())
            if self.layout.prompted:
                yield self.encoder.document(document, where, completions=self.corpus.completions)
            elif document.text.strip():
                texts.append(document.text)
                size += len(document.text)
                if size > _BATCH:
                    yield from ((tokens, ()) for tokens in self.encoder.texts(texts))
                    texts = []
                    size = 0
        if texts:
            yield from ((tokens, ()) for tokens in self.encoder.texts(texts))
        if roles and "assistant" not in roles and self.masked:
            roles_text = ", ".join(sorted(roles))
            raise InputError(
                "no message has the role assistant, whose words are trained; the roles are "
                f"{roles_text}",
                where=self.corpus.name,
                hint="give the answers that role; or data.train_on=all trains every token",
            )

    def sentence(self, figures: Mapping[str, Any], seq_len: int, head: str = "") -> str:
        """Return what was read, with the figures of :func:`figures_of`, in one line that begins
        with ``head``.
        """
        if self.layout.chat:
            kind = "chat"
        else:
            kind = "document"
            if self.layout.prompted:
                kind = "answer"
        marks = (
            ("BOS", self.encoder.begin, figures["begin"]),
            ("trained EOS", self.encoder.end, figures["end"]),
        )
        parts = [
            f"{counted(figures['documents'], kind)} in {' and '.join(self.layout.columns)}, "
            f"{figures['tokens']:,} tokens"
            + (f", {figures['trained']:.0%} of them trained" if self.masked else ""),
            f"longest {figures['longest']:,}, {figures['longer']:.0%} "
            f"{'cut at' if self.masked else 'longer than'} "
            f"seq_len {seq_len:,}",
            ", ".join(
                f"no {name}" if mark is None else f"{name} in {share:.0%}"
                for name, mark, share in marks
            ),
        ]
        if figures["left_out"]:
            parts.append(f"{figures['left_out']:,} left out, which have no answer there")
        if self.files.split:
            parts.append(f"split {self.files.split}")
        if self.layout.unused:
            parts.append(f"unused columns: {', '.join(self.layout.unused)}")
        if self.files.others:
            parts.append(f"files not read: {', '.join(self.files.others)}")
        return f"{head}{self.corpus.name}: {'; '.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of documents, one after the other: document n ends before ``tokens[ends[n]]``.

    ``mask`` is 1 for every token that is trained; None if all are.
    """

    tokens: np.ndarray
    ends: np.ndarray
    mask: np.ndarray | None = None

    def document(self, number: int) -> slice:
        """Return the place of a document in ``tokens`` and ``mask``."""
        return slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))

    def repeated(self, others: Tokens) -> int:
        """Return how many documents are among those of ``others``, too."""
        theirs = {hash(document) for document in others._documents()}
        return sum(hash(document) in theirs for document in self._documents())

    def _documents(self) -> Iterator[bytes]:
        return (self.tokens[self.document(number)].tobytes() for number in range(len(self.ends)))

    def pieces(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where pieces of at most ``seq_len`` + 1 tokens begin and end that are trained on
        their own.

        With a mask, they are the beginnings of documents that have a label there; without, every
        token but the first of a document is the label of one.
        """
        import numpy as np

        starts = np.concatenate(([0], self.ends[:-1]))
        if self.mask is not None:
            ends = np.minimum(starts + seq_len + 1, self.ends)
            trained = np.flatnonzero(self.mask)
            kept = np.searchsorted(trained, ends) > np.searchsorted(trained, starts + 1)
            return starts[kept], ends[kept]
        counts = -(-(self.ends - starts - 1) // seq_len)
        numbers = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        starts = np.repeat(starts, counts) + numbers * seq_len
        return starts, np.minimum(starts + seq_len + 1, np.repeat(self.ends, counts))

    def samples(self, seq_len: int, *, packing: bool) -> int:
        """Return the number of samples of one epoch. Without mask and ``packing``, documents are
        one stream.
        """
        if self.mask is None and not packing:
            return (len(self.tokens) - 1) // seq_len
        starts, ends = self.pieces(seq_len)
        if packing:
            return len(packs((ends - starts - 1).tolist(), seq_len))
        return len(starts)


def packs(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return samples of up to ``size`` tokens, each a list of the numbers of its documents, which
    have ``lengths``.

    Best fit, the longest documents first: each goes to the sample with the least room for it, of
    several to the one that was filled last.
    """
    samples: list[list[int]] = []
    # Of each sample with room for a document: its room, less the turn in which it was filled, and
    # its number.
    rooms: list[tuple[int, int, int]] = []
    shortest = min(lengths, default=0)
    for turn, number in enumerate(sorted(range(len(lengths)), key=lambda number: -lengths[number])):
        place = bisect_left(rooms, (lengths[number],))
        if place < len(rooms):
            room, _, sample = rooms.pop(place)
        else:
            room = size
            sample = len(samples)
            samples.append([])
        samples[sample].append(number)
        room = room - lengths[number]
        if room >= shortest:
            insort(rooms, (room, -turn, sample))
    return samples


def figures_of(tokens: Tokens, seq_len: int, encoder: Encoder) -> dict[str, Any]:
    """Return figures of ``tokens``, made by ``encoder``: numbers of ``documents``, of ``tokens``
    and of those of the ``longest`` document, and shares of 1: of the tokens, those that are
    ``trained``; of the documents, those that are ``longer`` than ``seq_len`` + 1 tokens, that begin
    with BOS (``begin``), and in which EOS is trained (``end``). ``left_out`` documents have no
    answer.
    """
    import numpy as np

    count = len(tokens.ends)
    starts = np.concatenate(([0], tokens.ends[:-1]))
    lengths = tokens.ends - starts
    ends = tokens.tokens == (-1 if encoder.end is None else encoder.end)
    ends = np.flatnonzero(ends if tokens.mask is None else ends & (tokens.mask != 0))
    begins = tokens.tokens[starts[lengths > 0]] == (-1 if encoder.begin is None else encoder.begin)
    return {
        "documents": count,
        "tokens": len(tokens.tokens),
        "longest": int(lengths.max()),
        "trained": 1.0 if tokens.mask is None else float(tokens.mask.mean()),
        "longer": float((lengths > seq_len + 1).mean()),
        "left_out": 0 if tokens.mask is None else count - len(tokens.pieces(seq_len)[0]),
        "begin": float(begins.sum()) / count,
        "end": len(np.unique(np.searchsorted(tokens.ends, ends, "right"))) / count,
    }


def stored(folder: Path, name: str = "train") -> Tokens:
    """Return the tokens that :func:`write` left in ``folder``, mapped into memory."""
    import numpy as np

    mask = folder / f"{name}.mask"
    return Tokens(
        tokens=np.memmap(folder / f"{name}.tokens", np.uint32, "r"),
        ends=np.fromfile(folder / f"{name}.ends", np.int64),
        mask=np.memmap(mask, np.uint8, "r") if mask.exists() else None,
    )


def write(
    reader: Reader,
    folder: Path,
    *,
    name: str = "train",
    held_out: float = 0.0,
    progress: Callable[[str], None],
) -> None:
    """Write the tokens of ``reader`` for :func:`stored`. Raises InputError if there are no
    documents.

    ``held_out`` is the share of the documents, evenly spread, that goes to the name ``eval``
    instead.
    """
    sinks = {name: _Sink(folder, name), **({"eval": _Sink(folder, "eval")} if held_out else {})}
    for number, (tokens, mask) in enumerate(reader):
        held = int((number + 1) * held_out) > int(number * held_out)
        sinks["eval" if held else name].add(tokens, mask)
        if (number + 1) % _EVERY == 0:
            progress(f"{number + 1:,} documents are tokenized")
    for sink in sinks.values():
        if not sink.ends or not sink.ends[-1]:
            lacking = "no text"
            if held_out:
                lacking = f"too few documents for eval.fraction={held_out}"
            raise InputError(f"the corpus contains {lacking}", where=reader.corpus.name)
        sink.close(masked=reader.masked)


# The nodes of a job write the same files: each under names of its own first.
class _Sink:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name, self.ends = folder, name, array("q")
        self._waiting = {
            kind: folder / f".{name}.{kind}.{os.urandom(6).hex()}" for kind in ("tokens", "mask")
        }
        self._files: dict[str, IO[bytes]] = {
            kind: path.open("wb") for kind, path in self._waiting.items()
        }

    def add(self, tokens: Sequence[int], mask: Sequence[int]) -> None:
        self._files["tokens"].write(array("I", tokens).tobytes())
        self._files["mask"].write(bytes(mask))
        self.ends.append(len(tokens) + (self.ends[-1] if self.ends else 0))

    def close(self, *, masked: bool) -> None:
        for kind, file in self._files.items():
            file.close()
            if kind == "tokens" or masked:
                self._waiting[kind].replace(self._folder / f"{self._name}.{kind}")
        self._waiting["mask"].unlink(missing_ok=True)
        write_file(self._folder / f"{self._name}.ends", self.ends.tobytes())
