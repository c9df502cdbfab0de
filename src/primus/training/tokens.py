"""The tokens of a corpus, as transformers makes them, in files that ranks map into memory.

A document of plain text is what ``AutoTokenizer`` returns, between its BOS and EOS tokens if it has them. A chat is
what ``apply_chat_template`` returns. Truncation and padding never apply.
"""

from __future__ import annotations

import inspect
import os
import re
import resource
import signal
import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import primus
from primus.errors import InputError
from primus.files import json_if_readable, write_file
from primus.recipes.weights import HUB
from primus.refusals import refusal
from primus.terminal import counted
from primus.training import corpus as corpora
from primus.training.corpus import Corpus, Document, Files, Layout, first_line

if TYPE_CHECKING:
    import numpy as np

_MARKED = re.compile(r"{%-?\s*generation\s*-?%}")
# What thinking models' templates add to the prompt, and leave out of earlier answers.
_OPEN_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
_THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
_VOCABULARIES = ("*.model", "*.tiktoken", "tokenizer.json", "tekken.json", "vocab*")
# Characters that are tokenized in one call.
_BATCH = 1 << 20
# Processor time that a template may take for a message, and memory for a chat.
_MOST_SECONDS, _MOST_BYTES = 10.0, 2 << 30
_EVERY = 1_000_000


def without_torch() -> None:
    """Let transformers load tokenizers without torch, whose import takes seconds, in this process.

    It is never that of the current folder, which an empty part of PYTHONPATH would put on the path of modules.
    """
    here, own = Path.cwd(), Path(primus.__file__).parents[1]
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != here or Path(place) == own]
    try:
        import transformers.utils
    except ImportError as error:
        raise refusal("no_transformers", error=first_line(error)) from None
    for module in (transformers.utils, transformers.utils.import_utils) if "torch" not in sys.modules else ():
        module.is_torch_available = lambda: False


class Encoder:
    """The tokenizer in a folder or on the hub, as ``AutoTokenizer`` loads it. Raises InputError if it does not."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer
        from transformers.utils import logging

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        logging.set_verbosity_error()
        self.name = name
        folder = corpora.tokenizer_folder(name)
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
            self.tokenizer("some settings of a wrong type only fail here")
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise refusal("custom_tokenizer", name) from error
            there = any(any(folder.glob(form)) for form in _VOCABULARIES)
            raise refusal("no_tokenizer" if there else "no_vocabulary", name, error=first_line(error)) from error
        if not self.tokenizer.is_fast:
            raise InputError("the tokenizer has no fast form (tokenizer.json)", where=name)
        if getattr(self.tokenizer.backend_tokenizer.model, "dropout", None):
            raise refusal("dropout", f"{name}/tokenizer.json: model.dropout")
        self._arguments = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys()
        # Some tokenizers have a BOS token, and say that text does not begin with it.
        begins = json_if_readable(folder / "tokenizer_config.json").get("add_bos_token")
        self.begin: int | None = None if begins is False else self.tokenizer.bos_token_id
        self.end: int | None = self.tokenizer.eos_token_id
        for file in ("config.json", "generation_config.json"):
            number = json_if_readable(folder / file).get("eos_token_id")
            number = number[0] if isinstance(number, list) and number else number
            if self.end is None and isinstance(number, int) and number >= 0:
                if number >= len(self.tokenizer):
                    raise refusal("no_token", f"{name}/{file}: eos_token_id", number=number, count=len(self.tokenizer))
                self.end = number

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of plain documents."""
        encoded = self.tokenizer(list(texts), return_attention_mask=False, return_token_type_ids=False)
        return [self._between(tokens) for tokens in encoded["input_ids"]]

    def _between(self, tokens: list[int]) -> list[int]:
        begin = [] if self.begin is None or tokens[:1] == [self.begin] else [self.begin]
        return [*begin, *tokens, *([] if self.end is None or tokens[-1:] == [self.end] else [self.end])]

    def document(self, document: Document, where: str, *, completions: bool = True) -> tuple[list[int], list[int]]:
        """Return the tokens of a document, and 1 for each that is trained: all of them without ``completions``."""
        if document.messages is not None and (self.tokenizer.chat_template or not document.text):
            return self._chat(document, where, completions)
        encoded = self.tokenizer(document.text, return_offsets_mapping=True)
        tokens = encoded["input_ids"]
        mask = [int(end > max(start, document.prompt)) for start, end in encoded["offset_mapping"]]
        whole = self._between(tokens)
        mask = [*[0] * (tokens[:1] != whole[:1]), *mask, 1][: len(whole)]
        mask[-1] = max(mask[-1], int(whole[-1] == self.end))
        return whole, mask

    def parts(self, tokens: Sequence[int], mask: Sequence[int]) -> list[tuple[str, bool]]:
        """Return the text of ``tokens`` in parts, and whether each is trained."""
        parts, before = [], ""
        for trained, run in groupby(range(len(tokens)), key=lambda place: bool(mask[place])):
            # Parts of a text, since a tokenizer may decode the beginning of a text in another way.
            last = [*run][-1] + 1
            text: str = self.tokenizer.decode(tokens[:last], clean_up_tokenization_spaces=False)
            text = text if last == len(tokens) else text.rstrip("\ufffd")  # half a character
            parts.append((text[len(before) :], trained))
            before = text
        return parts

    def _masked(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """As transformers: from the first token of a span's first character to the first token of its last one."""
        encoded = self.tokenizer(text, add_special_tokens=False)
        mask = [0] * len(encoded["input_ids"])
        for span in spans:
            ends = (map(encoded.char_to_token, range(*span)), map(encoded.char_to_token, reversed(range(*span))))
            first, last = (next((token for token in tokens if token is not None), None) for tokens in ends)
            if first is not None and last is not None:
                mask[first : last + 1] = [1] * (last + 1 - first)
        return encoded["input_ids"], mask

    def _chat(self, document: Document, where: str, completions: bool) -> tuple[list[int], list[int]]:
        messages = list(document.messages or ())
        try:
            template = self.tokenizer.get_chat_template(None, document.tools)
        except ValueError:
            raise refusal("no_template", where, name=self.name) from None
        try:
            if reserved := sorted(self._arguments & {*document.options}):
                raise ValueError(f"chat_template_kwargs has {reserved[0]}, which is no variable of a template")
            render = partial(self.tokenizer.apply_chat_template, tools=document.tools, **document.options)
            with _limited(_MOST_SECONDS * len(messages)):
                (text,) = render([messages], tokenize=False)
                _refuse_lost(messages, text, template)
                _refuse_dropped(text, messages, document.tools or (), render)
                marks = None
                if completions and _MARKED.search(template) and not document.first:
                    encoded = render(messages, return_dict=True, return_assistant_tokens_mask=True)
                    marks = encoded["assistant_masks"]
                    if all(map(_trains, messages)):
                        return encoded["input_ids"], marks
                spans = self._answers(text, messages, document.first, render) if completions else [(0, len(text))]
        except _OtherBeginning:
            raise refusal("other_beginning", where) from None
        except Exception as error:  # noqa: BLE001, a template can fail in any way
            raise refusal("template", where, error=first_line(error)) from None
        tokens, mask = self._masked(text, spans)
        return tokens, [*map(min, mask, marks)] if marks else mask

    def _answers(
        self, text: str, messages: Sequence[Mapping[str, Any]], first: int, render: Callable[..., Any]
    ) -> list[tuple[int, int]]:
        turns = [n for n, turn in enumerate(messages) if turn["role"] == "assistant" and n >= first and _trains(turn)]
        if not turns:
            return []
        try:
            prompts = render([messages[:n] for n in turns], tokenize=False, add_generation_prompt=True)
        except Exception:  # noqa: BLE001, the template has no form for a beginning of the chat
            raise _OtherBeginning from None
        answers, spans = render([messages[: n + 1] for n in turns], tokenize=False), []
        for prompt, answer in zip(prompts, answers, strict=True):
            start = _agreed(text, 0, prompt, _OPEN_THOUGHT.sub("", prompt))
            closed = answer.removesuffix(self.tokenizer.eos_token or "")
            end = _agreed(text, start + 1, answer, closed, answer[:start] + _THOUGHT.sub("", answer[start:]))
            spans.append((start, end))
        return spans


def _refuse_dropped(text: str, messages: Sequence[Any], tools: Sequence[Any], render: Callable[..., Any]) -> None:
    """Raise ValueError for a part of a chat that the template leaves out of its ``text``."""
    chat, marks = deepcopy([messages, tools]), dict[str, str]()
    parts = list(_parts(*chat))
    # A short one, such as the name of a tool, may be part of any text.
    texts = [str(holder[key]).strip() if key in ("content", "text") else "" for _, holder, key, _ in parts]
    if all(len(each) > 11 and each in text for each in texts):
        return
    for number, (name, holder, key, identity) in enumerate(parts):
        # Digits, which stay as they are in capital letters.
        mark, value = f"90716{number}61709", holder[key]
        holder[key] = dict.fromkeys(value, mark) if isinstance(value, dict) else f"{value}{mark}"
        # Some templates write the ids of calls only.
        marks |= {} if identity and identity in text else {mark: name}
    try:
        (marked,) = render(chat[:1], tokenize=False, tools=chat[1] or None)
    except Exception:  # noqa: BLE001, a template that refuses other values has read them
        return
    if dropped := [name for mark, name in marks.items() if mark not in marked]:
        raise ValueError(f"it leaves out {dropped[0]}")


def _parts(messages: Sequence[Any], tools: Sequence[Any]) -> Iterator[tuple[str, Any, str, str | None]]:
    """Yield what a template must write: a name for it, the object and the key that hold it, and the id of a call."""
    calls = [call for turn in messages for call in [*(turn.get("tool_calls") or ()), turn.get("function_call")] if call]
    for call in (*tools, *calls):
        function = call.get("function", call)
        for key, name in (("name", "the tool"), ("arguments", "the arguments of")):
            if function.get(key) not in (None, "", "{}", {}):
                yield f"{name} {function.get('name')!r}", function, key, call.get("id") if key == "name" else None
    # Publishers leave out system prompts, and the thoughts of earlier answers.
    for turn in (turn for turn in messages if turn["role"] != "system"):
        content = turn.get("content")
        for holder, key in [(part, "text") for part in content] if isinstance(content, list) else [(turn, "content")]:
            if _THOUGHT.sub("", text := str(holder.get(key) or "")).strip():
                yield f"a message of {turn['role']}, {text[:40]!r}", holder, key, None


def _trains(turn: Mapping[str, Any]) -> bool:
    return all(turn.get(key) in (None, 1) for key in corpora.WEIGHTS)


def _refuse_lost(messages: Sequence[Mapping[str, Any]], text: str, template: str) -> None:
    inline = _THOUGHT.match(str(messages[-1].get("content")))
    thoughts = [inline[1] if inline else "", *(str(messages[-1].get(key) or "") for key in _THOUGHT_KEYS)]
    if not all(thought.strip() in text for thought in thoughts):
        raise ValueError("it leaves out the thoughts of the last answer")
    for turn in messages:
        if lost := [key for key in _THOUGHT_KEYS if turn.get(key) and not re.search(rf"\b{key}\b", template)]:
            raise ValueError(f"it leaves out {lost[0]}")
        if not isinstance(content := turn.get("content"), str | None) and str(content) in text:
            raise ValueError(f"it has no form for content that is no text, {str(content)[:40]}")


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Limit processor time and memory of the block, in which a template may loop forever. Raises ValueError."""

    def end(*_: object) -> None:
        raise ValueError(f"it has not ended after {seconds:g} s")

    before, memory = signal.signal(signal.SIGVTALRM, end), resource.getrlimit(resource.RLIMIT_AS)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + _MOST_BYTES
    # A limit that this process has already, such as by ulimit -v, stays.
    most = min([most, *(limit for limit in memory if limit != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_AS, (most, memory[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except MemoryError:
        raise ValueError(f"it needs more than {_MOST_BYTES >> 30} GiB of memory") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, memory)


class _OtherBeginning(Exception):
    pass


def _agreed(text: str, least: int, *beginnings: str) -> int:
    for beginning in beginnings:
        if text.startswith(beginning) and len(beginning) >= least:
            return len(beginning)
    raise _OtherBeginning


class Reader:
    """The documents of a corpus as tokens. ``layout`` is that of its first row. Raises InputError if it has none."""

    def __init__(self, corpus: Corpus, made: Iterable[str] | None = None) -> None:
        self.corpus = corpus
        if not corpus.name.startswith(HUB) and not corpus.tokenizer.startswith(HUB):
            os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        self.files = Files(paths=[]) if made or corpus.name.startswith(HUB) else corpora.files_of(corpus)
        every = ((str(n), {"text": text}) for n, text in enumerate(made)) if made else corpora.rows(corpus, self.files)
        if (first := next(every, None)) is None:
            raise InputError("the corpus contains no text", where=corpus.name)
        self.layout: Layout = corpora.layout_of(first[1], corpus.column, first[0])
        self._rows = chain([first], every)
        self.encoder = Encoder(corpus.tokenizer)

    @property
    def masked(self) -> bool:
        """Whether only some tokens are trained."""
        return self.layout.prompted and self.corpus.completions

    def __iter__(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yield the tokens of each document that is not empty, and 1 for each that is trained; no mask: all are."""
        texts, size, roles = list[str](), 0, set[str]()
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
                    texts, size = [], 0
        if texts:
            yield from ((tokens, ()) for tokens in self.encoder.texts(texts))
        if roles and "assistant" not in roles and self.masked:
            raise refusal("no_assistant", self.corpus.name, roles=", ".join(sorted(roles)))

    def sentence(self, figures: Mapping[str, Any], seq_len: int, head: str = "") -> str:
        """Return what was read, with the figures of :func:`figures_of`, in one line that begins with ``head``."""
        kind = "chat" if self.layout.chat else "answer" if self.layout.prompted else "document"
        marks = (("BOS", self.encoder.begin, figures["begin"]), ("trained EOS", self.encoder.end, figures["end"]))
        parts = [
            f"{counted(figures['documents'], kind)} in {' and '.join(self.layout.columns)}, "
            f"{figures['tokens']:,} tokens" + (f", {figures['trained']:.0%} of them trained" if self.masked else ""),
            f"longest {figures['longest']:,}, {figures['longer']:.0%} {'cut at' if self.masked else 'longer than'} "
            f"seq_len {seq_len:,}",
            ", ".join(f"no {name}" if mark is None else f"{name} in {share:.0%}" for name, mark, share in marks),
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
        """Return where pieces of at most ``seq_len`` + 1 tokens begin and end that are trained on their own.

        With a mask, they are the beginnings of documents that have a label there; without, every token but the first
        of a document is the label of one.
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
        """Return the number of samples of one epoch. Without mask and ``packing``, documents are one stream."""
        if self.mask is None and not packing:
            return (len(self.tokens) - 1) // seq_len
        starts, ends = self.pieces(seq_len)
        return len(packs((ends - starts - 1).tolist(), seq_len)) if packing else len(starts)


def packs(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return samples of up to ``size`` tokens, each a list of the numbers of its documents, which have ``lengths``.

    Best fit, the longest documents first: each goes to the sample with the least room for it, of several to the one
    that was filled last.
    """
    samples: list[list[int]] = []
    # Of each sample with room for a document: its room, less the turn in which it was filled, and its number.
    rooms: list[tuple[int, int, int]] = []
    shortest = min(lengths, default=0)
    for turn, number in enumerate(sorted(range(len(lengths)), key=lambda number: -lengths[number])):
        place = bisect_left(rooms, (lengths[number],))
        if place < len(rooms):
            room, _, sample = rooms.pop(place)
        else:
            room, sample = size, len(samples)
            samples.append([])
        samples[sample].append(number)
        if (room := room - lengths[number]) >= shortest:
            insort(rooms, (room, -turn, sample))
    return samples


def figures_of(tokens: Tokens, seq_len: int, encoder: Encoder) -> dict[str, Any]:
    """Return figures of ``tokens``, made by ``encoder``: numbers of ``documents``, of ``tokens`` and of those of the
    ``longest`` document, and shares of 1: of the tokens, those that are ``trained``; of the documents, those that are
    ``longer`` than ``seq_len`` + 1 tokens, that begin with BOS (``begin``), and in which EOS is trained (``end``).
    ``left_out`` documents have no answer.
    """
    import numpy as np

    count, starts = len(tokens.ends), np.concatenate(([0], tokens.ends[:-1]))
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
    reader: Reader, folder: Path, *, name: str = "train", held_out: float = 0.0, progress: Callable[[str], None]
) -> None:
    """Write the tokens of ``reader`` for :func:`stored`. Raises InputError if there are no documents.

    ``held_out`` is the share of the documents, evenly spread, that goes to the name ``eval`` instead.
    """
    sinks = {name: _Sink(folder, name), **({"eval": _Sink(folder, "eval")} if held_out else {})}
    for number, (tokens, mask) in enumerate(reader):
        held = int((number + 1) * held_out) > int(number * held_out)
        sinks["eval" if held else name].add(tokens, mask)
        if (number + 1) % _EVERY == 0:
            progress(f"{number + 1:,} documents are tokenized")
    for sink in sinks.values():
        if not sink.ends or not sink.ends[-1]:
            lacking = f"too few documents for eval.fraction={held_out}" if held_out else "no text"
            raise InputError(f"the corpus contains {lacking}", where=reader.corpus.name)
        sink.close(masked=reader.masked)


# The nodes of a job write the same files: each under names of its own first.
class _Sink:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name, self.ends = folder, name, array("q")
        self._waiting = {kind: folder / f".{name}.{kind}.{os.urandom(6).hex()}" for kind in ("tokens", "mask")}
        self._files: dict[str, IO[bytes]] = {kind: path.open("wb") for kind, path in self._waiting.items()}

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
