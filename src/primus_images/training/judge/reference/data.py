"""The data that a run must train on, read from the recipe's own files."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primus_images.files import json_if_readable
from primus_images.recipes.recipe import MOCK
from primus_images.training.judge.reference.rows import LAYOUTS, rows_of, tokens_of

Batch = dict[str, Tensor]


class Samples:
    """What the ranks train on.

    Text has ``inputs`` and ``labels`` [samples, length], images what they are trained with
    [images, …].
    """

    def batch(self, step: int, rank: int) -> Batch:
        """Return all micro-batches of a data-parallel rank in ``step`` (from 1)."""
        raise NotImplementedError

    def terms(self, batch: Batch) -> int:
        """Return the number of losses of ``batch``; all ranks divide by the sum of theirs."""
        if "labels" in batch:
            return int((batch["labels"] >= 0).sum())
        return len(batch["latents"])


def micro_batches(batch: Batch, count: int) -> Iterator[Batch]:
    """Yield the ``count`` parts of ``batch``."""
    chunks = [tensor.chunk(count) for tensor in batch.values()]
    for tensors in zip(*chunks, strict=True):
        yield dict(zip(batch, tensors, strict=True))


def samples(job: dict[str, Any]) -> Samples:
    """Return the samples of ``job``, in the order of its backend."""
    if job["backend"] == "flux":
        return _Images(job)
    return _Text(job)


class _Ordered(Samples):
    """The order of every backend: step s takes samples from (s − 1) · global batch on.

    The order of pass p over ``stored`` samples is a permutation by the seed · 2,000,003 + p;
    without stored ones, samples are drawn.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        config = job["config"]
        if job["backend"] == "torchtitan":
            micro_batch = int(config["training.local_batch_size"])
            self._seed = int(config.get("debug.seed") or 0)
        else:
            micro_batch = int(config.get("training.micro_batch_size", 1))
            self._seed = int(config.get("training.seed", 42))
        self._per_rank = micro_batch * job["accumulation"]
        self._batch = self._per_rank * job["data_parallel"]
        self._stored: list[Batch] = []

    def batch(self, step: int, rank: int) -> Batch:
        before = (step - 1) * self._batch
        first = before + rank * self._per_rank
        numbers = range(first, first + self._per_rank)
        return _stacked([self._sample(number) for number in numbers])

    def _sample(self, number: int) -> Batch:
        if not self._stored:
            generator = _generator(self._seed, number)
            return self._drawn(generator)
        count = len(self._stored)
        turn, place = divmod(number, count)
        generator = _generator(self._seed, turn)
        order = torch.randperm(count, generator=generator)
        return self._stored[int(order[place])]

    def _drawn(self, generator: torch.Generator) -> Batch:
        raise NotImplementedError


def _stacked(batches: list[Batch]) -> Batch:
    stacked = {}
    for name in batches[0]:
        tensors = [batch[name] for batch in batches]
        stacked[name] = torch.stack(tensors)
    return stacked


def _generator(seed: int, number: int) -> torch.Generator:
    generator = torch.Generator()
    return generator.manual_seed(seed * 2_000_003 + number)


class _Text(_Ordered):
    """A corpus cut after every length.

    If only answers are trained, a sample is a document, or with packing several.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        config = job["config"]
        self._length = int(config.get("training.seq_len", 2048))
        self._vocabulary = int(job["model"]["vocab_size"])
        if job["assets"]["corpus"] == MOCK:
            return
        length = self._length
        documents = _tokenized(job)
        if config.get("packing"):
            labelled = _labelled(documents, length)
            for packed in _packed(labelled, length):
                self._stored.append(_padded(packed, length))
        elif documents[0].trained is not None:
            self._stored = list(_alone(documents, length))
        else:
            stream = _joined(documents)
            cuts = stream.unfold(0, length + 1, length)
            self._stored = [_shifted(cut) for cut in cuts]

    def _drawn(self, generator: torch.Generator) -> Batch:
        symbols = min(256, self._vocabulary)
        choices = torch.randint(4, (self._length,), generator=generator)
        steps = torch.tensor([1, 3, 7, 19])[choices]
        first = torch.randint(symbols, (1,), generator=generator)
        others = first + steps.cumsum(0)
        places = torch.cat([first, others]) % symbols
        distance = self._vocabulary // symbols
        return _shifted(places * distance)


def _shifted(tokens: Tensor) -> Batch:
    return {"inputs": tokens[:-1], "labels": tokens[1:]}


@dataclass(frozen=True)
class _Labelled:
    """Tokens, and the token after each as its label, -100 where it is not trained."""

    inputs: list[int]
    labels: list[int]


def _labelled(documents: "Iterable[_Document]", length: int) -> Iterator[_Labelled]:
    for document in documents:
        tokens = document.tokens
        if document.trained is None:
            for start in range(0, len(tokens) - 1, length):
                cut = tokens[start : start + length + 1]
                yield _Labelled(cut[:-1], cut[1:])
            continue
        every_label = []
        for token, trained in zip(tokens, document.trained, strict=True):
            label = -100
            if trained:
                label = token
            every_label.append(label)
        inputs = tokens[:-1][:length]
        labels = every_label[1 : length + 1]
        if max(labels, default=-100) >= 0:
            yield _Labelled(inputs, labels)


def _padded(documents: Iterable[_Labelled], length: int) -> Batch:
    inputs: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for document in documents:
        inputs += document.inputs
        labels += document.labels
        positions += range(len(document.inputs))
    padding = length - len(inputs)
    inputs += [0] * padding
    labels += [-100] * padding
    positions += range(padding)
    return {
        "inputs": torch.tensor(inputs),
        "labels": torch.tensor(labels),
        "positions": torch.tensor(positions),
    }


def _alone(documents: "Iterable[_Document]", length: int) -> Iterator[Batch]:
    for document in _labelled(documents, length):
        sample = _padded([document], length)
        del sample["positions"]
        yield sample


def held_out(job: dict[str, Any]) -> Batch:
    """Return the samples that ``job`` evaluates on: held-out documents, each on its own.

    How the run packs them does not matter, because no document sees another.
    """
    evaluation = job["evaluation"]
    length = int(job["config"]["training.seq_len"])
    if evaluation["corpus"]:
        split = evaluation["split"] or "validation"
        documents = _read(job, evaluation["corpus"], split)
    else:
        split = job.get("data", {}).get("split")
        everything = _read(job, job["assets"]["corpus"], split)
        documents = [document for document, out in _divided(job, everything) if out]
    held_out_samples = list(_alone(documents, length))
    return _stacked(held_out_samples)


def _packed(documents: Iterable[_Labelled], length: int) -> list[list[_Labelled]]:
    """Pack best fit, longest first.

    A document goes to the sample with the least room, of several the one that was filled last.
    """
    samples: list[list[_Labelled]] = []
    rooms: list[tuple[int, int]] = []  # of each sample, and minus the turn when it was filled
    longest_first = sorted(documents, key=lambda document: -len(document.inputs))
    for turn, document in enumerate(longest_first):
        size = len(document.inputs)
        fitting = []
        for number, (room, filled) in enumerate(rooms):
            if room >= size:
                fitting.append((room, filled, number))
        if not fitting:
            fitting.append((length, 0, len(samples)))
            samples.append([])
            rooms.append((length, 0))
        room, _, number = min(fitting)
        samples[number].append(document)
        rooms[number] = (room - size, -turn)
    return samples


class _Images(_Ordered):
    """Images with noise and a time, the logistic function of a normal number, by another seed."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        corpus = job["assets"]["corpus"]
        if corpus != MOCK:
            self._stored = list(_cached(Path(corpus)))
            return
        # Mock images: 16 prompts, each with a picture around a common color.
        dit = job["model"]["dit"]
        generator = _generator(self._seed, -1)
        tokens = (dit["image_size"] // 16) ** 2
        channels = dit["in_channels"]
        color = torch.randn(channels, generator=generator)
        variation = torch.randn(16, tokens, channels, generator=generator)
        self._pictures = color + 0.3 * variation
        length = dit["text_tokens"]
        self._text = torch.randn(16, length, dit["text_dim"], generator=generator)
        self._pooled = torch.randn(16, dit["pooled_dim"], generator=generator)

    def _sample(self, number: int) -> Batch:
        image = super()._sample(number)
        generator = _generator(self._seed + 1, number)
        noise = torch.randn(image["latents"].shape, generator=generator)
        time = torch.randn((), generator=generator).sigmoid()
        return image | {"noise": noise, "time": time}

    def _drawn(self, generator: torch.Generator) -> Batch:
        prompt = int(torch.randint(16, (), generator=generator))
        picture = self._pictures[prompt]
        variation = torch.randn(picture.shape, generator=generator)
        latents = picture + 0.1 * variation
        text = self._text[prompt]
        return {"latents": latents, "text": text, "pooled": self._pooled[prompt]}


def _cached(folder: Path) -> Iterator[Batch]:
    """Yield the images of a cache, files by name.

    A token is 2 × 2 latents: channel by channel, then row by row.
    """
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        cache = load_file(file)
        for number, latents in enumerate(cache["latents"]):
            rows = latents.float().unfold(1, 2, 2)
            patches = rows.unfold(2, 2, 2)
            by_token = patches.permute(1, 2, 0, 3, 4)
            tokens = by_token.flatten(0, 1).flatten(1)
            text = cache["text"][number].float()
            pooled = cache["pooled"][number].float()
            yield {"latents": tokens, "text": text, "pooled": pooled}


@dataclass(frozen=True)
class _Document:
    """A document's tokens, and whether each is trained; None if all are."""

    tokens: list[int]
    trained: list[bool] | None = None


_Row = Mapping[str, Any]
_Turns = list[dict[str, Any]]
# Who speaks, and what is trained, is not from the table of the run's own reader, so that a mistake
# there is found.
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)
_ALPACA_INPUT = ", paired with an input that provides further context"
# ShareGPT's senders, where they are not the names of roles.
_ROLES = {"human": "user", "observation": "tool"} | dict.fromkeys(
    ("gpt", "chatgpt", "bot", "bing", "bard", "model", "function_call"), "assistant"
)
# Keys of a message that is not trained if one of them is false or 0.
_SWITCHES = ("weight", "train", "training", "trainable", "loss", "loss_mask")


def _joined(documents: Iterable[_Document]) -> Tensor:
    tokens: list[int] = []
    for document in documents:
        tokens += document.tokens
    return torch.tensor(tokens)


def _tokenized(job: dict[str, Any]) -> list[_Document]:
    name = job["assets"]["corpus"]
    split = job.get("data", {}).get("split")
    documents = _read(job, name, split)
    return [document for document, out in _divided(job, documents) if not out]


def _words_of(job: dict[str, Any]) -> "_Words":
    trained = job.get("data", {}).get("train_on", "completions")
    assets = job["assets"]
    tokenizer = Path(assets["tokenizer"])
    template = assets.get("chat_template")
    return _Words(tokenizer, trained == "completions", template)


def _read(job: dict[str, Any], name: str, split: str | None) -> list[_Document]:
    if name.endswith(".idx"):
        return [_Document(tokens) for tokens in tokens_of(Path(name))]
    data = job.get("data", {})
    words = _words_of(job)
    # A column that the user names is text or a chat of its own.
    layout = [data.get("column")]
    documents: list[_Document] = []
    for row in rows_of(Path(name), split):
        if "question" in data:
            question = row[data["question"]]
            answer = row[data["answer"]]
            asked = {"role": "user", "content": question}
            said = {"role": "assistant", "content": answer}
            documents.append(words.chat(row, [asked, said]))
            continue
        if layout == [None]:
            layout = _layout_of(row)
        documents += _documents(row, layout, words)
    return documents


def _layout_of(row: _Row) -> list[str]:
    """Return the first layout whose columns the row has."""
    return next(names for names in LAYOUTS if row.keys() >= {*names})


def _divided(job: dict[str, Any], documents: list[_Document]) -> Iterator[tuple[_Document, bool]]:
    """Yield each document, and whether it is held out: evenly spread over the corpus."""
    share = job.get("evaluation", {}).get("fraction", 0)
    for number, document in enumerate(documents):
        before = int(number * share)
        after = int((number + 1) * share)
        yield document, after > before


def _documents(row: _Row, layout: list[str], words: "_Words") -> "list[_Document]":
    column = layout[0]
    value = row[column]
    if column == "instruction":
        return [_instructed(row, words)]
    value = _turns_in(value)
    if isinstance(value, str):
        if len(layout) > 1:
            return [words.answer(value, row["completion"])]
        if value.strip():
            return [words.plain(value)]
        return []
    if len(layout) > 1:
        turns = value + _turns_in(row["completion"])
        return [words.chat(row, turns, first=len(value))]
    return [words.chat(row, value)]


def _turns_in(value: Any) -> Any:
    """Return the turns that are written as JSON; any other value as it is."""
    with suppress(ValueError, TypeError):
        turns = json.loads(value)
        if {"role", "from"} & set(turns[0]):
            return turns
    return value


def _instructed(row: _Row, words: "_Words") -> _Document:
    """Alpaca's columns, as a chat if the tokenizer has a template."""
    asked = row["instruction"]
    context = row.get("input")
    if words.template:
        turns: _Turns = []
        if context:
            asked = f"{asked}\n{context}".removeprefix("\n")
        history = row.get("history") or ()
        for question, said in [*history, [asked, row["output"]]]:
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": said})
        return words.chat(row, turns)
    prompt = _ALPACA.format("", asked, "")
    if context:
        prompt = _ALPACA.format(_ALPACA_INPUT, asked, f"### Input:\n{context}\n\n")
    return words.answer(prompt, row["output"])


class _Words:
    """Text and chats as tokens of one tokenizer. ``answers``: only words of answers are trained.

    ``template`` is a file that replaces the tokenizer's chat template.
    """

    def __init__(self, folder: Path, answers: bool, template: str | None = None) -> None:
        self._answers = answers
        self._tokenizer = _tokenizer(folder)
        if template:
            text = Path(template).read_text(encoding="utf-8")
            with suppress(ValueError):
                text = json.loads(text)["chat_template"]
            self._tokenizer.chat_template = text
        self.template = self._tokenizer.chat_template
        self._marks = marks(folder)
        config = json_if_readable(folder / "tokenizer_config.json")
        if config.get("add_bos_token") is False:
            self._marks.pop("bos_token_id", None)

    def plain(self, text: str) -> _Document:
        tokens = self._tokenizer(text)["input_ids"]
        return _Document(self._between(tokens))

    def _between(self, tokens: list[int]) -> list[int]:
        begin = self._marks.get("bos_token_id")
        end = self._marks.get("eos_token_id")
        marked = list(tokens)
        if begin is not None and tokens[:1] != [begin]:
            marked.insert(0, begin)
        if end is not None and tokens[-1:] != [end]:
            marked.append(end)
        return marked

    def answer(self, prompt: str, completion: str) -> _Document:
        encoded = self._tokenizer(prompt + completion, return_offsets_mapping=True)
        inner = encoded["input_ids"]
        tokens = self._between(inner)
        if not self._answers:
            return _Document(tokens)
        trained = []
        if tokens[:1] != inner[:1]:
            # A mark of the beginning.
            trained.append(False)
        for start, end in encoded["offset_mapping"]:
            trained.append(start < end > len(prompt))
        if len(trained) < len(tokens):
            # A mark of the end.
            trained.append(True)
        end = self._marks.get("eos_token_id")
        trained[-1] |= tokens[-1] == end
        return _Document(tokens, trained)

    def chat(self, row: _Row, turns: _Turns, first: int = 0) -> _Document:
        """Return a chat in which answers from the turn ``first`` on are trained."""
        turns = _with_roles(turns, row.get("system"))
        tools = row.get("tools") or None
        if isinstance(tools, str):
            tools = json.loads(tools) or None
        options: dict[str, Any] = {"tools": tools}
        options |= row.get("chat_template_kwargs") or {}
        turns = self._in_the_form_of_the_template(turns, options)
        if not self._answers:
            text = self._rendered(turns, options)
            encoded = self._tokenizer(text, add_special_tokens=False)
            return _Document(encoded["input_ids"])
        some_are_off = False
        answers = []
        for number, turn in enumerate(turns):
            is_off = any(turn.get(key) == 0 for key in _SWITCHES)
            some_are_off |= is_off
            if turn["role"] == "assistant" and number >= first and not is_off:
                answers.append(number)
        if first or not self._marks_answers(tools):
            return self._between_prompts(turns, answers, options)
        marked = self._marked(turns, options)
        if not some_are_off:
            return marked
        switched_on = self._between_prompts(turns, answers, options)
        return _trained_in_both(switched_on, marked)

    def _marked(self, turns: _Turns, options: _Row) -> _Document:
        """Return a chat in which the template says what is trained."""
        marked = self._tokenizer.apply_chat_template(
            turns, **options, return_dict=True, return_assistant_tokens_mask=True
        )
        trained = [bool(mask) for mask in marked["assistant_masks"]]
        return _Document(marked["input_ids"], trained)

    def _between_prompts(self, turns: _Turns, answers: list[int], options: _Row) -> _Document:
        """Return a chat in which the turns with the numbers ``answers`` are trained."""
        text = self._rendered(turns, options)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        trained = [False] * len(encoded["input_ids"])
        for number in answers:
            before = turns[:number]
            span = self._span(text, before, turns[number], options)
            within = {encoded.char_to_token(place) for place in span} - {None}
            first = min(within, default=0)
            last = max(within, default=-1)
            for token in range(first, last + 1):
                trained[token] = True
        return _Document(encoded["input_ids"], trained)

    def _in_the_form_of_the_template(self, turns: _Turns, options: _Row) -> _Turns:
        """Return the turns as the template takes them.

        The arguments of calls are objects rather than JSON, and content rather a list of one text
        than this text.
        """
        parsed = json.loads(json.dumps(turns), object_hook=_with_arguments)
        for form in (parsed, turns, _with_texts(parsed), _with_texts(turns)):
            with suppress(Exception):
                self._rendered(form, options)
                parts = _parts(form)
                counted = self._rendered(parts, options)
                if counted.count("70801") == str(parts).count("70801") and "{'" not in counted:
                    return self._in_a_rare_form(list(form), turns, options)
        return self._in_a_rare_form(turns, turns, options)

    def _in_a_rare_form(self, usual: _Turns, turns: _Turns, options: _Row) -> _Turns:
        """Return ``usual``, or the form in which the template alone writes all that is said."""
        if not self._says_all(usual, options):
            for form in (_with_json(turns), _with_lists(turns)):
                if self._says_all(form, options):
                    return form
        return usual

    def _says_all(self, turns: _Turns, options: _Row) -> bool:
        with suppress(Exception):
            text = self._rendered(turns, options)
            words = [re.sub(r"^.*</think>", "", said, flags=re.DOTALL) for said in _said_in(turns)]
            return not re.search('\'type\'|"type": "text"', text) and all(
                word.strip() in text for word in words
            )
        return False

    def _marks_answers(self, tools: Any) -> bool:
        template = self._tokenizer.get_chat_template(None, tools)
        return re.search(r"{%-?\s*generation\b", template) is not None

    def _span(self, text: str, before: _Turns, turn: _Row, options: _Row) -> range:
        """Return the places of the characters of ``turn`` in ``text``."""
        asked = self._rendered(before, options, add_generation_prompt=True)
        answered = self._rendered([*before, turn], options)
        if not text.startswith(asked):
            asked = re.sub(r"<think>\s*(</think>\s*)?$", "", asked)
        start = len(asked)
        rest = answered[start:]
        if not text.startswith(rest, start):
            # An answer may begin with thoughts that are later left out, or end with the end of the
            # whole text.
            whole = rest
            rest = re.sub(r"^\s*<think>.*?</think>\s*", "", rest, flags=re.DOTALL)
            if not text.startswith(rest, start):
                # Some templates keep the marks of a thought.
                emptied = re.sub(r"<think>.*?</think>", "<think></think>", whole, flags=re.DOTALL)
                if text.startswith(emptied, start):
                    rest = emptied
            if not text.startswith(rest, start):
                rest = rest.removesuffix(self._tokenizer.eos_token or "")
        end = start + len(rest)
        # The model must learn to stop: a token of the template that follows the bare words counts.
        added = sorted(self._tokenizer.get_added_vocab(), reverse=True)
        marks = "|".join(re.escape(token) for token in added)
        words = text[:end]
        if marks and not re.search(rf"(?:{marks})\s*\Z", words):
            follows = re.compile(marks).match(text, end)
            if follows:
                end = follows.end()
        return range(start, end)

    def _rendered(self, turns: list[Any], options: _Row, **more: Any) -> str:
        # A list of conversations, which may be empty.
        texts = self._tokenizer.apply_chat_template([turns], **options, tokenize=False, **more)
        return str(texts[0])


def _trained_in_both(document: _Document, other: _Document) -> _Document:
    """Return ``document`` with only those tokens trained that are trained in both."""
    pairs = zip(document.trained or (), other.trained or (), strict=True)
    trained = [ours and theirs for ours, theirs in pairs]
    return _Document(document.tokens, trained)


def _with_roles(turns: _Turns, system: str | None) -> _Turns:
    if "from" in turns[0]:
        turns = [turn | _said(turn["from"], turn["value"]) for turn in turns]
    for turn in turns:
        for key in ("tool_calls", "function_call"):
            if not turn.get(key):
                turn.pop(key, None)
    if system and turns[0]["role"] != "system":
        return [{"role": "system", "content": system}, *turns]
    return turns


def _said(sender: str, value: str) -> dict[str, Any]:
    """Return the role and the words of one of ShareGPT's turns."""
    said: dict[str, Any] = {"role": _ROLES.get(sender, sender), "content": value}
    if sender == "function_call":
        calls = json.loads(value)
        if isinstance(calls, dict):
            calls = [calls]
        said["content"] = ""
        said["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return said


def _parts(turns: _Turns) -> _Turns:
    """Return the turns with a number as each text of a list."""
    listed = []
    for turn in turns:
        content = turn.get("content")
        if isinstance(content, list):
            content = [{**part, "text": "70801"} for part in content]
            listed.append({**turn, "content": content})
        else:
            listed.append(turn)
    return listed


def _said_in(turns: _Turns) -> Iterator[str]:
    for turn in turns:
        content = turn.get("content") or ""
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content)


def _with_json(turns: _Turns) -> _Turns:
    """Return the turns with the arguments of calls as JSON."""

    def written(part: _Row) -> _Row:
        if "name" in part and isinstance(part.get("arguments"), dict):
            return {**part, "arguments": json.dumps(part["arguments"], ensure_ascii=False)}
        return part

    copied: _Turns = json.loads(json.dumps(turns), object_hook=written)
    return copied


def _with_lists(turns: _Turns) -> _Turns:
    """Return the turns with each text in a list of its own."""
    changed = []
    for turn in turns:
        content = turn.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        changed.append({**turn, "content": content})
    return changed


def _with_texts(turns: _Turns) -> _Turns:
    """Return the turns with the text of each content that is a list of one text."""
    changed = []
    for turn in turns:
        content = turn.get("content")
        if isinstance(content, list) and len(content) == 1:
            changed.append({**turn, "content": content[0]["text"]})
        else:
            changed.append(turn)
    return changed


def _with_arguments(part: _Row) -> _Row:
    text = part.get("arguments")
    if "name" in part and isinstance(text, str):
        with suppress(ValueError):
            arguments = json.loads(text)
            if isinstance(arguments, dict):
                return {**part, "arguments": arguments}
    return part


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def marks(folder: Path) -> dict[str, int]:
    """Return ``bos_token_id`` and ``eos_token_id`` of a tokenizer, those that it has."""
    tokenizer = _tokenizer(folder)
    begin = tokenizer.bos_token_id
    end = tokenizer.eos_token_id
    if tokenizer.eos_token is None:
        for name in ("generation_config.json", "config.json"):
            number = json_if_readable(folder / name).get("eos_token_id")
            if isinstance(number, list):
                number = next(iter(number), None)
            if number is not None and number >= 0:
                end = number
    numbers = {}
    if begin is not None:
        numbers["bos_token_id"] = begin
    if end is not None:
        numbers["eos_token_id"] = end
    return numbers
