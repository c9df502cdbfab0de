"""Language-model data: samples of tokens, accessed by number, from a tokenized corpus or synthetic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import override

from primus.recipes.recipe import MOCK
from primus.training.corpus import HUB, Corpus, documents, mark, row_reader, tokenizer_config
from primus.training.loop.config import RankJob
from primus.training.loop.process import Process
from primus.training.loop.session import Batch, Data

# The number of distinct mock tokens, for any vocabulary: few enough for a short run to learn.
_MOCK_SYMBOLS = 256
_MOCK_STEPS = (1, 3, 7, 19)
_IGNORED = -100


def text(job: RankJob, process: Process) -> Data:
    """Return the data that the job's assets name. Raises SystemExit if corpus, tokenizer and model do not fit."""
    if job.assets["corpus"] == MOCK:
        return Mock(job.training.seed, job.training.seq_len, job.model.vocab_size)
    if job.assets["tokenizer"] == MOCK:
        raise SystemExit("assets.tokenizer is mock, but the corpus is text: name a tokenizer")
    tokens = _tokenized(job, process)
    if (largest := int(tokens.max())) >= job.model.vocab_size:
        raise SystemExit(
            f"the tokenizer produces token {largest}, but the model's vocabulary has {job.model.vocab_size} tokens"
        )
    return Packed(tokens, job.training.seq_len, job.training.seed)


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


class Packed(_Tokens):
    """A stream of tokens, cut into consecutive samples. Each pass has a different order, determined by ``seed``."""

    def __init__(self, tokens: np.ndarray, seq_len: int, seed: int) -> None:
        super().__init__(seq_len)
        self._stream = tokens
        self._seed = seed
        self._samples = (len(tokens) - 1) // seq_len
        self._order: tuple[int, torch.Tensor] | None = None
        if self._samples < 1:
            raise SystemExit(f"the corpus has {len(tokens)} tokens, fewer than one sample of {seq_len} + 1")

    @override
    def sample(self, number: int) -> torch.Tensor:
        turn, place = divmod(number, self._samples)
        if self._order is None or self._order[0] != turn:
            self._order = (turn, shuffled(self._samples, self._seed, turn))
        start = int(self._order[1][place]) * self._seq_len
        return torch.from_numpy(self._stream[start : start + self._seq_len + 1].astype(np.int64))


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


def _tokenized(job: RankJob, process: Process) -> np.ndarray:
    path = job.output / "cache" / "tokens.npy"
    if process.local_rank == 0:
        waiting = path.with_suffix(f".{process.rank}.npy")
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(waiting, tokens_of(job.assets["corpus"], job.assets["tokenizer"], job.column))
        os.replace(waiting, path)  # noqa: PTH105
    dist.barrier()
    tokens: np.ndarray = np.load(path, mmap_mode="r")
    return tokens


def tokens_of(corpus: str, tokenizer: str, column: str | None = None) -> np.ndarray:
    """Return the tokens of all documents in order, each between the tokenizer's BOS and EOS tokens if it has them.

    ``column``: see :class:`primus.training.corpus.Corpus`. Raises InputError at a document that cannot be read.
    """
    from tokenizers import Tokenizer

    folder = None if tokenizer.startswith(HUB) else Path(tokenizer)
    begin = end = None
    if folder is None:
        encoder = Tokenizer.from_pretrained(tokenizer.removeprefix(HUB))
    else:
        encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
        begin, end = (encoder.token_to_id(text) if text else None for text in _marks(folder))
    pieces = []
    for document in _documents(Corpus(path=Path(corpus), column=column, tokenizer=folder), corpus):
        ids = encoder.encode(document, add_special_tokens=False).ids
        marked = ([] if begin is None else [begin]) + ids + ([] if end is None else [end])
        pieces.append(np.asarray(marked, dtype=np.uint32))
    return np.concatenate(pieces)


def marks_of(folder: Path) -> dict[str, int]:
    """Return ``bos_token_id`` and ``eos_token_id`` of the tokenizer in ``folder``, if it has them."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    encoder = Tokenizer.from_file(str(file))
    numbers = (encoder.token_to_id(text) if text else None for text in _marks(folder))
    return {
        key: number for key, number in zip(("bos_token_id", "eos_token_id"), numbers, strict=True) if number is not None
    }


def _marks(folder: Path) -> tuple[str, str]:
    config = tokenizer_config(folder)
    return mark(config.get("bos_token")), mark(config.get("eos_token"))


def _documents(corpus: Corpus, name: str) -> Iterator[str]:
    if not name.startswith(HUB):
        yield from documents(corpus)
        return
    from datasets import load_dataset

    read = row_reader(corpus)
    for number, row in enumerate(load_dataset(name.removeprefix(HUB), split="train"), 1):
        yield read(row, f"{name}: row {number}")
