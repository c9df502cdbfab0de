"""The data that a run must train on, read from the recipe's own files."""

import bz2
import glob
import gzip
import json
import lzma
import os
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from primus_images.files import json_if_readable
from primus_images.recipes.recipe import MOCK
from primus_images.training.text.mock import texts
from primus_images.yamlfile import read_values

Batch = dict[str, torch.Tensor]


class Samples:
    """What the ranks train on: ``inputs`` and ``labels`` [samples, length], or what an image is
    trained with [images, …].
    """

    def batch(self, step: int, rank: int) -> Batch:
        """Return all micro-batches of a data-parallel rank in ``step`` (from 1)."""
        raise NotImplementedError

    def terms(self, batch: Batch) -> int:
        """Return the number of losses of ``batch``. Their sum is divided by the number on all
        ranks.
        """
        if "labels" in batch:
            return int((batch["labels"] >= 0).sum())
        return len(batch["latents"])


def samples(job: dict[str, Any]) -> Samples:
    """Return the samples of ``job``, in the order of its backend."""
    if job["backend"] == "torchtitan":
        return _Stream(job)
    if job["backend"] == "flux":
        return _Images(job)
    return _Text(job)


class _Stream(Samples):
    """torchtitan's order: a rank's share of the documents is one endless stream, cut after every
    length + 1 tokens.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        config = job["config"]
        documents = [tokens for tokens, _ in _tokenized(job, int(config.get("debug.seed") or 0))]
        self._length = int(config["training.seq_len"])
        self._per_step = int(config["training.local_batch_size"]) * job["accumulation"]
        shares = torch.arange(len(documents)).tensor_split(job["data_parallel"])
        self._tokens = [
            torch.tensor([token for n in share for token in documents[n]]) for share in shares
        ]

    def batch(self, step: int, rank: int) -> Batch:
        tokens = self._tokens[rank]
        size = self._per_step * (self._length + 1)
        places = torch.arange((step - 1) * size, step * size) % len(tokens)
        whole = tokens[places].view(self._per_step, -1)
        return {"inputs": whole[:, :-1], "labels": whole[:, 1:]}


class _Ordered(Samples):
    """The order of our own loop: step s takes samples from (s − 1) · global batch on.

    The order of pass p over ``stored`` samples is a permutation by the seed · 2,000,003 + p;
    without stored ones, samples are drawn.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        config = job["config"]
        self._per_rank = int(config.get("training.micro_batch_size", 1)) * job["accumulation"]
        self._batch = self._per_rank * job["data_parallel"]
        self._seed = int(config.get("training.seed", 42))
        self._stored: list[Batch] = []

    def batch(self, step: int, rank: int) -> Batch:
        first = (step - 1) * self._batch + rank * self._per_rank
        rows = [self._sample(number) for number in range(first, first + self._per_rank)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _sample(self, number: int) -> Batch:
        if not self._stored:
            return self._drawn(_generator(self._seed, number))
        turn, place = divmod(number, len(self._stored))
        order = torch.randperm(len(self._stored), generator=_generator(self._seed, turn))
        return self._stored[int(order[place])]

    def _drawn(self, generator: torch.Generator) -> Batch:
        raise NotImplementedError


class _Text(_Ordered):
    """A corpus cut after every length; if only answers are trained, documents, or with packing
    several.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        config = job["config"]
        self._length = int(config.get("training.seq_len", 2048))
        self._vocabulary = int(job["model"]["vocab_size"])
        if job["assets"]["corpus"] == MOCK:
            return
        pieces = _tokenized(job, self._seed)
        packing = bool(config.get("packing"))
        if pieces[0][1] is not None or packing:
            labelled = [
                piece for tokens, mask in pieces for piece in _labelled(tokens, mask, self._length)
            ]
            if packing:
                packed = _packed(labelled, self._length)
            else:
                packed = [[piece] for piece in labelled]
            self._stored = [self._joined(documents, packing) for documents in packed]
        else:
            stream = torch.tensor([token for tokens, _ in pieces for token in tokens])
            self._stored = [
                _shifted(cut) for cut in stream.unfold(0, self._length + 1, self._length)
            ]

    def _joined(self, documents: "list[_Labelled]", packing: bool) -> Batch:
        padding = self._length - sum(len(tokens) - 1 for tokens, _ in documents)
        rows = {
            "inputs": [token for tokens, _ in documents for token in tokens[:-1]] + [0] * padding,
            "labels": [label for _, labels in documents for label in labels[1:]] + [-100] * padding,
        }
        if packing:
            rows["positions"] = [
                place for tokens, _ in documents for place in range(len(tokens) - 1)
            ]
            rows["positions"] += range(padding)
        return {name: torch.tensor(row) for name, row in rows.items()}

    def _drawn(self, generator: torch.Generator) -> Batch:
        symbols = min(256, self._vocabulary)
        steps = torch.tensor([1, 3, 7, 19])[torch.randint(4, (self._length,), generator=generator)]
        place = torch.randint(symbols, (1,), generator=generator)
        return _shifted(
            torch.cat([place, place + steps.cumsum(0)]) % symbols * (self._vocabulary // symbols)
        )


def _shifted(tokens: torch.Tensor) -> Batch:
    return {"inputs": tokens[:-1], "labels": tokens[1:]}


# Tokens, and the same as labels, -100 where they are not trained.
_Labelled = tuple[list[int], list[int]]


def _labelled(tokens: list[int], mask: list[bool] | None, length: int) -> list[_Labelled]:
    if mask is None:
        cuts = [tokens[start : start + length + 1] for start in range(0, len(tokens) - 1, length)]
        return [(cut, cut) for cut in cuts]
    labels = [token if trained else -100 for token, trained in zip(tokens, mask, strict=True)][
        : length + 1
    ]
    if any(label >= 0 for label in labels[1:]):
        return [(tokens[: length + 1], labels)]
    return []


def _packed(documents: list[_Labelled], length: int) -> list[list[_Labelled]]:
    """Best fit, longest first: the sample with the least room, of several the one that was filled
    last.
    """
    samples: list[list[_Labelled]] = []
    rooms: list[tuple[int, int]] = []  # of each sample, and when it was filled
    for turn, document in enumerate(sorted(documents, key=lambda document: -len(document[0]))):
        size = len(document[0]) - 1
        fitting = [
            (room, -filled, sample) for sample, (room, filled) in enumerate(rooms) if room >= size
        ]
        room, _, sample = min(fitting, default=(length, 0, len(samples)))
        if sample == len(samples):
            samples.append([])
            rooms.append((length, turn))
        samples[sample].append(document)
        rooms[sample] = (room - size, turn)
    return samples


class _Images(_Ordered):
    """Images with noise and a time, the logistic function of a normal number, by another seed."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        dit = job["model"]["dit"]
        if job["assets"]["corpus"] != MOCK:
            self._stored = list(_cached(Path(job["assets"]["corpus"])))
            return
        # Mock images: 16 prompts, each with a picture around a common color.
        generator = _generator(self._seed, -1)
        tokens = (dit["image_size"] // 16) ** 2
        colour = torch.randn(dit["in_channels"], generator=generator)
        self._pictures = colour + 0.3 * torch.randn(
            16, tokens, dit["in_channels"], generator=generator
        )
        self._text = torch.randn(16, dit["text_tokens"], dit["text_dim"], generator=generator)
        self._pooled = torch.randn(16, dit["pooled_dim"], generator=generator)

    def _sample(self, number: int) -> Batch:
        image = super()._sample(number)
        generator = _generator(self._seed + 1, number)
        noise = torch.randn(image["latents"].shape, generator=generator)
        return image | {"noise": noise, "time": torch.randn((), generator=generator).sigmoid()}

    def _drawn(self, generator: torch.Generator) -> Batch:
        prompt = int(torch.randint(16, (), generator=generator))
        picture = self._pictures[prompt]
        varied = picture + 0.1 * torch.randn(picture.shape, generator=generator)
        return {"latents": varied, "text": self._text[prompt], "pooled": self._pooled[prompt]}


def _cached(folder: Path) -> Iterator[Batch]:
    """Yield the images of a cache, files by name. A token is 2 × 2 latents: channel by channel,
    then row by row.
    """
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        held = load_file(file)
        for latents, text, pooled in zip(
            held["latents"], held["text"], held["pooled"], strict=True
        ):
            patches = latents.float().unfold(1, 2, 2).unfold(2, 2, 2)
            tokens = patches.permute(1, 2, 0, 3, 4).flatten(0, 1).flatten(1)
            yield {"latents": tokens, "text": text.float(), "pooled": pooled.float()}


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 2_000_003 + number)


# A document's tokens, and whether each is trained; None if all are.
_Piece = tuple[list[int], list[bool] | None]
_Turns = list[dict[str, Any]]
# What formats call their files and columns. Who speaks, and what is trained, is not taken from the
# run's own reader.
_TABLE: Mapping[str, Any] = read_values(Path(__file__).parents[2] / "text/corpus.yaml").data
# Not from that table, so that a mistake there is found.
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request."
)


def _tokenized(job: dict[str, Any], seed: int) -> list[_Piece]:
    name = job["assets"]["corpus"]
    folder = Path(job["assets"]["tokenizer"])
    words = _Words(folder)
    if name == MOCK:
        return [(words.plain(text), None) for text in texts(seed)]
    data = job.get("data", {})
    column = data.get("column") or None
    answers = data.get("train_on", "completions") == "completions"
    pieces: list[_Piece] = []
    for file in _files(Path(name), data.get("split")):
        rows = _rows(file)
        if column is None and rows:
            column = next(names[0] for names in _TABLE["layouts"] if rows[0].keys() >= {*names})
        for row in rows:
            pieces += _pieces(row, str(column), words, answers)
    share = job.get("evaluation", {}).get("fraction", 0)
    return [piece for n, piece in enumerate(pieces) if int((n + 1) * share) == int(n * share)]


def _files(path: Path, split: str | None) -> list[Path]:
    if not path.is_dir():
        return [path]
    card = path / "README.md"
    if card.is_file() and "\nconfigs:" in card.read_text().partition("\n---")[0]:
        from datasets import load_dataset_builder

        named = load_dataset_builder(str(path)).config.data_files
        return [*map(Path, named[split or ("train" if len(named) > 1 else next(iter(named)))])]
    entered: dict[str, list[Path]] = {}
    for folder, _, names in os.walk(path, followlinks=True):
        entered.setdefault(os.path.realpath(folder), [Path(folder, name) for name in names])
    shown = (
        file
        for files in entered.values()
        for file in files
        if not re.search(r"(^|/)(\.|__.*/)", str(file.relative_to(path)))
    )
    files = sorted(
        file
        for file in shown
        if not re.fullmatch("|".join(_TABLE["beside"]), file.name, re.IGNORECASE)
    )
    if (split or "train") in (
        shards := {file: re.sub(r"-\d{5}-of-\d{5}.*", "", file.name) for file in files}
    ).values():
        return [file for file in files if shards[file] == (split or "train")]
    if (path / "dataset_dict.json").exists():
        return [file for file in files if file.relative_to(path).parts[0] == (split or "train")]
    for words_of in (lambda file: [file.name], lambda file: file.relative_to(path).parts[:-1]):
        splits = {
            name: [
                file
                for file in files
                if {*words} & {*re.split(r"[-._ 0-9]", " ".join(words_of(file)).lower())}
            ]
            for name, words in _TABLE["splits"].items()
        }
        if any(splits.values()):
            found = [name for name in splits if splits[name]]
            return splits[split or ("train" if len(found) > 1 else found[0])]
    return files


def _pieces(row: dict[str, Any], column: str, words: "_Words", answers: bool) -> list[_Piece]:
    if column == "instruction":
        parts = [row["instruction"], *([row["input"]] if row.get("input") else [])]
        if words.template:
            pairs = [*(row.get("history") or []), ["\n".join(parts), row["output"]]]
            turns = [
                {"role": r, "content": c}
                for pair in pairs
                for r, c in zip(("user", "assistant"), pair, strict=True)
            ]
            return [words.chat(turns, row, 0, answers)]
        more = (
            ", paired with an input that provides further context",
            f"### Input:\n{parts[-1]}\n\n",
        )
        some, context = more if len(parts) > 1 else ("", "")
        prompt = (
            f"{_ALPACA.format(some)}\n\n### Instruction:\n{parts[0]}\n\n{context}### Response:\n"
        )
        return [words.answer(prompt, row["output"], answers)]
    value = row[column]
    if column == "prompt" and isinstance(value, str):
        return [words.answer(value, row["completion"], answers)]
    if isinstance(value, str):
        if value.strip():
            return [(words.plain(value), None)]
        return []
    first = 0
    if column == "prompt":
        first = len(value)
    return [words.chat([*value, *(row["completion"] if first else ())], row, first, answers)]


def _rows(file: Path) -> list[dict[str, Any]]:
    suffixes = [
        suffix for suffix in map(str.lower, file.suffixes) if suffix not in _TABLE["packed"]
    ]
    suffix = ""
    if suffixes:
        suffix = suffixes[-1]
    content = file.read_bytes()
    if content[:4] == b"PAR1":
        kind = "parquet"
    else:
        kind = _TABLE["tables"].get(suffix)
    if kind:
        from datasets import load_dataset

        if suffix == ".tsv":
            options = {"sep": "\t"}
        else:
            options = {}
        rows = load_dataset(
            kind, data_files=glob.escape(str(file)), split="train", streaming=True, **options
        )
        # A table has all columns in each row, and so have the messages in it.
        text = json.dumps(list(rows), default=str)
        return json.loads(
            text,
            object_hook=lambda part: {
                key: value for key, value in part.items() if value is not None
            },
        )
    if content[:2] == b"\x28\xb5":
        from pyarrow import BufferReader, CompressedInputStream

        content = CompressedInputStream(BufferReader(content), "zstd").read()
    for magic, module in ((b"\x1f\x8b", gzip), (b"BZh", bz2), (b"\xfd7zXZ", lzma)):
        if content.startswith(magic):
            content = module.decompress(content)
    lines = [line.removeprefix("\ufeff") for line in content.decode().split("\n")]
    if suffix == ".txt":
        grouped = groupby(lines, key=lambda line: bool(line.strip()))
        return [{"text": "\n".join(part).strip("\r\n")} for filled, part in grouped if filled]
    if lines[0].lstrip().startswith("["):
        return [
            {"text": row} if isinstance(row, str) else row for row in json.loads("\n".join(lines))
        ]
    return [json.loads(line) for line in lines if line.strip()]


class _Words:
    def __init__(self, folder: Path) -> None:
        self._tokenizer = _tokenizer(folder)
        self.template = self._tokenizer.chat_template
        self._marks = marks(folder)
        if json_if_readable(folder / "tokenizer_config.json").get("add_bos_token") is False:
            self._marks.pop("bos_token_id", None)

    def plain(self, text: str) -> list[int]:
        return self._between(self._tokenizer(text)["input_ids"])

    def _between(self, tokens: list[int]) -> list[int]:
        begin, end = (
            [self._marks[key]] if key in self._marks else []
            for key in ("bos_token_id", "eos_token_id")
        )
        return [
            *([] if tokens[:1] == begin else begin),
            *tokens,
            *([] if tokens[-1:] == end else end),
        ]

    def answer(self, prompt: str, completion: str, answers: bool) -> _Piece:
        encoded = self._tokenizer(prompt + completion, return_offsets_mapping=True)
        inner = encoded["input_ids"]
        tokens = self._between(encoded["input_ids"])
        before = int(tokens[:1] != inner[:1])
        trained = [False] * before + [
            end > len(prompt) and end > start for start, end in encoded["offset_mapping"]
        ]
        trained += [True] * (len(tokens) - len(trained))
        trained[-1] |= tokens[-1] == self._marks.get("eos_token_id")
        return tokens, trained if answers else None

    def chat(self, turns: _Turns, row: dict[str, Any], first: int, answers: bool) -> _Piece:
        answering = ("gpt", "chatgpt", "bing", "bard", "model", "function_call")
        roles = {"human": "user", "observation": "tool", **dict.fromkeys(answering, "assistant")}
        if "from" in turns[0]:
            turns = [
                turn | {"role": roles.get(turn["from"], turn["from"]), "content": turn["value"]}
                for turn in turns
            ]
        if row.get("system") and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": row["system"]}, *turns]
        tools = row.get("tools") or None
        tools = (json.loads(tools) if isinstance(tools, str) else tools) or None
        switches = ("weight", "train", "training", "trainable", "loss", "loss_mask")
        muted = {n for n, turn in enumerate(turns) if 0 in map(turn.get, switches)}
        options = {"tools": tools, **(row.get("chat_template_kwargs") or {})}
        marks = re.search(r"{%-?\s*generation\b", self._tokenizer.get_chat_template(None, tools))
        by_template = answers and not first and marks is not None
        if by_template:
            marked = self._tokenizer.apply_chat_template(
                turns, **options, return_dict=True, return_assistant_tokens_mask=True
            )
            if not muted:
                return marked["input_ids"], list(map(bool, marked["assistant_masks"]))
        text = self._rendered(turns, options)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = [
            self._span(text, turns[:number], turn, options)
            for number, turn in enumerate(turns if answers else ())
            if turn["role"] == "assistant" and number >= first and number not in muted
        ]
        inside = [False] * len(encoded["input_ids"])
        for begin, last in spans:
            tokens = {encoded.char_to_token(place) for place in range(begin, last)} - {None}
            if tokens:
                inside[min(tokens) : max(tokens) + 1] = [True] * (max(tokens) + 1 - min(tokens))
        if by_template:
            inside = [
                mine and bool(its)
                for mine, its in zip(inside, marked["assistant_masks"], strict=True)
            ]
        return encoded["input_ids"], inside if answers else None

    def _span(
        self, text: str, before: _Turns, turn: dict[str, Any], options: dict[str, Any]
    ) -> tuple[int, int]:
        asked = self._rendered(before, options, add_generation_prompt=True)
        answered = self._rendered([*before, turn], options)
        start = len(
            asked if text.startswith(asked) else re.sub(r"<think>\s*(</think>\s*)?$", "", asked)
        )
        rest = answered[start:]
        if not text.startswith(rest, start):
            # An answer may begin with thoughts that are later left out, or end with the end of the
            # whole text.
            rest = re.sub(r"^\s*<think>.*?</think>\s*", "", rest, flags=re.DOTALL)
            if not text.startswith(rest, start):
                rest = rest.removesuffix(self._tokenizer.eos_token or "")
        return start, start + len(rest)

    def _rendered(self, turns: _Turns, options: dict[str, Any], **more: Any) -> str:
        # A list of conversations, which may be empty.
        return str(
            self._tokenizer.apply_chat_template([turns], **options, tokenize=False, **more)[0]
        )


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def marks(folder: Path) -> dict[str, int]:
    """Return the ``bos_token_id`` and ``eos_token_id`` of the tokenizer in ``folder``, those that
    it has.
    """
    tokenizer = _tokenizer(folder)
    numbers = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id")}
    for name in ("generation_config.json", "config.json"):
        end = json_if_readable(folder / name).get("eos_token_id")
        if isinstance(end, list):
            end = next(iter(end), None)
        if tokenizer.eos_token is None and end is not None and end >= 0:
            numbers["eos_token_id"] = end
    return {key: number for key, number in numbers.items() if number is not None}
