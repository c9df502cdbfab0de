"""The tokens of a chat, by the tokenizer's chat template.

A template that leaves out a message, a call or a tool is refused. That it leaves out thoughts of
earlier answers or descriptions of tools, as templates of publishers do, is counted. Jinja's
sandbox, in which transformers runs templates, is the only limit of what they do.
"""

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from primus_images.errors import InputError
from primus_images.training.text.document import CALLS, WEIGHTS, Document, calls_of
from primus_images.training.text.rows import first_line

_MARKED = re.compile(r"{%-?\s*generation\s*-?%}")
# A part of a list of content, as JSON or Python writes it.
_LISTED = re.compile(r"""["']type["']: ["']text["']""")
# What thinking models' templates add to the prompt, and leave out of earlier answers.
_OPEN_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
_WHOLE_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
# Remarks, each the beginning of a sentence.
EMPTY = "an answer is empty"
_HAS_END = "a message contains the EOS token"
_NO_ANSWER = "a mark to train a message that is not an answer is ignored"
# Keys of messages that primus reads, or that name a message.
_KNOWN_KEYS = {"role", "content", "from", "value", "id", "name", "tool_call_id", *CALLS, *WEIGHTS}
_NO_OBJECT = "the arguments of a call are not a JSON object"
_LEAVES_OUT = "the chat template leaves out"
# A shorter text, such as the name of a tool, may be part of any other.
_TELLING = 12

_Messages = Sequence[Mapping[str, Any]]
_Render = Callable[..., Any]
# Begin and end of characters.
_Span = tuple[int, int]


class _OtherBeginningError(Exception):
    pass


class _NoMarkError(Exception):
    pass


def encoded(
    tokenizer: Any,
    document: Document,
    where: str,
    *,
    completions: bool,
    remarks: Counter[str],
) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat, and 1 for each that is trained.

    Without ``completions``, all are. ``remarks`` counts the chats of which the template leaves out
    something that a publisher's template may leave out, and those with an answer or a call that may
    be a mistake. Raises InputError if the template refuses
    the chat, or leaves out another part of it.
    """
    try:
        return _encoded(tokenizer, document, completions, remarks)
    except _NoMarkError:
        raise InputError(
            "the tokenizer's chat template has {% generation %}, and marks no word of this chat by "
            "it",
            where=where,
            hint="put the assistant's words between {% generation %} and {% endgeneration %} in "
            "every branch of the template, or remove both; data.train_on=all trains every token",
        ) from None
    except _OtherBeginningError:
        raise InputError(
            "the tokenizer's chat template renders the beginning of this chat in another "
            "way than the whole, so that the assistant's words cannot be told from the rest",
            where=where,
            hint="data.train_on=all trains every token; or mark the words with {% generation %} "
            "in the template",
        ) from None
    except Exception as error:
        # jinja2's TemplateSyntaxError; transformers may lack jinja2.
        line = getattr(error, "lineno", None)
        if line:
            raise InputError(
                f"the chat template is wrong at its line {line}: {first_line(error)}",
                where=where,
                hint="correct it: chat_template=FILE, or the tokenizer's chat_template.jinja or "
                "tokenizer_config.json",
            ) from error
        raise InputError(
            f"the tokenizer's chat template refuses the messages: {first_line(error)}",
            where=where,
            hint="choose a template that takes them (chat_template.jinja, or "
            "tokenizer_config.json), or remove them",
        ) from error


def _encoded(
    tokenizer: Any, document: Document, completions: bool, remarks: Counter[str]
) -> tuple[list[int], list[int]]:
    template = tokenizer.get_chat_template(None, document.tools)
    known = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in document.options:
        if name in known:
            raise ValueError(f"chat_template_kwargs has {name}, which is no variable of a template")
    render = partial(tokenizer.apply_chat_template, tools=document.tools, **document.options)
    messages, text = _rendered(list(document.messages or ()), render)
    _refuse_lost_thoughts(messages, text, template)
    lacking = {
        *_unknown_keys(messages, template),
        *_earlier_thoughts(messages, text),
        *_refuse_dropped(text, messages, document.tools or (), render),
    }
    remarks.update(f"{_LEAVES_OUT} {name}" for name in sorted(lacking))
    remarks.update(sorted(set(_mistakes(messages, tokenizer.eos_token))))
    if not completions:
        return _masked(tokenizer, text, [(0, len(text))])
    remarks.update({_NO_ANSWER for message in messages if _is_marked_in_vain(message)})
    marks = None
    if _MARKED.search(template) and not document.first:
        answer = render(messages, return_dict=True, return_assistant_tokens_mask=True)
        marks = answer["assistant_masks"]
        if not any(marks) and any(map(_is_answer, messages)):
            raise _NoMarkError
        if all(_is_trained(message) for message in messages):
            return answer["input_ids"], marks
    spans = _answers(tokenizer, text, messages, document.first, render)
    tokens, mask = _masked(tokenizer, text, spans)
    if marks:
        mask = [*map(min, mask, marks)]
    return tokens, mask


def _rendered(messages: list[Mapping[str, Any]], render: _Render) -> tuple[_Messages, str]:
    """Return the messages as the template takes them, and their text.

    transformers' templates expect the arguments of calls as objects, and data often have JSON text.
    A few templates, such as DeepSeek's, expect that text. Many expect a text as the content, where
    data in OpenAI's form have a list of a single one. Those of models for images expect a list.
    """
    as_objects = deepcopy(messages)
    changed = False
    for message in as_objects:
        for call in calls_of(message):
            changed |= _parse_arguments(call.get("function", call))
    forms: list[_Messages] = [messages]
    if changed:
        forms.insert(0, as_objects)
    if any(isinstance(message.get("content"), list) for message in messages):
        forms += [list(map(_with_text, form)) for form in forms]
    rendered = _first_whole(forms, render)
    if rendered and _has_words(*rendered):
        return rendered
    for form in (_with_json(messages), _with_lists(messages)):
        other = _first_whole([form], render)
        if other and _has_words(*other) and not _LISTED.search(other[1]):
            return other
    if rendered:
        return rendered
    last = forms[-1]
    try:
        (text,) = render([last], tokenize=False)
    except Exception as error:
        if any(isinstance(message.get("content"), list) for message in last):
            raise ValueError("it takes one text as content, and a message has several") from error
        raise
    return last, text


def _first_whole(forms: Sequence[_Messages], render: _Render) -> tuple[_Messages, str] | None:
    """Return the first form of messages that a template takes, and its text."""
    for form in forms:
        with suppress(Exception):
            (text,) = render([form], tokenize=False)
            if _shows_parts(form, render):
                return form, text
    return None


def _has_words(messages: _Messages, text: str) -> bool:
    """Whether a text has the words of all messages as they are."""
    for message in messages:
        if not all(_THOUGHT.sub("", part).strip() in text for part in _texts(message)):
            return False
    return True


def _texts(message: Mapping[str, Any]) -> list[str]:
    """Return the text of a message, or the texts of its parts."""
    content = message.get("content") or ""
    if isinstance(content, list):
        return [part["text"] for part in content]
    return [str(content)]


def _with_json(messages: _Messages) -> _Messages:
    """Return messages with the arguments of calls as JSON text."""
    as_text = deepcopy(list(messages))
    for message in as_text:
        for call in calls_of(message):
            function = call.get("function", call)
            if isinstance(function.get("arguments"), dict):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return as_text


def _with_lists(messages: _Messages) -> _Messages:
    """Return messages with a list of one part in place of each text."""
    as_lists = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        as_lists.append({**message, "content": content})
    return as_lists


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content is the text of its only part."""
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1:
        return {**message, "content": content[0]["text"]}
    return message


def _shows_parts(form: _Messages, render: _Render) -> bool:
    """Whether a template writes all parts of lists, and not as Python writes a list."""
    marked = deepcopy(list(form))
    lists = []
    for message in marked:
        if isinstance(message.get("content"), list):
            lists.append(message["content"])
    if not lists:
        return True
    parts = [part for content in lists for part in content]
    marks = [_mark(number) for number in range(len(parts))]
    for part, mark in zip(parts, marks, strict=True):
        part["text"] += mark
    (text,) = render([marked], tokenize=False)
    return all(mark in text for mark in marks) and not any(str(each) in text for each in lists)


def _parse_arguments(function: Any) -> bool:
    """Replace arguments in JSON by the object that they are. Returns whether they were."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return False
    with suppress(ValueError, RecursionError):
        parsed = json.loads(arguments)
        if isinstance(parsed, dict):
            function["arguments"] = parsed
            return True
    return False


def _masked(tokenizer: Any, text: str, spans: Sequence[_Span]) -> tuple[list[int], list[int]]:
    """Return the tokens of ``text``, and 1 for those of the ``spans``.

    As transformers: from the token of a span's first character to that of its last one.
    """
    encoding = tokenizer(text, add_special_tokens=False)
    mask = [0] * len(encoding["input_ids"])
    for span in spans:
        characters = range(*span)
        first = _first_token(encoding, characters)
        last = _first_token(encoding, reversed(characters))
        if first is not None and last is not None:
            mask[first : last + 1] = [1] * (last + 1 - first)
    return encoding["input_ids"], mask


def _first_token(encoding: Any, characters: Iterator[int] | range) -> int | None:
    for character in characters:
        token: int | None = encoding.char_to_token(character)
        if token is not None:
            return token
    return None


def _answers(
    tokenizer: Any, text: str, messages: _Messages, first: int, render: _Render
) -> list[_Span]:
    """Return where the answers that are trained begin and end in ``text``."""
    turns = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and number >= first and _is_trained(message):
            turns.append(number)
    if not turns:
        return []
    befores = [messages[:number] for number in turns]
    try:
        prompts = render(befores, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise _OtherBeginningError from error
    answers = render([messages[: number + 1] for number in turns], tokenize=False)
    spans = []
    for prompt, answer in zip(prompts, answers, strict=True):
        start = _agreed(text, 0, prompt, _OPEN_THOUGHT.sub("", prompt))
        closed = answer.removesuffix(tokenizer.eos_token or "")
        without_thought = answer[:start] + _THOUGHT.sub("", answer[start:])
        emptied = answer[:start] + _WHOLE_THOUGHT.sub("<think></think>", answer[start:], count=1)
        end = _agreed(text, start + 1, answer, closed, without_thought, emptied)
        spans.append((start, _end_of_turn(text, end, _special_tokens(tokenizer))))
    return spans


def _end_of_turn(text: str, end: int, marks: Sequence[str]) -> int:
    """Return where a turn ends whose words end at ``end``, so that the model learns to stop.

    Some templates end the last answer of a chat by another token than the answers before it
    (gpt-oss), or end an answer only by the token that begins the next turn (GLM).
    """
    if text[:end].rstrip().endswith(tuple(marks)):
        return end
    for mark in marks:
        if text.startswith(mark, end):
            return end + len(mark)
    return end


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: Any) -> Sequence[str]:
    """Return the added tokens, longest first."""
    return sorted(tokenizer.get_added_vocab(), key=len, reverse=True)


def _agreed(text: str, least: int, *beginnings: str) -> int:
    """Return the length of the first of the ``beginnings`` with which ``text`` begins."""
    for beginning in beginnings:
        if text.startswith(beginning) and len(beginning) >= least:
            return len(beginning)
    raise _OtherBeginningError


def _is_trained(message: Mapping[str, Any]) -> bool:
    return all(message.get(key) in (None, 1) for key in WEIGHTS)


def _is_marked_in_vain(message: Mapping[str, Any]) -> bool:
    return message["role"] != "assistant" and any(message.get(key) for key in WEIGHTS)


def _is_answer(message: Mapping[str, Any]) -> bool:
    """Whether a message has words, or calls, of the assistant that are trained."""
    if message["role"] != "assistant" or not _is_trained(message):
        return False
    return bool(message.get("content") or calls_of(message))


def _mistakes(messages: _Messages, end: str | None) -> Iterator[str]:
    """Yield a remark on each answer that has nothing to learn, and on each call that is no call.

    A message that contains the token ``end`` would end before its last word.
    """
    for message in messages:
        said = "".join(_texts(message))
        if end and end in said:
            yield _HAS_END
        if message["role"] == "assistant" and _is_trained(message):
            words = [said, *(message.get(key) for key in _THOUGHT_KEYS)]
            written = any(str(word or "").strip() for word in words)
            if not written and not calls_of(message):
                yield EMPTY
        for call in calls_of(message):
            function = dict(call.get("function", call))
            arguments = function.get("arguments")
            if isinstance(arguments, str) and arguments and not _parse_arguments(function):
                yield _NO_OBJECT


def _unknown_keys(messages: _Messages, template: str) -> Iterator[str]:
    """Yield a name for each key of messages that neither primus nor the template knows."""
    for message in messages:
        for key, value in message.items():
            known = key in _KNOWN_KEYS or key in _THOUGHT_KEYS
            if value and not known and not re.search(rf"\b{re.escape(key)}\b", template):
                yield f"the key {key} of messages"


def _earlier_thoughts(messages: _Messages, text: str) -> Iterator[str]:
    """Yield a name if ``text`` lacks thoughts of answers before the last message."""
    for message in messages[:-1]:
        thoughts = [str(message.get(key) or "") for key in _THOUGHT_KEYS]
        inline = _THOUGHT.match(str(message.get("content")))
        if inline and message["role"] == "assistant":
            thoughts.append(inline[1])
        if not all(thought.strip() in text for thought in thoughts):
            yield "thoughts of earlier answers"


def _refuse_lost_thoughts(messages: _Messages, text: str, template: str) -> None:
    """Raise ValueError for thoughts that a template leaves out, and content that it cannot show."""
    last = messages[-1]
    thoughts = [str(last.get(key) or "") for key in _THOUGHT_KEYS]
    inline = _THOUGHT.match(str(last.get("content")))
    if inline:
        thoughts.append(inline[1])
    if not all(thought.strip() in text for thought in thoughts):
        raise ValueError("it leaves out the thoughts of the last answer")
    for message in messages:
        for key in _THOUGHT_KEYS:
            if message.get(key) and not re.search(rf"\b{key}\b", template):
                raise ValueError(f"it leaves out {key}")
        content = message.get("content")
        if not isinstance(content, str | None) and str(content) in text:
            raise ValueError(f"it has no form for content that is no text, {str(content)[:40]}")


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part of a chat that a template must write: ``holder[key]``.

    ``identity`` is the id of a call, which some templates write in place of its name. A part that
    is ``optional`` is only counted, under this name.
    """

    name: str
    holder: Any
    key: str
    identity: str = ""
    optional: str = ""

    @property
    def is_text(self) -> bool:
        return self.key in ("content", "text")

    def mark(self, mark: str) -> None:
        """Add ``mark`` to the part, so that it can be found in what the template writes."""
        value = self.holder[self.key]
        if isinstance(value, dict):
            self.holder[self.key] = dict.fromkeys(value, mark)
        else:
            self.holder[self.key] = f"{value}{mark}"


def _refuse_dropped(
    text: str, messages: _Messages, tools: Sequence[Any], render: _Render
) -> set[str]:
    """Raise ValueError for a part of a chat that the template leaves out of its ``text``.

    Returns the names of optional parts that it leaves out.
    """
    messages, tools = deepcopy((messages, tools))
    parts = [*_tool_parts(messages, tools), *_text_parts(messages)]
    if all(part.is_text and _is_told(part, text) for part in parts):
        return set()
    marks = {}
    for number, part in enumerate(parts):
        mark = _mark(number)
        part.mark(mark)
        if not part.identity or part.identity not in text:
            marks[mark] = part
    marked = None
    with suppress(Exception):  # some templates parse what is marked
        (marked,) = render([messages], tokenize=False, tools=tools or None)
    lacking: set[str] = set()
    if marked is None:
        return lacking
    for mark, part in marks.items():
        if mark in marked:
            continue
        if not part.optional:
            raise ValueError(f"it leaves out {part.name}")
        lacking.add(part.optional)
    return lacking


def _mark(number: int) -> str:
    """Return digits, which stay as they are in capital letters."""
    return f"90716{number}61709"


def _is_told(part: _Part, text: str) -> bool:
    words = str(part.holder[part.key]).strip()
    return len(words) >= _TELLING and words in text


def _tool_parts(messages: _Messages, tools: Sequence[Any]) -> Iterator[_Part]:
    calls = list(tools)
    for message in messages:
        calls += calls_of(message)
    for call in calls:
        function = call.get("function", call)
        name = repr(function.get("name"))
        if function.get("name"):
            identity = call.get("id") or ""
            yield _Part(name=f"the tool {name}", holder=function, key="name", identity=identity)
        if isinstance(function.get("description"), str):
            yield _Part(
                name=f"the description of {name}",
                holder=function,
                key="description",
                optional="descriptions of tools",
            )
        if function.get("arguments") not in (None, "", "{}", {}):
            yield _Part(name=f"the arguments of {name}", holder=function, key="arguments")


def _text_parts(messages: _Messages) -> Iterator[_Part]:
    for message in messages:
        content = message.get("content")
        places = [(message, "content")]
        if isinstance(content, list):
            places = [(part, "text") for part in content]
        for holder, key in places:
            words = str(holder.get(key) or "")
            if _THOUGHT.sub("", words).strip():
                name = f"a message of {message['role']}, {words[:40]!r}"
                yield _Part(name=name, holder=holder, key=key)
