"""Rows of data as people publish them: what would train the wrong words is refused or told."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from primus_images.errors import InputError
from primus_images.training.text import encoder
from primus_images.training.text.corpus import Corpus
from primus_images.training.text.document import (
    Document,
    document_of,
    layout_of,
    refuse_other_spellings,
)
from primus_images.training.text.encoder import Encoder
from primus_images.training.text.rows import rows_of_lines
from primus_images.training.text.tokens import Reader

ASKED = {"role": "user", "content": "How many?"}
SAID = {"role": "assistant", "content": "Two."}
CHAT = [ASKED, SAID]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


class StandIn:
    """What the code uses of a tokenizer of transformers: one token a character."""

    bos_token_id = None
    eos_token_id = 3
    eos_token = "$"

    def __init__(self, template: str = TEMPLATE) -> None:
        self.chat_template = template

    def __len__(self) -> int:
        return 256

    def __call__(self, text: str, **_: object) -> Any:
        return _Encoding(input_ids=[*map(ord, text)])

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def get_chat_template(self, *_: object) -> str:
        return self.chat_template

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
    ) -> list[str]:
        assert not tokenize
        template = ImmutableSandboxedEnvironment().from_string(self.chat_template)
        return [
            template.render(messages=messages, add_generation_prompt=add_generation_prompt)
            for messages in conversation
        ]


class _Encoding(dict[str, Any]):
    def char_to_token(self, place: int) -> int:
        return place


def trained(monkeypatch: pytest.MonkeyPatch, template: str, chat: Sequence[Any]) -> list[str]:
    """Return the runs of trained characters of a chat."""
    monkeypatch.setattr(encoder, "_loaded", lambda *_: StandIn(template))
    tokens, mask = Encoder("/no/folder").document(Document(messages=chat), "here")
    runs = []
    for part, run in groupby(zip(tokens, mask, strict=True), key=itemgetter(1)):
        if part:
            runs.append("".join(chr(token) for token, _ in run))
    return runs


def messages_of(row: Mapping[str, Any], column: str | None = None) -> Any:
    document = document_of(row, layout_of(row, column, "here"), "here")
    refuse_other_spellings(document, "here")
    return document.messages


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": CHAT, "kto_tag": False}, "these are preferences"),
        ({"messages": CHAT, "images": ["a.png"]}, "the column 'images' belongs to the chat"),
        (
            {"messages": [{"role": "user", "content": "<image> What?"}, SAID], "image": "a.png"},
            "the column 'image' belongs to the chat",
        ),
        ({"messages": CHAT, "audio": {"bytes": "x"}}, "the column 'audio' belongs to the chat"),
        ({"messages": [ASKED, {"role": "AI", "content": "Two."}]}, "the role 'AI' is none"),
    ],
)
def test_what_would_train_the_wrong_words_is_refused(row: Mapping[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        messages_of(row)
    assert caught.value.hint


@pytest.mark.parametrize("label", [{"label": False}, {"kto_tag": False}, {"rejected": "Three."}])
def test_a_label_that_the_first_row_lacks_is_found(label: Mapping[str, Any]) -> None:
    row = {"prompt": "How many?", "completion": "Two."}
    layout = layout_of(row, None, "here")
    assert document_of(row, layout, "here").text == "How many?Two."
    with pytest.raises(InputError, match="these are preferences"):
        document_of(row | label, layout, "here")
    asked = layout_of(row, None, "here", ("prompt", "completion"))
    assert document_of(row | label, asked, "here").messages


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": CHAT, "kto_tag": None},
        {"messages": CHAT, "images": []},
        {"messages": CHAT, "image": "ubuntu:24.04"},
    ],
)
def test_a_column_of_another_meaning_is_unused(row: Mapping[str, Any]) -> None:
    assert messages_of(row) == CHAT


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"chosen": json.dumps(CHAT), "rejected": "x"}, "chosen"),
        ({"prompt": json.dumps([ASKED]), "completion": json.dumps([SAID])}, None),
    ],
)
def test_messages_in_json_are_a_chat_in_any_column(
    row: Mapping[str, Any], column: str | None
) -> None:
    assert messages_of(row, column) == CHAT


@pytest.mark.parametrize("text", ["[1, 2]", "[]", "[INST] a", '[{"a": 1}]', "plain"])
def test_another_text_is_trained_as_it_is_written(text: str) -> None:
    layout = layout_of({"body": text}, "body", "here")
    assert not layout.chat
    assert document_of({"body": text}, layout, "here").text == text


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"messages": str(CHAT)}, "json.dumps"),
        ({"messages": json.dumps(json.dumps(CHAT))}, "once"),
        ({"messages": [ASKED, {**SAID, "train": "no"}]}, "1 or 0"),
        ({"messages": [ASKED, {**SAID, "tool_calls": "[{}]"}]}, "not its JSON text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text"),
        ({"messages": [ASKED, SAID], "tools": "add"}, "name and the parameters"),
        (ASKED, '"messages"'),
        (CHAT, '"messages"'),
    ],
)
def test_a_refusal_says_what_to_write(row: Any, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        messages_of(row)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("content", [b'{\n "text": "a"\n}\n', b'{"text": "a"}{"text": "b"}\n'])
def test_an_object_that_is_not_one_line_leads_to_jq(content: bytes) -> None:
    _, error = next(iter(rows_of_lines(content, Path("a.jsonl"), 0)))
    assert isinstance(error, InputError)
    assert "jq -c" in str(error.hint)


def test_what_the_model_does_not_learn_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A key that no template reads, and a role that never answers in other templates."""
    monkeypatch.setattr(encoder, "_loaded", lambda *_: StandIn())
    critic = {"role": "critic", "content": "Are you sure?"}
    critic["content"] += "$"
    chat = [ASKED, {**SAID, "thought": "One and one.", "id": "7", "refusal": None}, critic]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": chat}) + "\n", encoding="utf-8")
    reader = Reader(Corpus(name=str(file), tokenizer="/no/folder"))
    assert len(list(reader)) == 1
    assert dict(reader.remarks) == {
        "the chat template leaves out the key thought of messages": 1,
        "a message contains the EOS token": 1,
    }
    figures = dict.fromkeys(
        ("documents", "tokens", "trained", "longest", "longer", "begin", "end", "left_out"), 1
    )
    sentence = reader.sentence(figures, 64)
    assert "no word of these roles is trained: critic" in sentence


@pytest.mark.parametrize("completions", [True, False])
def test_a_question_that_is_marked_as_trained_is_told(
    *, completions: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Axolotl trains such a question. Without ``completions``, every message is trained."""
    monkeypatch.setattr(encoder, "_loaded", lambda *_: StandIn())
    chats = [[{**ASKED, "train": mark}, {**SAID, "train": True}] for mark in (True, False)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    corpus = Corpus(name=str(file), tokenizer="/no/folder", completions=completions)
    reader = Reader(corpus)
    assert len(list(reader)) == 2
    sentence = "a mark to train a message that is not an answer is ignored"
    assert dict(reader.remarks) == ({sentence: 1} if completions else {})


def test_an_instruction_may_be_in_the_input_alone() -> None:
    row = {"instruction": "", "input": "How many?", "output": "Two."}
    assert messages_of(row) == CHAT


@pytest.mark.parametrize("text", ['{"text": "a"}\n{"text": "b"}\n', '{"messages": []}'])
def test_json_in_plain_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setattr(encoder, "_loaded", lambda *_: StandIn())
    file = tmp_path / "rows.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="JSON in a file of plain text") as caught:
        Reader(Corpus(name=str(file), tokenizer="/no/folder"))
    assert ".jsonl" in str(caught.value.hint)
    Reader(Corpus(name=str(file), tokenizer="/no/folder", column="text"))
    file.write_text("{a} is a set.", encoding="utf-8")
    Reader(Corpus(name=str(file), tokenizer="/no/folder"))


# Each begins a turn by its role, and ends it by $.
LISTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "${% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
JSON_TEXT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}${% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As GLM-4.5 and Nemotron 3 have it: an earlier thought is emptied, and not left out.
EMPTIED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think>"
    "{{ m.reasoning_content if loop.last else '' }}</think>{% endif %}{{ m.content }}${% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_for_lists_is_given_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of models for images pass over text that is no part of a list."""
    assert trained(monkeypatch, LISTS, CHAT) == ["Two.$"]


def test_a_template_for_json_text_is_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"function": {"name": "add", "arguments": {"a": "ü"}}}
    chat = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert trained(monkeypatch, JSON_TEXT, chat) == ['add {"a": "ü"}$']
    assert isinstance(call["function"]["arguments"], dict)


def test_emptied_thoughts_are_those_of_earlier_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = [
        ASKED,
        {**SAID, "reasoning_content": "One and one."},
        ASKED,
        {**SAID, "reasoning_content": "Again."},
    ]
    runs = trained(monkeypatch, EMPTIED, chat)
    assert runs == ["<think></think>Two.$", "<think>Again.</think>Two.$"]


def test_a_template_that_writes_other_words_is_given_text(monkeypatch: pytest.MonkeyPatch) -> None:
    upper = TEMPLATE.replace("m.content", "m.content | upper")
    assert trained(monkeypatch, upper, CHAT)[-1].endswith("TWO.\n")


def test_an_empty_part_is_an_empty_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_loaded", lambda *_: StandIn(LISTS))
    reader = Encoder("/no/folder")
    reader.document(Document(messages=[ASKED, {**SAID, "content": ""}]), "here")
    assert dict(reader.remarks) == {"an answer is empty": 1}
