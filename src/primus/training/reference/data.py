"""The tokens that a run must train on, read and cut anew from the recipe's own files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from primus.recipes.recipe import MOCK
from primus.training.mock import texts

__all__ = ["Samples", "Stream", "numbered"]

_MOCK_TEXTS = 2000


class Samples(Protocol):
    """The micro-batches of a step."""

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels [samples, length] of a data-parallel rank in ``step`` (from 1): all its micro-batches."""


class Stream:
    """torchtitan's order: a rank's share of the documents is one endless stream of tokens, cut at every length + 1.

    Each document stands between the tokenizer's begin and end marks. The token at a cut is the label of the sample
    before it and is not an input again. Rank r of n has documents r · (count ÷ n) and on, in the corpus's order.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        config = job["config"]
        documents = _documents(job["assets"]["corpus"], int(config.get("debug.seed") or 0))
        encode = _encoder(job["assets"]["tokenizer"])
        self._length = int(config["training.seq_len"])
        self._per_step = int(config["training.local_batch_size"]) * job["accumulation"]
        ranks = job["data_parallel"]
        share, rest = divmod(len(documents), ranks)
        starts = [share * rank + min(rank, rest) for rank in range(ranks + 1)]
        self._tokens: list[list[int]] = [[] for _ in range(ranks)]
        for rank in range(ranks):
            for document in documents[starts[rank] : starts[rank + 1]]:
                self._tokens[rank] += encode(document)

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Samples`."""
        tokens, piece = self._tokens[rank], self._length + 1
        first = (step - 1) * self._per_step * piece
        rows = [
            [tokens[(first + sample * piece + place) % len(tokens)] for place in range(piece)]
            for sample in range(self._per_step)
        ]
        whole = torch.tensor(rows)
        return whole[:, :-1], whole[:, 1:]


class numbered:
    """The order of our own loop: samples have numbers, step s takes those from (s − 1) · global batch on.

    The corpus is one stream of tokens in samples of ``length``; sample n starts at token n · length, and its last
    label is the first token of the next one. Pass p over the samples takes them in the order of ``torch.randperm`` of
    a generator seeded with seed · 2,000,003 + p.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        config = job["config"]
        self._length = int(config.get("training.seq_len", 2048))
        self._per_rank = int(config.get("training.micro_batch_size", 1)) * job["accumulation"]
        self._batch = self._per_rank * job["data_parallel"]
        self._seed = int(config.get("training.seed", 42))
        self._vocabulary = int(job["model"]["vocab_size"])
        self._stream: torch.Tensor | None = None
        if job["assets"]["corpus"] != MOCK:
            encode = _encoder(job["assets"]["tokenizer"], special=False)
            pieces = [encode(document) for document in _documents(job["assets"]["corpus"], self._seed)]
            self._stream = torch.tensor([token for piece in pieces for token in piece])
            self._count = (len(self._stream) - 1) // self._length

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Samples`."""
        first = (step - 1) * self._batch + rank * self._per_rank
        whole = torch.stack([self._sample(number) for number in range(first, first + self._per_rank)])
        return whole[:, :-1], whole[:, 1:]

    def _sample(self, number: int) -> torch.Tensor:
        if self._stream is None:
            return self._walk(number)
        turn, place = divmod(number, self._count)
        order = torch.randperm(self._count, generator=_generator(self._seed, turn))
        start = int(order[place]) * self._length
        return self._stream[start : start + self._length + 1]

    def _walk(self, number: int) -> torch.Tensor:
        """Mock tokens: a walk over at most 256 symbols in steps of 1, 3, 7 or 19."""
        symbols = min(256, self._vocabulary)
        generator = _generator(self._seed, number)
        steps = torch.tensor([1, 3, 7, 19])[torch.randint(4, (self._length,), generator=generator)]
        place = torch.randint(symbols, (1,), generator=generator)
        return torch.cat([place, place + steps.cumsum(0)]) % symbols * (self._vocabulary // symbols)


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 2_000_003 + number)


def _documents(corpus: str, seed: int) -> list[str]:
    if corpus == MOCK:
        return list(texts(seed, _MOCK_TEXTS))
    lines = Path(corpus).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines if line.strip()]


def _encoder(folder: str, *, special: bool = True) -> Any:
    """From a document to its tokens between the begin and end marks that the tokenizer's configuration names."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    file = Path(folder) / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def mark(name: str) -> Iterator[int]:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None and (number := tokenizer.token_to_id(text)) is not None:
            yield number

    begin, end = list(mark("bos_token")), list(mark("eos_token"))

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
        return [*([] if tokens[:1] == begin else begin), *tokens, *([] if tokens[-1:] == end else end)]

    return encode
