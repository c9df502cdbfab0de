"""The tokens of one document, as transformers makes them: text between BOS and EOS, or a chat by
its template.

A document of plain text is what ``AutoTokenizer`` returns, between its BOS and EOS tokens if it has
them. A chat is what ``apply_chat_template`` returns. Truncation and padding never apply. A template
that leaves out a part of a chat is refused.
"""

import inspect
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import primus_images
from primus_images.errors import HostError, InputError
from primus_images.files import json_if_readable
from primus_images.training.text import corpus as corpora
from primus_images.training.text.corpus import Document, first_line

_MARKED = re.compile(r"{%-?\s*generation\s*-?%}")
# What thinking models' templates add to the prompt, and leave out of earlier answers.
_OPEN_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
_THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
_VOCABULARIES = ("*.model", "*.tiktoken", "tokenizer.json", "tekken.json", "vocab*")
# Processor time that a template may take for a message, and memory for a chat.
_MOST_SECONDS = 10.0
_MOST_BYTES = 2 << 30


def without_torch() -> None:
    """Let transformers load tokenizers without torch, whose import takes seconds, in this process.

    It is never that of the current folder, which an empty part of PYTHONPATH would put on the path
    of modules.
    """
    here = Path.cwd()
    own = Path(primus_images.__file__).parents[1]
    sys.path[:] = [
        place for place in sys.path if Path(place).resolve() != here or Path(place) == own
    ]
    try:
        import transformers.utils
    except ImportError as error:
        raise HostError(
            f"transformers cannot be imported: {first_line(error)}",
            hint="run this inside a primus image",
        ) from None
    for module in (
        (transformers.utils, transformers.utils.import_utils) if "torch" not in sys.modules else ()
    ):
        module.is_torch_available = lambda: False


class Encoder:
    """The tokenizer in a folder or on the hub, as ``AutoTokenizer`` loads it. Raises InputError if
    it does not.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer
        from transformers.utils import logging

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        logging.set_verbosity_error()
        self.name = name
        folder = corpora.tokenizer_folder(name)
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, use_fast=True, trust_remote_code=False
            )
            self.tokenizer("some settings of a wrong type only fail here")
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise InputError(
                    "the tokenizer cannot be loaded: it needs custom code (auto_map), which primus "
                    "does not run",
                    where=name,
                    hint="set assets.tokenizer to a folder that AutoTokenizer can load",
                ) from error
            there = any(any(folder.glob(form)) for form in _VOCABULARIES)
            if there:
                raise InputError(
                    f"the tokenizer cannot be loaded: {first_line(error)}",
                    where=name,
                    hint="set assets.tokenizer to a folder that AutoTokenizer can load",
                ) from error
            raise InputError(
                "the folder has no tokenizer (tokenizer.json or tokenizer.model)",
                where=name,
                hint="set assets.tokenizer to a folder that AutoTokenizer can load",
            ) from error
        if not self.tokenizer.is_fast:
            raise InputError("the tokenizer has no fast form (tokenizer.json)", where=name)
        if getattr(self.tokenizer.backend_tokenizer.model, "dropout", None):
            raise InputError(
                "the tokenizer tokenizes the same text differently each time",
                where=f"{name}/tokenizer.json: model.dropout",
                hint="set it to null",
            )
        self._arguments = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys()
        # Some tokenizers have a BOS token, and say that text does not begin with it.
        begins = json_if_readable(folder / "tokenizer_config.json").get("add_bos_token")
        self.begin: int | None = None if begins is False else self.tokenizer.bos_token_id
        self.end: int | None = self.tokenizer.eos_token_id
        for file in ("config.json", "generation_config.json"):
            number = json_if_readable(folder / file).get("eos_token_id")
            if isinstance(number, list) and number:
                number = number[0]
            if self.end is None and isinstance(number, int) and number >= 0:
                if number >= len(self.tokenizer):
                    raise InputError(
                        f"{number} is no token of the tokenizer, which has {len(self.tokenizer)}",
                        where=f"{name}/{file}: eos_token_id",
                        hint="correct it, or remove it",
                    )
                self.end = number

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of plain documents."""
        encoded = self.tokenizer(
            list(texts), return_attention_mask=False, return_token_type_ids=False
        )
        return [self._between(tokens) for tokens in encoded["input_ids"]]

    def _between(self, tokens: list[int]) -> list[int]:
        if self.begin is None or tokens[:1] == [self.begin]:
            begin = []
        else:
            begin = [self.begin]
        return [
            *begin,
            *tokens,
            *([] if self.end is None or tokens[-1:] == [self.end] else [self.end]),
        ]

    def document(
        self, document: Document, where: str, *, completions: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a document, and 1 for each that is trained: all of them without
        ``completions``.
        """
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
        parts = []
        before = ""
        for trained, run in groupby(range(len(tokens)), key=lambda place: bool(mask[place])):
            # Parts of a text, since a tokenizer may decode the beginning of a text in another way.
            last = [*run][-1] + 1
            text: str = self.tokenizer.decode(tokens[:last], clean_up_tokenization_spaces=False)
            if last != len(tokens):
                text = text.rstrip("\ufffd")
            parts.append((text[len(before) :], trained))
            before = text
        return parts

    def _masked(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """As transformers: from the first token of a span's first character to the first token of
        its last one.
        """
        encoded = self.tokenizer(text, add_special_tokens=False)
        mask = [0] * len(encoded["input_ids"])
        for span in spans:
            ends = (
                map(encoded.char_to_token, range(*span)),
                map(encoded.char_to_token, reversed(range(*span))),
            )
            first, last = (
                next((token for token in tokens if token is not None), None) for tokens in ends
            )
            if first is not None and last is not None:
                mask[first : last + 1] = [1] * (last + 1 - first)
        return encoded["input_ids"], mask

    def _chat(
        self, document: Document, where: str, completions: bool
    ) -> tuple[list[int], list[int]]:
        messages = list(document.messages or ())
        try:
            template = self.tokenizer.get_chat_template(None, document.tools)
        except ValueError:
            raise InputError(
                f"the corpus contains chat messages, but the tokenizer {self.name} has no chat "
                "template",
                where=where,
                hint="assets.tokenizer=FOLDER of an instruction-tuned model: its "
                "tokenizer_config.json has chat_template",
            ) from None
        try:
            reserved = sorted(self._arguments & {*document.options})
            if reserved:
                raise ValueError(
                    f"chat_template_kwargs has {reserved[0]}, which is no variable of a template"
                )
            render = partial(
                self.tokenizer.apply_chat_template, tools=document.tools, **document.options
            )
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
                if completions:
                    spans = self._answers(text, messages, document.first, render)
                else:
                    spans = [(0, len(text))]
        except _OtherBeginning:
            raise InputError(
                "the tokenizer's chat template renders the beginning of this chat in another "
                "way than the whole, so that the assistant's words cannot be told from the rest",
                where=where,
                hint="data.train_on=all trains every token; or mark the words with {% generation %} "
                "in the template",
            ) from None
        except Exception as error:
            raise InputError(
                f"the tokenizer's chat template refuses the messages: {first_line(error)}",
                where=where,
                hint="choose a template that takes them (chat_template.jinja, or "
                "tokenizer_config.json), or remove them",
            ) from None
        tokens, mask = self._masked(text, spans)
        return tokens, [*map(min, mask, marks)] if marks else mask

    def _answers(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        first: int,
        render: Callable[..., Any],
    ) -> list[tuple[int, int]]:
        turns = [
            n
            for n, turn in enumerate(messages)
            if turn["role"] == "assistant" and n >= first and _trains(turn)
        ]
        if not turns:
            return []
        try:
            prompts = render(
                [messages[:n] for n in turns], tokenize=False, add_generation_prompt=True
            )
        except Exception:
            raise _OtherBeginning from None
        answers = render([messages[: n + 1] for n in turns], tokenize=False)
        spans = []
        for prompt, answer in zip(prompts, answers, strict=True):
            start = _agreed(text, 0, prompt, _OPEN_THOUGHT.sub("", prompt))
            closed = answer.removesuffix(self.tokenizer.eos_token or "")
            end = _agreed(
                text, start + 1, answer, closed, answer[:start] + _THOUGHT.sub("", answer[start:])
            )
            spans.append((start, end))
        return spans


def _refuse_dropped(
    text: str, messages: Sequence[Any], tools: Sequence[Any], render: Callable[..., Any]
) -> None:
    """Raise ValueError for a part of a chat that the template leaves out of its ``text``."""
    chat = deepcopy([messages, tools])
    marks = dict[str, str]()
    parts = list(_parts(*chat))
    # A short one, such as the name of a tool, may be part of any text.
    texts = [
        str(holder[key]).strip() if key in ("content", "text") else ""
        for _, holder, key, _ in parts
    ]
    if all(len(each) > 11 and each in text for each in texts):
        return
    for number, (name, holder, key, identity) in enumerate(parts):
        # Digits, which stay as they are in capital letters.
        mark = f"90716{number}61709"
        value = holder[key]
        holder[key] = dict.fromkeys(value, mark) if isinstance(value, dict) else f"{value}{mark}"
        # Some templates write the ids of calls only.
        marks |= {} if identity and identity in text else {mark: name}
    try:
        (marked,) = render(chat[:1], tokenize=False, tools=chat[1] or None)
    except Exception:
        return
    dropped = [name for mark, name in marks.items() if mark not in marked]
    if dropped:
        raise ValueError(f"it leaves out {dropped[0]}")


def _parts(
    messages: Sequence[Any], tools: Sequence[Any]
) -> Iterator[tuple[str, Any, str, str | None]]:
    """Yield what a template must write: a name for it, the object and the key that hold it, and the
    id of a call.
    """
    calls = [
        call
        for turn in messages
        for call in [*(turn.get("tool_calls") or ()), turn.get("function_call")]
        if call
    ]
    for call in (*tools, *calls):
        function = call.get("function", call)
        for key, name in (("name", "the tool"), ("arguments", "the arguments of")):
            if function.get(key) not in (None, "", "{}", {}):
                yield (
                    f"{name} {function.get('name')!r}",
                    function,
                    key,
                    call.get("id") if key == "name" else None,
                )
    # Publishers leave out system prompts, and the thoughts of earlier answers.
    for turn in (turn for turn in messages if turn["role"] != "system"):
        content = turn.get("content")
        for holder, key in (
            [(part, "text") for part in content]
            if isinstance(content, list)
            else [(turn, "content")]
        ):
            if _THOUGHT.sub("", text := str(holder.get(key) or "")).strip():
                yield f"a message of {turn['role']}, {text[:40]!r}", holder, key, None


def _trains(turn: Mapping[str, Any]) -> bool:
    return all(turn.get(key) in (None, 1) for key in corpora.WEIGHTS)


def _refuse_lost(messages: Sequence[Mapping[str, Any]], text: str, template: str) -> None:
    inline = _THOUGHT.match(str(messages[-1].get("content")))
    thoughts = [
        inline[1] if inline else "",
        *(str(messages[-1].get(key) or "") for key in _THOUGHT_KEYS),
    ]
    if not all(thought.strip() in text for thought in thoughts):
        raise ValueError("it leaves out the thoughts of the last answer")
    for turn in messages:
        lost = [
            key for key in _THOUGHT_KEYS if turn.get(key) and not re.search(rf"\b{key}\b", template)
        ]
        if lost:
            raise ValueError(f"it leaves out {lost[0]}")
        if not isinstance(content := turn.get("content"), str | None) and str(content) in text:
            raise ValueError(f"it has no form for content that is no text, {str(content)[:40]}")


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Limit processor time and memory of the block, in which a template may loop forever. Raises
    ValueError.
    """

    def end(*_: object) -> None:
        raise ValueError(f"it has not ended after {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, end)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    most = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + _MOST_BYTES
    )
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
