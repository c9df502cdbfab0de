"""Language-model data: samples of tokens, accessed by number, from a tokenized corpus or synthetic."""

from __future__ import annotations

import numpy as np
import torch
from typing_extensions import override

from primus.recipes.recipe import MOCK
from primus.training.loop.config import RankJob
from primus.training.loop.session import Batch, Data
from primus.training.tokens import Tokens, stored, trained_documents

# The number of distinct mock tokens, for any vocabulary: few enough for a short run to learn.
_MOCK_SYMBOLS = 256
_MOCK_STEPS = (1, 3, 7, 19)
_IGNORED = -100


def text(job: RankJob) -> Data:
    """Return the data that the job's assets name."""
    if job.assets["corpus"] == MOCK:
        return Mock(job.training.seed, job.training.seq_len, job.model.vocab_size)
    tokens = stored(job.output / "cache")
    if tokens.mask is None:
        return Stream(tokens.tokens, job.training.seq_len, job.training.seed)
    return Answers(tokens, job.training.seq_len, job.training.seed)


class _Tokens(Data):
    def __init__(self, seq_len: int) -> None:
        self._seq_len = self.tokens_per_sample = seq_len
        self.images_per_sample = 0

    def sample(self, number: int) -> torch.Tensor:
        """Return ``seq_len + 1`` tokens, int64."""
        raise NotImplementedError

    @override
    def batch(self, first: int, count: int) -> Batch:
        tokens = torch.stack([self.sample(number) for number in range(first, first + count)])
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    @override
    def terms(self, batch: Batch) -> int:
        return int((batch["labels"] != _IGNORED).sum())


class _Passes(_Tokens):
    """``samples`` samples. Each pass over them has a different order, determined by ``seed``."""

    def __init__(self, samples: int, seq_len: int, seed: int) -> None:
        super().__init__(seq_len)
        self._samples = samples
        self._seed = seed
        self._order: tuple[int, torch.Tensor] | None = None

    def _place(self, number: int) -> int:
        turn, place = divmod(number, self._samples)
        if self._order is None or self._order[0] != turn:
            self._order = (turn, shuffled(self._samples, self._seed, turn))
        return int(self._order[1][place])


class Stream(_Passes):
    """A stream of tokens, cut into consecutive samples."""

    def __init__(self, tokens: np.ndarray, seq_len: int, seed: int) -> None:
        super().__init__((len(tokens) - 1) // seq_len, seq_len, seed)
        self._stream = tokens

    @override
    def sample(self, number: int) -> torch.Tensor:
        start = self._place(number) * self._seq_len
        return torch.from_numpy(self._stream[start : start + self._seq_len + 1].astype(np.int64))


class Answers(_Passes):
    """Documents in which only some tokens are trained: one per sample, cut after ``seq_len`` labels.

    Documents without a trained label are left out. Behind the end of a document, labels are ignored.
    """

    def __init__(self, tokens: Tokens, seq_len: int, seed: int) -> None:
        self._tokens = tokens
        self._documents = trained_documents(tokens, seq_len)
        super().__init__(len(self._documents), seq_len, seed)

    @override
    def batch(self, first: int, count: int) -> Batch:
        inputs = torch.zeros(count, self._seq_len, dtype=torch.int64)
        labels = torch.full_like(inputs, _IGNORED)
        for row in range(count):
            document = self._tokens.document(int(self._documents[self._place(first + row)]))
            tokens = torch.from_numpy(self._tokens.tokens[document].astype(np.int64))[: self._seq_len + 1]
            assert self._tokens.mask is not None
            trained = torch.from_numpy(self._tokens.mask[document] != 0)[1 : len(tokens)]
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            labels[row, : len(tokens) - 1] = tokens[1:].where(trained, _IGNORED)
        return {"input_ids": inputs, "labels": labels}


class Mock(_Tokens):
    """Random walks on a ring of symbols with four step sizes: a Markov chain with an entropy of ln 4 per token."""

    def __init__(self, seed: int, seq_len: int, vocabulary: int) -> None:
        super().__init__(seq_len)
        self._seed = seed
        self._symbols = min(_MOCK_SYMBOLS, vocabulary)
        self._spread = vocabulary // self._symbols

    @override
    def sample(self, number: int) -> torch.Tensor:
        generator = generator_of(self._seed, number)
        steps = torch.tensor(_MOCK_STEPS)[torch.randint(4, (self._seq_len,), generator=generator)]
        start = torch.randint(self._symbols, (1,), generator=generator)
        return torch.cat([start, start + steps.cumsum(0)]) % self._symbols * self._spread


def generator_of(seed: int, number: int) -> torch.Generator:
    """Return a generator for sample ``number``, so that a sample does not depend on those drawn before it."""
    return torch.Generator().manual_seed(seed * 2_000_003 + number)


def shuffled(count: int, seed: int, turn: int) -> torch.Tensor:
    """Return the order of ``count`` samples in pass ``turn``."""
    return torch.randperm(count, generator=generator_of(seed, turn))
