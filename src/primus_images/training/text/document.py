"""The document of a row: its text, or the messages of its chat. Nothing here needs a tokenizer."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from primus_images.errors import InputError, nearest
from primus_images.training.text.rows import TABLE, unreadable

WEIGHTS: Sequence[str] = TABLE["weights"]
_KINDS = {list: "a list", str: "text", type(None): "null"}
_ROLES = ("user", "assistant")
# Keys of a message with calls of tools, of which the second is OpenAI's older form.
CALLS = ("tool_calls", "function_call")
_ANOTHER = "data.column=NAME names the column of the text or of the chat messages"
_ONE_CHAT = 'write each chat as an object: {"messages": [...]}'

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document.

    ``prompt`` characters of ``text``, and everything before message ``first``, are not trained.
    With ``messages``, the chat template of the tokenizer makes the text, with ``tools`` and
    ``options``; ``text`` is used if there is no template.
    """

    text: str = ""
    prompt: int = 0
    messages: Sequence[Mapping[str, Any]] | None = None
    first: int = 0
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The ``columns`` with the text or the ``chat`` of every row, and those that are ``unused``.

    With ``turns``, they are a question and its answer. They are ``usual`` if the user names none.
    """

    columns: Sequence[str]
    chat: bool = False
    unused: Sequence[str] = ()
    turns: bool = False
    usual: bool = False

    @property
    def prompted(self) -> bool:
        """Whether a row has words that it only answers: of users, or of a prompt."""
        return self.chat or len(self.columns) > 1

    @property
    def alpaca(self) -> bool:
        """Whether it is Alpaca's."""
        return self.columns[0] == "instruction" and len(self.columns) > 1 and not self.turns


def layout_of(
    row: Any, column: str | None, where: str, turns: tuple[str, str] | None = None
) -> Layout:
    """Return the layout of a corpus whose first row is ``row``.

    ``turns`` are the columns of a question and its answer. Raises InputError if no column is known.
    """
    row = _mapping(row, where)
    if turns:
        columns = list(turns)
    elif column:
        columns = [column]
    else:
        columns = _known_columns(row, where)
    if any(name not in row for name in columns):
        raise _missing(row, columns, where)
    # Messages that are stored as text would be trained as they are written.
    chat = columns[0] in ("messages", "conversations") or isinstance(row[columns[0]], list)
    if column or columns[0] == "prompt":
        chat = chat or _is_written_chat(row[columns[0]])
    used = set(columns)
    if columns[0] == "instruction":
        used |= {"input", "history", *TABLE["beside_chats"]}
    if chat or turns:
        used |= {*TABLE["beside_chats"]}
    unused = [str(name) for name in row if name not in used]
    return Layout(
        columns=columns,
        chat=chat,
        unused=unused,
        turns=bool(turns),
        usual=not column and not turns,
    )


def _known_columns(row: Mapping[Any, Any], where: str) -> list[str]:
    columns = ["text"]
    for names in TABLE["layouts"]:
        if all(name in row for name in names):
            columns = names
            break
    _refuse_preferences(row, columns, where)
    if columns == ["text"] and "text" in row and isinstance(row.get("messages"), list):
        raise InputError(
            "there are both the text and the messages of a chat",
            where=where,
            hint="data.column=messages, or data.column=text",
        )
    if columns == ["text"] and "text" not in row:
        raise _unknown(row, where)
    return columns


def _refuse_preferences(row: Mapping[Any, Any], columns: Sequence[str], where: str) -> None:
    if _is_judged(row, columns) or "chosen" in row or "rejected" in row:
        names = ", ".join(map(str, row))
        raise InputError(
            f"these are preferences ({names}), for DPO or KTO, which primus does not train: "
            "trained as they are, rejected answers would be good ones",
            where=where,
            hint="data.column=NAME names a column of whole chats or texts to train, such as that "
            "of the chosen answers; data.question=NAME data.answer=NAME train every row; TRL "
            "trains preferences",
        )


def _is_judged(row: Mapping[Any, Any], columns: Sequence[str]) -> bool:
    """Return whether a label says if an answer is good, as KTO has it. Cells of CSV are text.

    Beside other columns than KTO's, a number may be the label of a class.
    """
    if row.get("kto_tag") is not None:  # LLaMA-Factory's name
        return True
    label = row.get("label")
    if columns == ["prompt", "completion"]:
        return str(label).lower() in ("true", "false", "1", "0", "1.0", "0.0")
    return columns != ["text"] and str(label).lower() in ("true", "false")


def _unknown(row: Mapping[Any, Any], where: str) -> InputError:
    """Return the error of a row with no column that has a usual name."""
    hint = f"{_ANOTHER}, data.question=NAME data.answer=NAME those of a question and its answer"
    meant = nearest("text", map(str, row))
    for question, answer in TABLE["turns"]:
        if question in row and answer in row:
            hint = f"data.question={question} data.answer={answer}"
            meant = ""
            break
    only = "".join(map(str, row))
    if "role" in row and "content" in row:
        hint = _ONE_CHAT
        meant = ""
    if len(row) == 1 and any(mark in only for mark in ";|\t"):
        hint = "the separator of .csv is a comma, that of .tsv a tab: write the table so"
        meant = ""
    known = "text, messages, conversations, prompt and completion, instruction and output"
    names = ", ".join(map(str, row)) or "no columns"
    return InputError(
        f"no column has a usual name of text or chats ({known}), found {names}{meant}",
        where=where,
        hint=hint,
    )


def _missing(row: Mapping[Any, Any], columns: Sequence[str], where: str) -> InputError:
    name = next((name for name in columns if name not in row), columns[0])
    keys = ", ".join(map(str, row)) or "no columns"
    return InputError(
        f"expected the column {name!r}, found {keys}{nearest(name, map(str, row))}",
        where=where,
        hint=_ANOTHER,
    )


def _mapping(row: Any, where: str) -> Mapping[Any, Any]:
    if isinstance(row, InputError):
        raise row
    if not isinstance(row, Mapping):
        kind = _KINDS.get(type(row), "a number")
        remedy = ""
        if isinstance(row, list) and any(map(_is_mapping, row)):
            remedy = _ONE_CHAT
        raise unreadable(f"expected a JSON object, found {kind}", where, remedy)
    return row


def refuse_other_spellings(document: Document, where: str) -> None:
    """Refuse another spelling of a role, such as Assistant or gpt: no word of it is trained."""
    roles = ("system", *_ROLES, *TABLE["own_roles"])
    for message in document.messages or ():
        role = message["role"]
        meant = TABLE["senders"].get(role.strip().lower())
        if meant in roles and role not in roles:
            raise InputError(
                f"the role {role!r} is none of chat templates, and only answers of the assistant "
                "are trained",
                where=where,
                hint=f"write {meant}",
            )


def document_of(row: Any, layout: Layout, where: str) -> Document:
    """Return the document of a row.

    Raises InputError if a column is missing, or holds something else.
    """
    row = _mapping(row, where)
    if any(name not in row for name in layout.columns):
        raise _missing(row, layout.columns, where)
    if layout.usual:  # the first row may lack a label that others have
        _refuse_preferences(row, layout.columns, where)
    if layout.alpaca:
        return _alpaca(row, where)
    if layout.turns:
        question, answer = [_text(row[name], name, where) for name in layout.columns]
        return _chat(row, _turns(question, answer), 0, where)
    if not layout.chat:
        return _of_texts([_text(row[name], name, where) for name in layout.columns])
    chats = [_messages(row[name], name, where) for name in layout.columns]
    first = 0
    if len(chats) > 1:
        first = len(chats[0])
    return _chat(row, list(chain(*chats)), first, where)


def _of_texts(texts: Sequence[str]) -> Document:
    if len(texts) > 1:
        return Document(text="".join(texts), prompt=len(texts[0]))
    return Document(text=texts[0])


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(
            f"expected text in {name!r}, found {_shown(value)}",
            where=where,
            hint=f"write text there; {_ANOTHER}",
        )
    _refuse_surrogates(value, where)
    return value


def _refuse_surrogates(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}, which is half a character (a lone surrogate)"
        raise InputError(
            f"expected text, found {half}",
            where=where,
            hint="write the whole character, or remove it",
        ) from None


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:80]


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _messages(value: Any, name: str, where: str) -> list[Message]:
    """Return the messages of a column. Those of ShareGPT get the names of chat templates."""
    listed = value
    if isinstance(value, str):  # tables hold them as JSON
        with suppress(ValueError, RecursionError):
            listed = json.loads(value)
    if not isinstance(listed, list) or (listed and not any(map(_is_mapping, listed))):
        hint = _ANOTHER
        if isinstance(value, str) and value.lstrip().startswith(("[", '"[')):
            hint = "write the list as JSON, once, as by json.dumps"
        raise InputError(
            f"expected a list of messages (role and content) in {name!r}, found {_shown(value)}",
            where=where,
            hint=hint,
        )
    if not listed:
        raise InputError(
            f"{name!r} has no message", where=where, hint="write the chat, or remove it"
        )
    messages = []
    sharegpt = all(isinstance(message, Mapping) and "from" in message for message in listed)
    for item in listed:
        if not isinstance(item, Mapping):
            raise _no_role(item, where)
        message = dict(item)
        for key in CALLS:  # an empty list of calls is none, also to templates that ask for the key
            if key in message and not message[key]:
                del message[key]
        if sharegpt and "content" not in message:
            message |= _of_sharegpt(message, where)
        _check_message(message, where)
        messages.append(message)
    return messages


def _is_written_chat(value: Any) -> bool:
    """Return whether a value is the JSON text of messages."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return False
    messages: Any = None
    with suppress(ValueError, RecursionError):
        messages = json.loads(value)
    if not isinstance(messages, list) or not messages:
        return False
    return all(
        _is_mapping(message) and ("role" in message or "from" in message) for message in messages
    )


def _of_sharegpt(message: Mapping[str, Any], where: str) -> Message:
    """Return role, content and calls of a message with ``from`` and ``value``."""
    sender, value = str(message["from"]), message.get("value")
    senders: Mapping[str, str] = TABLE["senders"]
    if sender not in senders:
        raise InputError(
            f"the sender {sender!r} is unknown",
            where=where,
            hint=f"known are {', '.join(senders)}",
        )
    if not isinstance(value, str):
        raise InputError(
            f"the message of {sender} has no value that is text, but {_shown(value)}",
            where=where,
            hint="write its value, or remove it",
        )
    if sender == "function_call":
        calls = _written_calls(value, where)
        return {"role": senders[sender], "content": "", "tool_calls": calls}
    return {"role": senders[sender], "content": value}


def _written_calls(text: str, where: str) -> list[Message]:
    """Return the calls of tools that are the ``text`` of a turn: a JSON object, or a list."""
    calls: Any = None
    with suppress(ValueError, RecursionError):
        calls = json.loads(text)
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, list) or not all(map(_is_call, calls)) or not calls:
        raise InputError(
            "expected JSON with name and arguments in a turn of function_call, "
            f"found {text[:60]!r}",
            where=where,
        )
    return [{"type": "function", "function": call} for call in calls]


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("name"), str)


def _check_message(message: Message, where: str) -> None:
    if any(message.get(key) not in (None, 0, 1) for key in WEIGHTS):
        raise InputError(
            f"a message is trained or not (weight 1 or 0), found {_shown(message)}",
            where=where,
            hint="write 1 or 0 as a number, or true or false",
        )
    listed, _ = CALLS
    if not isinstance(message.get(listed), list | None):
        raise InputError(
            f"expected a list in {listed!r}, found {_shown(message[listed])}",
            where=where,
            hint="write a list of calls, and not its JSON text",
        )
    calls = calls_of(message)
    content = message.get("content")
    if not isinstance(message.get("role"), str):
        raise _no_role(message, where)
    if content is None and not calls:
        raise InputError(
            f"the message of {message['role']} has no content",
            where=where,
            hint="write its content, or remove it",
        )
    if not isinstance(content, str | list | Mapping | None):
        raise InputError(
            f"expected text as the content of a message of {message['role']}, found "
            f"{_shown(content)}",
            where=where,
            hint="write it as text",
        )
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
            raise InputError(
                f"expected the function of a call of a tool, found {_shown(call)}",
                where=where,
                hint="write its name and arguments",
            )
    if not isinstance(content, list):
        return
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise InputError(
                f"expected text in every part of a message, found {_shown(part)}",
                where=where,
                hint='only text is trained, as {"type": "text", "text": "..."}: leave out chats '
                "about anything else",
            )


def _no_role(message: Any, where: str) -> InputError:
    return InputError(
        f"expected a role and content in every message, found {_shown(message)}",
        where=where,
        hint="write its role, such as user or assistant",
    )


def calls_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the calls of tools in a message, also in OpenAI's older form."""
    listed, single = CALLS
    calls = [*(message.get(listed) or ())]
    if message.get(single):
        calls.append(message[single])
    return calls


def _chat(row: Mapping[Any, Any], messages: list[Message], first: int, where: str) -> Document:
    """Return the chat of a row, with what other columns add to it."""
    system = row.get("system") or None
    own_system = messages[0]["role"] == "system"
    if system is not None and own_system and messages[0]["content"] != system:
        raise InputError(
            "the column 'system' differs from the chat's own system message",
            where=where,
            hint="remove one of them",
        )
    if system is not None and not own_system:
        begin = {"role": "system", "content": _text(system, "system", where)}
        messages = [begin, *messages]
        if first:
            first += 1
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise InputError(
            "expected an object of the template's variables in 'chat_template_kwargs'",
            where=where,
            hint='write it as {"enable_thinking": false}',
        )
    text = json.dumps(messages, ensure_ascii=False, default=str)
    _refuse_surrogates(text, where)
    _refuse_media(row, text, where)
    tools = _tools(row.get("tools"), where)
    return Document(messages=messages, first=first, tools=tools, options=options)


def _refuse_media(row: Mapping[Any, Any], text: str, where: str) -> None:
    """Refuse a chat that shows images, videos or sounds, which a model of text does not see."""
    for name in TABLE["media"]:
        if row.get(f"{name}s"):
            column = f"{name}s"
        elif row.get(name) and (f"<{name}>" in text or not isinstance(row[name], str)):
            column = name
        else:
            continue
        raise InputError(
            f"the column {column!r} belongs to the chat, and only text is trained: answers about "
            "what the model does not see would be trained",
            where=where,
            hint="leave out such chats; where the column has another meaning, rename it",
        )


def _tools(value: Any, where: str) -> list[Any] | None:
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value or "null")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise InputError(
            "expected a list of tools (JSON schemas) in 'tools'",
            where=where,
            hint="write a list of objects, each with the name and the parameters of a tool",
        )
    return value


def _alpaca(row: Mapping[Any, Any], where: str) -> Document:
    """Return the chat of a row of Alpaca's, or its text if it is only a question and an answer."""
    instruction = _text(row["instruction"], "instruction", where)
    output = _text(row["output"], "output", where)
    context = ""
    if row.get("input") is not None:
        context = _text(row["input"], "input", where)
    question = instruction
    prompt = TABLE["alpaca"].format("", instruction, "")
    if context:
        question = "\n".join(filter(None, (instruction, context)))
        more = ", paired with an input that provides further context"
        prompt = TABLE["alpaca"].format(more, instruction, f"### Input:\n{context}\n\n")
    turns = _turns(question, output)
    chat = _chat(row, [*_history(row.get("history"), where), *turns], 0, where)
    # Alpaca's text has no place for a system prompt, tools or earlier turns.
    if chat.messages != turns or chat.tools:
        return chat
    return replace(chat, text=prompt + output, prompt=len(prompt))


def _turns(question: str, answer: str) -> list[Message]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def _history(pairs: Any, where: str) -> list[Message]:
    """Return the earlier turns of a row of Alpaca's, which are pairs of question and answer."""
    if not pairs:
        return []
    messages = []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if not isinstance(pair, list) or len(pair) != len(_ROLES):
            raise InputError(
                f"expected pairs of question and answer in 'history', found {_shown(pair)}",
                where=where,
                hint="write a list of lists of two texts",
            )
        for role, words in zip(_ROLES, pair, strict=True):
            messages.append({"role": role, "content": _text(words, "history", where)})
    return messages
