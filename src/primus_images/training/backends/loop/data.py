"""Language-model data: samples of tokens by number, from a tokenized corpus or synthetic."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from primus_images.recipes.recipe import MOCK
from primus_images.training.backends.loop.config import RankJob
from primus_images.training.backends.loop.session import IGNORED, Batch, Data
from primus_images.training.text.tokens import Tokens, packs, stored
from primus_images.turbo.packed import VERSIONS

# The number of distinct mock tokens, for any vocabulary: few enough for a short run to learn.
_MOCK_SYMBOLS = 256
_MOCK_STEPS = (1, 3, 7, 19)


def held_out(job: RankJob, *, packing: bool = False) -> "Documents":
    """Return the documents that the job evaluates on."""
    tokens = stored(job.output / "cache", "eval")
    return _documents(tokens, job, packing)


def text(job: RankJob, *, packing: bool = False) -> Data:
    """Return the data that the job's assets name. With ``packing``, samples are whole documents."""
    if job.assets["corpus"] == MOCK:
        return Mock(job.training.seed, job.training.seq_len, job.model.vocab_size)
    tokens = stored(job.output / "cache")
    length = job.training.seq_len
    if tokens.mask is None and not packing:
        return stream(tokens, length, job.training.seed)
    return _documents(tokens, job, packing)


def stream(tokens: Tokens, seq_len: int, seed: int) -> "Documents":
    """Return samples of the documents one after the other, cut after every ``seq_len`` tokens."""
    # One document, whose last sample is whole.
    samples = (len(tokens.tokens) - 1) // seq_len
    end = samples * seq_len + 1
    joined = Tokens(tokens=tokens.tokens[:end], ends=np.asarray([end]))
    return Documents(joined, seq_len, seed)


def _documents(tokens: Tokens, job: RankJob, packing: bool) -> "Documents":
    return Documents(
        tokens,
        job.training.seq_len,
        job.training.seed,
        packing=packing,
        with_ends=packing and not VERSIONS.keys().isdisjoint(job.turbo),
    )


class Documents(Data):
    """Documents of which each is trained on its own: one per sample, or with ``packing`` several.

    Without a mask, long documents are several; with one, they are cut, and those without a trained
    label are left out. Labels behind the end of the last one are ignored. Packed samples have
    ``positions``, which begin again at 0 with each document, and behind the last one. They have
    ``ends`` with ``with_ends``: where each document ends, and the end of the sample in all further
    columns. Every batch has the same number of columns, so a compiled model is compiled once.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        seed: int,
        *,
        packing: bool = False,
        with_ends: bool = False,
    ) -> None:
        self._tokens = tokens
        self._firsts, self._ends = tokens.pieces(seq_len)
        lengths = self._ends - self._firsts - 1
        self.samples = len(lengths)
        self._packs = None
        if packing:
            self._packs = packs(lengths.tolist(), seq_len)
            self.samples = len(self._packs)
        self._columns = 0
        if with_ends and self._packs is not None:
            # One more for what is behind the last document.
            self._columns = max(map(len, self._packs)) + 1
        self._seed = seed
        self._seq_len = seq_len
        self._with_ends = with_ends

    def by_corpus(self) -> "dict[str, Documents]":
        """Return the documents of each corpus with any, by its name; none without a mixture."""
        parts = {}
        for number, name in enumerate(self._tokens.corpora):
            part = Documents(
                replace(self._tokens, chosen=number),
                self._seq_len,
                self._seed,
                packing=self._packs is not None,
                with_ends=self._with_ends,
            )
            if part.samples:
                parts[name] = part
        return parts

    @override
    def batch(self, first: int, count: int) -> Batch:
        inputs = torch.zeros(count, self._seq_len, dtype=torch.int64)
        labels = torch.full_like(inputs, IGNORED)
        positions = torch.arange(self._seq_len).repeat(count, 1)
        ends = torch.full((count, self._columns), self._seq_len, dtype=torch.int32)
        for row in range(count):
            sample = place_of(first + row, self.samples, self._seed)
            start = 0
            for column, number in enumerate(self._numbers(sample)):
                tokens, next_tokens = self._document(number)
                end = start + len(tokens)
                inputs[row, start:end] = tokens
                labels[row, start:end] = next_tokens
                positions[row, end:] = torch.arange(self._seq_len - end)
                if self._columns:
                    ends[row, column] = end
                start = end
        batch = {"input_ids": inputs, "labels": labels}
        if self._packs is not None:
            batch["positions"] = positions
        if self._columns:
            batch["ends"] = ends
        return batch

    def _numbers(self, sample: int) -> Sequence[int]:
        """Return the numbers of the documents in a sample."""
        if self._packs is None:
            return [sample]
        return self._packs[sample]

    def _document(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the inputs of a document, and the label of each."""
        piece = slice(int(self._firsts[number]), int(self._ends[number]))
        tokens = torch.from_numpy(self._tokens.tokens[piece].astype(np.int64))
        labels = tokens[1:]
        if self._tokens.mask is not None:
            trained = torch.from_numpy(self._tokens.mask[piece][1:] != 0)
            labels = labels.where(trained, IGNORED)
        return tokens[:-1], labels


class Mock(Data):
    """Random walks on a ring of symbols with four step sizes.

    They are a Markov chain with an entropy of ln 4 per token.
    """

    def __init__(self, seed: int, seq_len: int, vocabulary: int) -> None:
        self._seed = seed
        self._seq_len = seq_len
        self._symbols = min(_MOCK_SYMBOLS, vocabulary)
        self._spread = vocabulary // self._symbols

    @override
    def batch(self, first: int, count: int) -> Batch:
        tokens = torch.stack([self._sample(number) for number in range(first, first + count)])
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def _sample(self, number: int) -> Tensor:
        generator = generator_of(self._seed, number)
        choices = torch.randint(4, (self._seq_len,), generator=generator)
        steps = torch.tensor(_MOCK_STEPS)[choices]
        start = torch.randint(self._symbols, (1,), generator=generator)
        walk = torch.cat([start, start + steps.cumsum(0)])
        return walk % self._symbols * self._spread


def generator_of(seed: int, number: int) -> torch.Generator:
    """Return a generator for sample ``number``, which depends on no other sample."""
    return torch.Generator().manual_seed(seed * 2_000_003 + number)


@lru_cache(maxsize=2)
def _order(count: int, seed: int, turn: int) -> Tensor:
    return torch.randperm(count, generator=generator_of(seed, turn))


def place_of(number: int, count: int, seed: int) -> int:
    """Return which of ``count`` stored samples is sample ``number``.

    Each pass over them has another order.
    """
    turn, place = divmod(number, count)
    return int(_order(count, seed, turn)[place])
