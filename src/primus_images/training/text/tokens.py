"""The tokens of a corpus, in files that ranks map into memory."""

from __future__ import annotations

import json
import math
import mmap
import os
import time
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any

from primus_images.errors import InputError, PrimusError
from primus_images.files import text_if_readable, write_file
from primus_images.recipes.indexed import TOKENS, is_index
from primus_images.recipes.weights import HUB
from primus_images.terminal import counted
from primus_images.training.text import batches, corpus as corpora, indexed
from primus_images.training.text.batches import Shard
from primus_images.training.text.corpus import Corpus, Files
from primus_images.training.text.document import Layout, layout_of
from primus_images.training.text.encoder import Encoder
from primus_images.training.text.pieces import Piece, Rest
from primus_images.training.text.rows import TABLE, form_of

if TYPE_CHECKING:
    import numpy as np

# Tokens of documents that are looked at together.
_BLOCK = 1 << 22
# Seconds between two lines about how far a corpus is tokenized.
_SECONDS = 30.0
# Bytes that are copied at once.
_COPY = 1 << 20
# The names of the corpora of a mixture, and the number of each document's one.
_CORPORA = "corpora.json"
_OWNERS = "owners"
# The file of a run that names the rows that were left out.
SKIPPED = "skipped.jsonl"


class Reader:
    """The documents of a corpus as tokens.

    ``layout`` is that of the first row. ``remarks`` counts the documents with what may be a
    mistake of their author. Raises InputError if there is no row.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        on_hub = corpus.name.startswith(HUB)
        if not on_hub and not corpus.tokenizer.startswith(HUB):
            os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        self.files = Files(paths=[])
        if not on_hub:
            self.files = corpora.files_of(corpus)
        self.skipped: list[InputError] = []
        self.remarks: Counter[str] = Counter()
        self._read = 0
        self._size = 0
        self._roles: set[str] = set()
        self._indexed: Iterator[Sequence[int]] | None = None
        self._pieces: Iterator[Piece] = iter(())
        self._source = corpora.pieces(corpus, self.files)
        if self.files.paths and is_index(self.files.paths[0]):
            self._indexed = self._of_indexes(self.files.paths)
            self.layout = Layout(columns=[f"{TOKENS} files"])
        else:
            try:
                self.layout, first = self._first()
            except PrimusError:
                self._source.close()
                raise
            self._pieces = chain([first], self._source)
        self.encoder = Encoder(corpus.tokenizer, corpus.template)

    def _of_indexes(self, indexes: Sequence[Path]) -> Iterator[Sequence[int]]:
        """Return the documents of tokenized files, which have no columns to choose from."""
        if self.corpus.column or self.corpus.question:
            raise InputError(
                "tokens have no columns: leave data.column and data.question out",
                where=self.corpus.name,
            )
        return filter(None, chain.from_iterable(map(indexed.documents, indexes)))

    def _first(self) -> tuple[Layout, Piece]:
        """Return the layout of the first row that can be read, and the piece that begins there."""
        turns = None
        if self.corpus.question and self.corpus.answer:
            turns = (self.corpus.question, self.corpus.answer)
        for piece in self._source:
            for number, (where, row) in enumerate(piece.rows()):
                try:
                    layout = layout_of(row, self.corpus.column, where, turns)
                except InputError as error:
                    self._read += 1
                    self._skip(error)
                else:
                    self._refuse_json(row, where)
                    return layout, Rest(piece=piece, count=number, size=piece.size)
            self._size += piece.size
        if self.skipped:
            raise self.skipped[0]
        raise InputError("the corpus contains no text", where=self.corpus.name)

    def _refuse_json(self, row: Any, where: str) -> None:
        """Refuse plain text that is JSON, unless the user names its column."""
        if self.corpus.column or not self.files.paths or form_of(self.files.paths[0]) != ".txt":
            return
        value: Any = None
        with suppress(ValueError, RecursionError):
            value = json.loads(str(row["text"]).partition("\n")[0])
        if isinstance(value, dict):
            raise InputError(
                "this is JSON in a file of plain text",
                where=where,
                hint="name the file .jsonl; or data.column=text trains it as it is written",
            )

    @property
    def share(self) -> float | None:
        """The share of the corpus that is read, by bytes of its files; None if it has no files.

        Those of a table count when it ends.
        """
        size = sum(file.stat().st_size for file in self.files.paths)
        if not size or self._indexed is not None:
            return None
        return self._size / size

    @property
    def masked(self) -> bool:
        """Whether only some tokens are trained."""
        return self.layout.prompted and self.corpus.completions

    def __iter__(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yield the tokens of each document that is not empty, and 1 for each that is trained.

        Without a mask, all are.
        """
        with TemporaryDirectory() as folder, closing(self.shards(Path(folder))) as shards:
            for shard in shards:
                yield from shard.documents()

    def shards(self, folder: Path) -> Generator[Shard]:
        """Yield all documents in order, in files of ``folder`` that the caller removes."""
        if self._indexed is not None:
            yield from batches.written(self._indexed, folder)
        else:
            # What is refused in the middle leaves no file open.
            with closing(self._source), closing(self._made(folder)) as made:
                yield from made
        self._refuse_many_skipped()

    def _made(self, folder: Path) -> Generator[Shard]:
        work = batches.Work(
            encoder=self.encoder,
            layout=self.layout,
            completions=self.corpus.completions,
            folder=folder,
        )
        with closing(batches.tokenized(work, self._pieces)) as shards:
            for shard in shards:
                self._count(shard)
                yield shard
        if self.masked and self._roles and "assistant" not in self._roles:
            raise InputError(
                "no message has the role assistant, whose words are trained; the roles are "
                f"{', '.join(sorted(self._roles))}",
                where=self.corpus.name,
                hint="give the answers that role; or data.train_on=all trains every token",
            )

    def _count(self, shard: Shard) -> None:
        """Count the rows of a shard. Raises the error of its first wrong one if none is skipped."""
        self._size += shard.size
        self._roles |= shard.roles
        self.remarks += shard.remarks
        before = self._read + shard.blank
        for number, (documents, error) in enumerate(shard.errors, 1):
            self._read = before + documents + number
            self._skip(error)
        self._read = before + len(shard.lengths) + len(shard.errors)

    def _skip(self, error: InputError) -> None:
        """Leave out the row that ``error`` is about. Raises it if the corpus skips none."""
        if not self.corpus.skip:
            hint = error.hint
            if self._read > 1:
                hint = f"{hint or 'correct the row'}; or data.skip=1% leaves out such rows"
            raise InputError(error.message, where=error.where, hint=hint) from error
        self.skipped.append(error)

    def _refuse_many_skipped(self) -> None:
        count = len(self.skipped)
        if count <= self.corpus.skip * self._read:
            return
        first = self.skipped[0]
        raise InputError(
            f"{count:,} of {self._read:,} rows cannot be read, more than "
            f"data.skip={100 * self.corpus.skip:.9g}%; the first: {first.message}",
            where=first.where,
            hint=first.hint,
        )

    def sentence(self, figures: Mapping[str, Any], seq_len: int, head: str = "") -> str:
        """Return what was read in one line that begins with ``head``.

        ``figures`` are those of :func:`figures_of`.
        """
        parts = [
            self._amount(figures),
            self._lengths(figures, seq_len),
            ", ".join(
                [
                    _share("BOS", self.encoder.begin, figures["begin"]),
                    _share("trained EOS", self.encoder.end, figures["end"]),
                ]
            ),
        ]
        if figures["left_out"]:
            parts.append(f"{figures['left_out']:,} left out, which have no answer there")
        if self.skipped:
            parts.append(f"{counted(len(self.skipped), 'row')} left out that cannot be read")
        for remark, documents in self.remarks.items():
            parts.append(f"{remark} in {counted(documents, self._kind)}")
        others = sorted(self._roles - {"assistant", *TABLE["silent_roles"]})
        if self.masked and others:
            parts.append(f"no word of these roles is trained: {', '.join(others)}")
        texts = [file for file in self.files.paths if form_of(file) == ".txt"]
        if texts and len(texts) < figures["documents"]:
            parts.append(f"blank lines divide {counted(len(texts), 'file')}; JSON keeps them")
        if self.files.split:
            parts.append(f"split {self.files.split}")
        if self.layout.unused:
            parts.append(f"unused columns: {', '.join(self.layout.unused)}")
        if self.files.others:
            parts.append(f"files not read: {', '.join(self.files.others)}")
        return f"{head}{self.corpus.name}: {'; '.join(parts)}"

    @property
    def _kind(self) -> str:
        if self.layout.chat or self.layout.turns:
            return "chat"
        if self.layout.prompted:
            return "answer"
        return "document"

    def _amount(self, figures: Mapping[str, Any]) -> str:
        columns = " and ".join(self.layout.columns)
        documents = f"{counted(figures['documents'], self._kind)} in {columns}"
        amount = f"{documents}, {figures['tokens']:,} tokens"
        if self.masked:
            amount += f", {figures['trained']:.0%} of them trained"
        return amount

    def _lengths(self, figures: Mapping[str, Any], seq_len: int) -> str:
        relation = "longer than"
        if self.masked:
            relation = "cut at"
        longer = f"{figures['longer']:.0%} {relation} seq_len {seq_len:,}"
        return f"longest {figures['longest']:,}, {longer}"


def _share(name: str, mark: int | None, share: float) -> str:
    if mark is None:
        return f"no {name}"
    return f"{name} in {share:.0%}"


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of documents, one after the other: document n ends before ``tokens[ends[n]]``.

    ``mask`` is 1 for every token that is trained; None if all are. ``corpora`` are the names of
    those of which they are a mixture, and ``owners`` has the number of each document's one. Those
    of another than ``chosen`` are not trained, if it is not None.
    """

    tokens: np.ndarray
    ends: np.ndarray
    mask: np.ndarray | None = None
    corpora: Sequence[str] = ()
    owners: np.ndarray | None = None
    chosen: int | None = None

    def document(self, number: int) -> slice:
        """Return the place of a document in ``tokens`` and ``mask``."""
        begin = 0
        if number:
            begin = int(self.ends[number - 1])
        return slice(begin, int(self.ends[number]))

    def repeated(self, others: Tokens) -> int:
        """Return how many documents are among those of ``others``, too."""
        mine = Counter(map(hash, self._documents()))
        common = {number for number in map(hash, others._documents()) if number in mine}
        return sum(mine[number] for number in common)

    def blocks(self) -> Iterator[Tokens]:
        """Yield all documents in order, as many at a time as need little memory."""
        first = 0
        while first < len(self.ends):
            begin = self.document(first).start
            last = int(self.ends.searchsorted(begin + _BLOCK, "right"))
            last = max(last, first + 1)
            ends = self.ends[first:last]
            place = slice(begin, int(ends[-1]))
            mask = None
            if self.mask is not None:
                mask = self.mask[place]
            yield Tokens(tokens=self.tokens[place], ends=ends - begin, mask=mask)
            self._release()
            first = last

    def _release(self) -> None:
        """Give back the memory of mapped files, which counts as this process's once it is read."""
        for values in (self.tokens, self.mask):
            if values is not None and isinstance(values.base, mmap.mmap):
                values.base.madvise(mmap.MADV_DONTNEED)

    def _documents(self) -> Iterator[bytes]:
        return (self.tokens[self.document(number)].tobytes() for number in range(len(self.ends)))

    def pieces(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the pieces that are trained on their own begin and end.

        They have at most ``seq_len`` + 1 tokens. With a mask, they are the beginnings of documents
        that have a label there; without, every token but the first of a document is the label of
        one.
        """
        starts, ends = self._pieces(seq_len)
        if self.owners is None or self.chosen is None:
            return starts, ends
        owners = self.owners[self.ends.searchsorted(starts, "right")]
        return starts[owners == self.chosen], ends[owners == self.chosen]

    def _pieces(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
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
        """Return the number of samples of one epoch.

        Without mask and ``packing``, documents are one stream.
        """
        if self.mask is None and not packing:
            return (len(self.tokens) - 1) // seq_len
        starts, ends = self.pieces(seq_len)
        if packing:
            return len(packs((ends - starts - 1).tolist(), seq_len))
        return len(starts)


def packs(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return samples of up to ``size`` tokens, each a list of the numbers of its documents.

    The documents have ``lengths``. Best fit, the longest documents first: each goes to the sample
    with the least room for it, of several to the one that was filled last.
    """
    samples: list[list[int]] = []
    # Of each sample with room for a document: its room, less the turn in which it was filled, and
    # its number.
    rooms: list[tuple[int, int, int]] = []
    shortest = min(lengths, default=0)
    longest_first = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    for turn, number in enumerate(longest_first):
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
    """Return figures of ``tokens``, which ``encoder`` made.

    They are numbers of ``documents``, of ``tokens`` and of those of the ``longest`` document, and
    shares of 1: of the tokens, those that are ``trained``; of the documents, those that are
    ``longer`` than ``seq_len`` + 1 tokens, that begin with BOS (``begin``), and in which EOS is
    trained (``end``). ``left_out`` documents have no answer. What is cut off is not trained.
    """
    import numpy as np

    count = len(tokens.ends)
    lengths = np.diff(tokens.ends, prepend=0)
    trained = 0
    left_out = 0
    begin = 0
    end = 0
    for block in tokens.blocks():
        starts = np.concatenate(([0], block.ends[:-1]))
        begin += int(_equal(block.tokens[starts[starts < block.ends]], encoder.begin).sum())
        is_end = _equal(block.tokens, encoder.end)
        if block.mask is None:
            trained += len(block.tokens)
        else:
            is_label = _labels(block, seq_len)
            is_end = is_end & is_label
            trained += int(is_label.sum())
            left_out += len(block.ends) - len(block.pieces(seq_len)[0])
        documents_with_end = np.searchsorted(block.ends, np.flatnonzero(is_end), "right")
        end += len(np.unique(documents_with_end))
    return {
        "documents": count,
        "tokens": len(tokens.tokens),
        "longest": int(lengths.max()),
        "trained": trained / len(tokens.tokens),
        "longer": float((lengths > seq_len + 1).mean()),
        "left_out": left_out,
        "begin": begin / count,
        "end": end / count,
    }


def _labels(tokens: Tokens, seq_len: int) -> Any:
    """Return whether each token is trained: marked, not the first of its document, and not cut."""
    import numpy as np

    # The labels of a piece are all of its tokens but the first. The sum of the changes up to a
    # token is the number of pieces that it is a label of.
    changes = np.zeros(len(tokens.tokens) + 1, np.int8)
    starts, ends = tokens.pieces(seq_len)
    np.add.at(changes, starts + 1, 1)
    np.subtract.at(changes, ends, 1)
    return (changes.cumsum()[:-1] > 0) & (tokens.mask != 0)


def _equal(tokens: np.ndarray, mark: int | None) -> Any:
    if mark is None:
        mark = -1  # no token
    return tokens == mark


def stored(folder: Path, name: str = "train") -> Tokens:
    """Return the tokens that :func:`write` left in ``folder``, mapped into memory."""
    import numpy as np

    mask = folder / f"{name}.mask"
    owners = folder / f"{name}.{_OWNERS}"
    corpora = folder / f"{name}.{_CORPORA}"
    return Tokens(
        tokens=np.memmap(folder / f"{name}.tokens", np.uint32, "r"),
        ends=np.fromfile(folder / f"{name}.ends", np.int64),
        mask=np.memmap(mask, np.uint8, "r") if mask.exists() else None,
        corpora=json.loads(corpora.read_text(encoding="utf-8")) if corpora.exists() else (),
        owners=np.fromfile(owners, np.uint16) if owners.exists() else None,
    )


def counts(folder: Path, name: str = "train") -> tuple[int, int]:
    """Return the numbers of documents and tokens that :func:`write` left in ``folder``.

    They are read from the sizes of the files, without NumPy; 0 without files.
    """
    documents = _size(folder / f"{name}.ends") // array("q").itemsize
    tokens = _size(folder / f"{name}.tokens") // array("I").itemsize
    return documents, tokens


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def write(
    reader: Reader,
    folder: Path,
    *,
    name: str = "train",
    held_out: float = 0.0,
    progress: Callable[[str], None],
) -> None:
    """Write the tokens of ``reader`` for :func:`stored`. Raises InputError if there are none.

    ``held_out`` is the share of the documents, evenly spread, that goes instead to the name with
    ``eval`` in place of ``train``.
    """
    train = _Sink(folder, name)
    sinks = [train]
    if held_out:
        sinks.append(_Sink(folder, name.replace("train", "eval")))
    with ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.discard)
        parts = stack.enter_context(TemporaryDirectory(dir=folder, prefix=f".{name}."))
        shards = stack.enter_context(closing(reader.shards(Path(parts))))
        began = time.monotonic()
        due = began + _SECONDS
        number = 0
        for shard in shards:
            _append(shard, sinks, number, held_out)
            shard.remove()
            number += len(shard.lengths)
            now = time.monotonic()
            if now > due:
                due = now + _SECONDS
                progress(_so_far(number, reader.share, now - began))
        if any(sink.empty for sink in sinks):
            lacking = "no text"
            if held_out:
                lacking = f"too few documents for eval.fraction={held_out}"
            raise InputError(f"the corpus contains {lacking}", where=reader.corpus.name)
        for sink in sinks:
            sink.keep(masked=reader.masked)
        if reader.skipped:
            lines = []
            for error in reader.skipped:
                row = {"where": error.where, "why": error.message}
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
            write_file(folder / f"{name}.{SKIPPED}", "".join(lines))


def _append(shard: Shard, sinks: Sequence[_Sink], first: int, held_out: float) -> None:
    """Append the documents of a shard, the first of which has the number ``first``."""

    def is_held_out(document: tuple[int, int]) -> bool:
        number, _ = document
        return int((number + 1) * held_out) > int(number * held_out)

    with shard.tokens.open("rb") as tokens, shard.mask.open("rb") as mask:
        if not held_out:
            sinks[0].take(tokens, mask, shard.lengths)
            return
        for chosen, run in groupby(enumerate(shard.lengths, first), is_held_out):
            sink = sinks[0]
            if chosen:
                sink = sinks[-1]
            sink.take(tokens, mask, [length for _, length in run])


def _so_far(documents: int, share: float | None, seconds: float) -> str:
    """Return a line about a corpus of which ``share`` is read; None: how much is unknown."""
    line = f"{counted(documents, 'document')} tokenized"
    if share:
        minutes = math.ceil(seconds * (1 / share - 1) / 60)
        line += f", {share:.0%} of the corpus; about {minutes:,} min to go"
    return line


def mix(
    folder: Path,
    parts: Sequence[tuple[str, float]],
    name: str = "train",
    corpora: Sequence[str] = (),
) -> None:
    """Write the documents of stored ``parts`` under one ``name``, evenly mixed, and remove these.

    A document of a part of weight 2 is taken twice; of weight 0.5, every other one is taken. With
    ``corpora``, the names of the parts, it is known afterwards which documents are those of which.
    """
    import numpy as np

    pieces = [stored(folder, part) for part, _ in parts]
    masked = any(piece.mask is not None for piece in pieces)
    owners, numbers, places = [], [], []
    for owner, (piece, (_, weight)) in enumerate(zip(pieces, parts, strict=True)):
        taken = _taken(len(piece.ends), weight)
        numbers.append(taken)
        owners.append(np.full(len(taken), owner))
        places.append((np.arange(len(taken)) + 0.5) / len(taken))
    all_owners = np.concatenate(owners)
    all_numbers = np.concatenate(numbers)
    sink = _Sink(folder, name)
    order = np.argsort(np.concatenate(places), kind="stable")
    try:
        for place in order:
            piece = pieces[all_owners[place]]
            document = piece.document(int(all_numbers[place]))
            mask = b"\1" * (document.stop - document.start)
            if piece.mask is not None:
                mask = piece.mask[document].tobytes()
            sink.add(piece.tokens[document].tobytes(), mask)
        sink.keep(masked=masked)
    finally:
        sink.discard()
    if corpora:
        write_file(folder / f"{name}.{_CORPORA}", json.dumps(list(corpora)))
        write_file(folder / f"{name}.{_OWNERS}", all_owners[order].astype(np.uint16).tobytes())
    skipped = [text_if_readable(folder / f"{part}.{SKIPPED}") for part, _ in parts]
    if any(skipped):
        write_file(folder / f"{name}.{SKIPPED}", "".join(skipped))
    for part, _ in parts:
        for file in folder.glob(f"{part}.*"):
            file.unlink()


def _taken(count: int, weight: float) -> np.ndarray:
    """Return the numbers of the documents that a weight takes of ``count``, at least one."""
    import numpy as np

    whole, rest = divmod(max(1, round(weight * count)), count)
    spread = np.arange(rest) * count // max(1, rest)
    return np.concatenate([np.tile(np.arange(count), whole), spread])


class _Sink:
    """The files of one name.

    The nodes of a job write the same files: each under names of its own first.
    """

    def __init__(self, folder: Path, name: str) -> None:
        own = f"{name}.{os.urandom(6).hex()}"
        self._tokens = folder / f".{own}.tokens"
        self._mask = folder / f".{own}.mask"
        self._final = folder / name
        self._ends = array("q")
        self._total = 0
        self._tokens_file = self._tokens.open("wb")
        self._mask_file = self._mask.open("wb")

    @property
    def empty(self) -> bool:
        return not self._total

    def add(self, tokens: bytes, mask: bytes) -> None:
        """Append a document."""
        self._tokens_file.write(tokens)
        self._mask_file.write(mask)
        self._total += len(tokens) // array("I").itemsize
        self._ends.append(self._total)

    def take(self, tokens: IO[bytes], mask: IO[bytes], lengths: Sequence[int]) -> None:
        """Append the next documents in two files; there may be no mask."""
        count = sum(lengths)
        _copy(tokens, self._tokens_file, array("I").itemsize * count)
        _copy(mask, self._mask_file, count)
        self._ends.extend(islice(accumulate(lengths, initial=self._total), 1, None))
        self._total += count

    def keep(self, *, masked: bool) -> None:
        """Give the files their final names, once they are on the disk."""
        self._tokens_file.flush()
        os.fsync(self._tokens_file.fileno())
        self._tokens_file.close()
        self._mask_file.close()
        self._tokens.replace(f"{self._final}.tokens")
        if masked:
            self._mask.replace(f"{self._final}.mask")
        write_file(Path(f"{self._final}.ends"), self._ends.tobytes())

    def discard(self) -> None:
        """Remove what was not kept."""
        self._tokens_file.close()
        self._mask_file.close()
        self._tokens.unlink(missing_ok=True)
        self._mask.unlink(missing_ok=True)


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    while size and (block := source.read(min(size, _COPY))):
        target.write(block)
        size -= len(block)
