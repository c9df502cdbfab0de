"""The data that a run must train on, read from the recipe's own files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch

from primus.recipes.recipe import MOCK
from primus.training.mock import texts

_MOCK_TEXTS = 2000


Batch = dict[str, torch.Tensor]


class Samples(Protocol):
    """The micro-batches of a step."""

    def batch(self, step: int, rank: int) -> Batch:
        """Return all micro-batches of a data-parallel rank in ``step`` (from 1).

        A batch contains ``inputs`` and ``labels`` [samples, length], or what an image is trained with [images,
        …].
        """

    def terms(self, batch: Batch) -> int:
        """Return the number of losses of ``batch``. Their sum is divided by the number on all ranks."""


def samples(job: dict[str, Any]) -> Samples:
    """Return the samples of ``job``, in the order of its backend."""
    if job["backend"] == "torchtitan":
        return _Stream(job)
    return _Images(job) if job["backend"] == "flux" else _Numbered(job)


class _Tokens:
    def terms(self, batch: Batch) -> int:
        return int((batch["labels"] >= 0).sum())


class _Stream(_Tokens):
    """torchtitan's order: a rank's share of the documents is one endless stream, cut after every length + 1 tokens."""

    def __init__(self, job: dict[str, Any]) -> None:
        config = job["config"]
        documents = _documents(job, int(config.get("debug.seed") or 0))
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

    def batch(self, step: int, rank: int) -> Batch:
        tokens, piece = self._tokens[rank], self._length + 1
        first = (step - 1) * self._per_step * piece
        rows = [
            [tokens[(first + sample * piece + place) % len(tokens)] for place in range(piece)]
            for sample in range(self._per_step)
        ]
        whole = torch.tensor(rows)
        return {"inputs": whole[:, :-1], "labels": whole[:, 1:]}


class _Numbered(_Tokens):
    """The order of our own loop: samples have numbers, and step s takes those from (s − 1) · global batch on.

    The corpus is one stream of tokens, divided into samples of ``length``. Sample n starts at token n · length, and
    its last label is the first token of the next one. The order of pass p is ``torch.randperm`` of a generator
    seeded with seed · 2,000,003 + p.
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
            pieces = [encode(document) for document in _documents(job, self._seed)]
            self._stream = torch.tensor([token for piece in pieces for token in piece])
            self._count = (len(self._stream) - 1) // self._length

    def batch(self, step: int, rank: int) -> Batch:
        first = (step - 1) * self._batch + rank * self._per_rank
        whole = torch.stack([self._sample(number) for number in range(first, first + self._per_rank)])
        return {"inputs": whole[:, :-1], "labels": whole[:, 1:]}

    def _sample(self, number: int) -> torch.Tensor:
        if self._stream is None:
            return self._walk(number)
        turn, place = divmod(number, self._count)
        order = torch.randperm(self._count, generator=_generator(self._seed, turn))
        start = int(order[place]) * self._length
        return self._stream[start : start + self._length + 1]

    def _walk(self, number: int) -> torch.Tensor:
        symbols = min(256, self._vocabulary)
        generator = _generator(self._seed, number)
        steps = torch.tensor([1, 3, 7, 19])[torch.randint(4, (self._length,), generator=generator)]
        place = torch.randint(symbols, (1,), generator=generator)
        return torch.cat([place, place + steps.cumsum(0)]) % symbols * (self._vocabulary // symbols)


class _Images:
    """Latents, text and pooled text of images in the order of our own loop, and the noise and time of each.

    Image n is mixed with normal noise at a time. Both come from a generator seeded with (seed + 1) · 2,000,003 + n.
    Times are uniform, or the logistic function of a normal number.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        config, dit = job["config"], job["model"]["dit"]
        self._per_rank = int(config.get("training.micro_batch_size", 1)) * job["accumulation"]
        self._batch = self._per_rank * job["data_parallel"]
        self._seed = int(config.get("training.seed", 42))
        self._uniform = config.get("times", "logit_normal") == "uniform"
        self._cached: list[Batch] = []
        if job["assets"]["corpus"] != MOCK:
            self._cached = list(_cached(Path(job["assets"]["corpus"])))
            return
        # Mock images: 16 prompts, each with a picture around a common color.
        generator = _generator(self._seed, -1)
        tokens = (dit["image_size"] // 16) ** 2
        colour = torch.randn(dit["in_channels"], generator=generator)
        self._pictures = colour + 0.3 * torch.randn(16, tokens, dit["in_channels"], generator=generator)
        self._text = torch.randn(16, dit["text_tokens"], dit["text_dim"], generator=generator)
        self._pooled = torch.randn(16, dit["pooled_dim"], generator=generator)

    def terms(self, batch: Batch) -> int:
        return len(batch["latents"])

    def batch(self, step: int, rank: int) -> Batch:
        start = (step - 1) * self._batch + rank * self._per_rank
        rows = [self._row(number) for number in range(start, start + self._per_rank)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, number: int) -> Batch:
        image, generator = self._image(number), _generator(self._seed + 1, number)
        noise = torch.randn(image["latents"].shape, generator=generator)
        draw = torch.rand if self._uniform else torch.randn
        time = draw((), generator=generator)
        time = time if self._uniform else time.sigmoid()
        return image | {"noise": noise, "time": time}

    def _image(self, number: int) -> Batch:
        if self._cached:
            turn, place = divmod(number, len(self._cached))
            return self._cached[int(torch.randperm(len(self._cached), generator=_generator(self._seed, turn))[place])]
        generator = _generator(self._seed, number)
        prompt = int(torch.randint(16, (), generator=generator))
        picture = self._pictures[prompt]
        varied = picture + 0.1 * torch.randn(picture.shape, generator=generator)
        return {"latents": varied, "text": self._text[prompt], "pooled": self._pooled[prompt]}


def _cached(folder: Path) -> Iterator[Batch]:
    """Yield the images of a cache, files by name. A token is 2 × 2 latents: channel by channel, then row by row."""
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        held = load_file(file)
        for latents, text, pooled in zip(held["latents"], held["text"], held["pooled"], strict=True):
            patches = latents.float().unfold(1, 2, 2).unfold(2, 2, 2)
            tokens = patches.permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1)
            yield {"latents": tokens, "text": text.float(), "pooled": pooled.float()}


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 2_000_003 + number)


def _documents(job: dict[str, Any], seed: int) -> list[str]:
    if job["assets"]["corpus"] == MOCK:
        return list(texts(seed, _MOCK_TEXTS))
    path, folder = Path(job["assets"]["corpus"]), Path(job["assets"]["tokenizer"])
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.name[0] not in "._")
    documents: list[str] = []
    for file in files:
        if file.suffix.lower() == ".txt":
            grouped = groupby(_lines(file), key=lambda line: bool(line.strip()))
            documents += ["\n".join(lines).strip("\r\n") for filled, lines in grouped if filled]
            continue
        rows = _rows(file)
        column = job.get("column")
        if column is None:
            column = "text" if not rows or "text" in rows[0] else "messages"
        values = [row[column] for row in rows]
        documents += [value if isinstance(value, str) else _conversation(value, folder) for value in values]
    return [document for document in documents if document.strip()]


def _rows(file: Path) -> list[dict[str, Any]]:
    if file.read_bytes()[:4] == b"PAR1":
        from pyarrow import parquet

        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
        return rows
    return [json.loads(line) for line in _lines(file) if line.strip()]


def _lines(file: Path) -> list[str]:
    return [line.removeprefix("\ufeff") for line in file.read_bytes().decode().split("\n")]


def _conversation(messages: Any, folder: Path) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    file, config = folder / "chat_template.jinja", _configuration(folder)
    template = file.read_text(encoding="utf-8") if file.is_file() else config["chat_template"]
    if isinstance(template, list):
        template = next(entry["template"] for entry in template if entry["name"] == "default")
    marks = {name: _content(config.get(name)) or "" for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    rendered, _ = render_jinja_template([messages], chat_template=template, **marks)
    return str(rendered[0]).removeprefix(marks["bos_token"]).removesuffix(marks["eos_token"])


def _configuration(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config


def marks(folder: Path) -> dict[str, int]:
    """Return the tokens that begin and end a text, as ``bos_token_id`` and ``eos_token_id``, of the tokenizer in
    ``folder``.
    """
    from tokenizers import Tokenizer

    tokenizer, config = Tokenizer.from_file(str(folder / "tokenizer.json")), _configuration(folder)
    texts = {key: _content(config.get(key)) for key in ("bos_token", "eos_token")}
    numbers = {f"{key}_id": tokenizer.token_to_id(text) for key, text in texts.items() if text is not None}
    return {key: number for key, number in numbers.items() if number is not None}


def _content(mark: Any) -> str | None:
    return mark.get("content") if isinstance(mark, dict) else mark


def _encoder(folder: str, *, special: bool = True) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    specials = marks(Path(folder))
    begin, end = ([specials[key]] if key in specials else [] for key in ("bos_token_id", "eos_token_id"))

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
        return [*([] if tokens[:1] == begin else begin), *tokens, *([] if tokens[-1:] == end else end)]

    return encode
