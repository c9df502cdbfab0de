"""What is trained of documents and chats, with a tokenizer of one token a character.

transformers itself is compared in ``integration/inside/own_text.py``.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from primus_images.errors import InputError
from primus_images.training.text import encoder
from primus_images.training.text.document import Document, document_of, layout_of
from primus_images.training.text.encoder import Encoder

BOS, EOS = 2, 3
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}$\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}$\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = {"role": "user", "content": "How many?"}
SAID = {"role": "assistant", "content": "Two."}
AGAIN = {"role": "user", "content": "And now?"}
THREE = {"role": "assistant", "content": "Three."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}


class Encoding(dict[str, Any]):
    def char_to_token(self, place: int) -> int:
        return place


class StandIn:
    """What the code uses of a tokenizer of transformers."""

    bos_token_id: int | None = BOS
    eos_token_id: int | None = EOS
    eos_token = "$"

    def __init__(self, template: str | None = None) -> None:
        self.chat_template = template

    def __len__(self) -> int:
        return 256

    def __call__(self, text: str | list[str], **_: object) -> Encoding:
        if isinstance(text, list):
            return Encoding(input_ids=[[*map(ord, part)] for part in text])
        spans = [(place, place + 1) for place in range(len(text))]
        return Encoding(input_ids=[*map(ord, text)], offset_mapping=spans)

    def decode(self, tokens: Sequence[int], **_: object) -> str:
        return "".join(map(chr, tokens))

    def get_added_vocab(self) -> dict[str, int]:
        return {"$": EOS, "<end>": 10, "<user>": 11}

    def get_chat_template(self, _name: None, _tools: object) -> str:
        return self.chat_template or ""

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: object,
    ) -> list[str]:
        assert not tokenize
        template = ImmutableSandboxedEnvironment().from_string(self.chat_template or "")
        return [
            template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
            for messages in conversation
        ]


def encoder_of(monkeypatch: pytest.MonkeyPatch, template: str | None = None) -> Encoder:
    monkeypatch.setattr(encoder, "_loaded", lambda *_: StandIn(template))
    return Encoder("/no/folder")


def trained(tokens: Sequence[int], mask: Sequence[int]) -> str:
    assert len(tokens) == len(mask)
    return "".join(chr(token) for token, part in zip(tokens, mask, strict=True) if part)


@pytest.mark.parametrize(
    ("messages", "first", "wanted"),
    [
        ([ASKED, SAID], 0, "Two.$\n"),
        ([ASKED, SAID, AGAIN, THREE], 0, "Two.$\nThree.$\n"),
        ([ASKED, {**SAID, "weight": 0}, AGAIN, THREE], 0, "Three.$\n"),
        ([ASKED, {**SAID, "train": False}, AGAIN, {**THREE, "weight": 1}], 0, "Three.$\n"),
        ([ASKED, SAID, AGAIN, THREE], 3, "Three.$\n"),
        ([ASKED], 0, ""),
    ],
)
def test_the_answers_of_a_chat_are_trained(
    messages: list[dict[str, Any]], first: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = encoder_of(monkeypatch, CHATML)
    document = Document(messages=messages, first=first)
    tokens, mask = made.document(document, "a:1")
    assert trained(tokens, mask) == wanted
    tokens, mask = made.document(document, "a:1", completions=False)
    assert trained(tokens, mask) == made.tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("inside", "last"),
    [
        ("<end>", "$"),  # another token than at the end of the chat, as gpt-oss
        ("", ""),  # only the token that begins the next turn, as GLM
    ],
)
def test_the_end_of_every_turn_is_trained(
    inside: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{{ END if loop.last and m.role == 'assistant' else MID }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    template = template.replace("END", repr(last)).replace("MID", repr(inside))
    made = encoder_of(monkeypatch, template)
    tokens, mask = made.document(Document(messages=[ASKED, SAID, AGAIN, THREE]), "a:1")
    assert trained(tokens, mask) == f"Two.{inside or '<user>'}Three.{last}"


def test_what_a_template_may_leave_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] if not loop.last "
        "else m.content }}$\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    made = encoder_of(monkeypatch, template)
    tool = {"type": "function", "function": {"name": "add", "description": "Adds two numbers."}}
    thought = {**SAID, "content": "<think>let me see</think>Two."}
    for messages in ([ASKED, thought, AGAIN, THREE], [ASKED, thought]):
        made.document(Document(messages=messages, tools=[tool]), "a:1")
    left_out = {"thoughts of earlier answers": 1, "descriptions of tools": 2}
    assert made.remarks == {f"the chat template leaves out {k}": n for k, n in left_out.items()}


def test_an_empty_answer_and_arguments_that_are_no_object_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = {**SAID, "content": " "}
    calls: list[dict[str, Any]] = []
    for arguments in ({"a": 1}, '{"a": 1}', "", "a = 1", "[1]"):
        call = {"function": {"name": "add", "arguments": arguments}}
        calls.append({"role": "assistant", "content": None, "tool_calls": [call]})
    made = encoder_of(monkeypatch, WITH_TOOLS)
    for messages in ([ASKED, empty, AGAIN, empty], [ASKED, {**empty, "weight": 0}], [ASKED, SAID]):
        made.document(Document(messages=messages), "a:1")
    assert made.remarks == {"an answer is empty": 1}
    made.remarks.clear()
    for message in calls:
        made.document(Document(messages=[ASKED, message]), "a:1")
    assert made.remarks == {"the arguments of a call are not a JSON object": 2}


def test_an_empty_answer_without_a_chat_template_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = encoder_of(monkeypatch)
    for text in ("Q: ", "Q:  ", "Q: A"):
        made.document(Document(text=text, prompt=3), "a:1")
    assert made.remarks == {"an answer is empty": 2}


def test_arguments_in_json_are_given_as_objects_or_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [ASKED, {**SAID, "content": "", "tool_calls": [call]}]
    written = "<assistant>{{ m.tool_calls[0].function.name if m.tool_calls }}"
    for shown in ("| tojson", "+ ''"):  # the second fails for an object
        arguments = "{{ m.tool_calls[0].function.arguments " + shown + " if m.tool_calls }}"
        template = "{% for m in messages %}" + written + arguments + "{{ m.content }}${% endfor %}"
        made = encoder_of(monkeypatch, template)
        tokens, _ = made.document(Document(messages=messages), "a:1", completions=False)
        assert made.tokenizer.decode(tokens).endswith('add{"a": 1}$')


def test_a_chat_may_begin_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = encoder_of(monkeypatch, "{% for m in messages %}{{ m.content }}{% endfor %}")
    tokens, mask = made.document(Document(messages=[SAID, ASKED]), "a:1")
    assert trained(tokens, mask) == "Two."


def test_options_and_tools_reach_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    made = encoder_of(monkeypatch, "{{ greeting }}" + WITH_TOOLS)
    document = Document(messages=[ASKED, SAID], tools=[TOOL], options={"greeting": "Hi "})
    tokens, _ = made.document(document, "a:1")
    text = made.tokenizer.decode(tokens)
    assert text.startswith('Hi {"function": {"name": "add"')
    reserved = Document(messages=[ASKED, SAID], options={"tokenize": True})
    with pytest.raises(InputError, match="chat_template_kwargs has tokenize"):
        made.document(reserved, "a:1")


@pytest.mark.parametrize(
    ("template", "messages", "tools", "words"),
    [
        (CHATML, [ASKED, SAID], [TOOL], "leaves out the tool 'add'"),
        (CHATML, [ASKED, {**SAID, "tool_calls": [CALL]}], [], "leaves out the tool 'add'"),
        (
            CHATML.replace("$", "{{ m.tool_calls[0].function.name if m.tool_calls }}$"),
            [ASKED, {**SAID, "tool_calls": [CALL]}],
            [],
            "leaves out the arguments of 'add'",
        ),
        (
            CHATML.replace("m.content", "m.content if m.role != 'tool'"),
            [ASKED, {"role": "tool", "content": "3"}, SAID],
            [],
            "leaves out a message of tool, '3'",
        ),
        (
            CHATML.replace("m.content", "m.content if m.role != 'tool'"),
            [ASKED, {"role": "tool", "content": "a result of several words"}, SAID],
            [],
            "leaves out a message of tool, 'a result of several words'",
        ),
        (
            CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
            [ASKED, {"role": "assistant", "content": "<think>hm</think>Two."}],
            [],
            "leaves out the thoughts of the last answer",
        ),
        (
            CHATML,
            [{**ASKED}, {**SAID, "reasoning": "Two."}],
            [],
            "it leaves out reasoning",
        ),
        (
            CHATML,
            [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "Two."}] * 2}],
            [],
            "it has no form for content that is no text",
        ),
        ("{{ messages | length }}" + CHATML, [ASKED, SAID], [], "cannot be told from the rest"),
        ("{{ oops.oops }}", [ASKED, SAID], [], "refuses the messages: 'oops' is undefined"),
        ("\n{% for", [ASKED, SAID], [], "template is wrong at its line 2: unexpected 'end"),
        ("{{ 1 | oops }}", [ASKED, SAID], [], "template is wrong at its line 1: No filter"),
    ],
)
def test_a_template_that_loses_a_part_of_a_chat_is_refused(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = encoder_of(monkeypatch, template)
    with pytest.raises(InputError) as caught:
        made.document(Document(messages=messages, tools=tools or None), "a:1")
    assert words in str(caught.value)
    assert caught.value.where == "a:1"


def test_the_id_of_a_call_may_stand_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in templates that write a tool's answer with the id of its call."""
    template = CHATML.replace(
        "$",
        "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function."
        "arguments | tojson }}{% endfor %}$",
    )
    made = encoder_of(monkeypatch, template)
    call = Document(messages=[ASKED, {**SAID, "tool_calls": [CALL]}])
    tokens, _ = made.document(call, "a:1")
    assert 'Two.c1{"a": 1}$' in made.tokenizer.decode(tokens)


def test_an_open_thought_of_the_prompt_belongs_to_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = CHATML.replace("<assistant>", "<assistant><think>\n")
    template = template.replace("<{{ m.role }}>", "<{{ m.role }}>")
    said = {"role": "assistant", "content": "<think>hm</think>Two."}
    made = encoder_of(monkeypatch, template)
    tokens, mask = made.document(Document(messages=[ASKED, said]), "a:1")
    assert trained(tokens, mask) == "<think>hm</think>Two.$\n"


def test_chats_need_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    made = encoder_of(monkeypatch)
    with pytest.raises(InputError, match="the tokenizer /no/folder has no chat template"):
        made.document(Document(messages=[ASKED, SAID]), "a:1")
    tokens, mask = made.document(Document(messages=[ASKED, SAID], text="Q:A", prompt=2), "a:1")
    assert (tokens, mask) == ([BOS, *map(ord, "Q:A"), EOS], [0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("begin", "end", "text", "tokens", "mask"),
    [
        (BOS, EOS, "ab", [BOS, 97, 98, EOS], [0, 0, 1, 1]),
        (None, EOS, "ab", [97, 98, EOS], [0, 1, 1]),
        (BOS, None, "ab", [BOS, 97, 98], [0, 0, 1]),
        (97, 98, "ab", [97, 98], [0, 1]),
        (None, 98, "b", [98], [1]),
    ],
)
def test_a_document_is_between_its_marks(
    begin: int | None,
    end: int | None,
    text: str,
    tokens: list[int],
    mask: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StandIn, "bos_token_id", begin)
    monkeypatch.setattr(StandIn, "eos_token_id", end)
    made = encoder_of(monkeypatch)
    assert made.texts([text]) == [tokens]
    assert made.document(Document(text=text, prompt=1), "") == (tokens, mask)


@pytest.mark.parametrize(
    ("files", "begin", "end"),
    [
        ({}, BOS, None),
        ({"tokenizer_config.json": {"add_bos_token": False}}, None, None),
        ({"config.json": {"eos_token_id": 7}}, BOS, 7),
        ({"generation_config.json": {"eos_token_id": [5, 1]}}, BOS, 5),
        ({"config.json": {"eos_token_id": -1}, "generation_config.json": {}}, BOS, None),
        ({"config.json": {"eos_token_id": 255}}, BOS, 255),
    ],
)
def test_marks_that_the_tokenizer_does_not_name_come_from_the_model(
    files: Mapping[str, object],
    begin: int | None,
    end: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr(StandIn, "eos_token_id", None)
    monkeypatch.setattr(encoder, "_loaded", lambda *_: StandIn())
    made = Encoder(str(tmp_path))
    assert (made.begin, made.end) == (begin, end)
    (tmp_path / "config.json").write_text('{"eos_token_id": 256}')
    with pytest.raises(InputError, match="256 is no token of the tokenizer, which has 256"):
        Encoder(str(tmp_path))


def test_parts_are_runs_of_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    made = encoder_of(monkeypatch)
    parts = made.parts([*map(ord, "Q: A.")], [0, 0, 0, 1, 1])
    assert parts == [("Q: ", False), ("A.", True)]
    # The beginning of a character that several tokens make belongs to the next part.
    assert made.parts([81, 0xFFFD, 65], [0, 0, 1]) == [("Q", False), ("\ufffdA", True)]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [ASKED, SAID]}, [ASKED, SAID]),
        (
            {"messages": [ASKED, SAID], "system": "Be brief."},
            [{"role": "system", "content": "Be brief."}, ASKED, SAID],
        ),
        ({"prompt": [ASKED], "completion": [SAID]}, [ASKED, SAID]),
        ({"instruction": "How many?", "output": "Two."}, [ASKED, SAID]),
        (
            {
                "instruction": "Now?",
                "input": "x",
                "output": "3",
                "history": [["How many?", "Two."]],
            },
            [
                ASKED,
                SAID,
                {"role": "user", "content": "Now?\nx"},
                {"role": "assistant", "content": "3"},
            ],
        ),
    ],
)
def test_rows_of_every_layout_are_chats(
    row: Mapping[str, Any], messages: list[dict[str, Any]]
) -> None:
    assert document_of(row, layout_of(row, None, ""), "").messages == messages


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"id": 1, "question": "q", "answer": "a"}, "data.question=question data.answer=answer"),
        ({"prompt": "q", "response": "a"}, "data.question=prompt data.answer=response"),
        ({"body": "q"}, "data.column=NAME names .* data.question=NAME"),
    ],
)
def test_columns_of_no_usual_name_lead_to_the_settings_that_name_them(
    row: Mapping[str, Any], hint: str
) -> None:
    with pytest.raises(
        InputError, match=f"no column has a usual name .* found {', '.join(row)}"
    ) as caught:
        layout_of(row, None, "")
    assert re.search(hint, str(caught.value.hint))


@pytest.mark.parametrize("nothing", [[], None, {}])
def test_no_calls_are_as_if_the_key_were_not_there(nothing: object) -> None:
    row = {"messages": [ASKED, {**SAID, "tool_calls": nothing, "function_call": None}]}
    assert document_of(row, layout_of(row, None, ""), "").messages == [ASKED, SAID]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({**SAID, "content": 2}, "text as the content of a message of assistant, found 2"),
        ({**SAID, "content": True}, "found true"),
        ({**SAID, "tool_calls": 5}, "expected a list in 'tool_calls'"),
    ],
)
def test_a_message_of_another_type_is_refused(message: Mapping[str, Any], words: str) -> None:
    row = {"messages": [ASKED, message]}
    with pytest.raises(InputError, match=words):
        document_of(row, layout_of(row, None, ""), "")


def test_a_list_of_one_text_is_this_text_to_a_template_that_takes_no_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    listed = [{**ASKED, "content": parts("How many?")}, {**SAID, "content": parts("Two.")}]
    of_text = CHATML.replace("m.content", "m.content + ''")
    of_lists = CHATML.replace("m.content", "m.content[0].text + m.content[1:] | join")
    silent = CHATML.replace("m.content", "m.content if m.content is string")
    for template in (of_text, of_lists, silent, CHATML):
        made = encoder_of(monkeypatch, template)
        tokens, mask = made.document(Document(messages=listed), "a:1")
        assert trained(tokens, mask) == "Two.$\n"
        assert "How many?" in made.tokenizer.decode(tokens)
        assert "type" not in made.tokenizer.decode(tokens)
    several = [{**ASKED, "content": parts("How", "many?")}, SAID]
    with pytest.raises(InputError, match="it takes one text as content, and a message has several"):
        encoder_of(monkeypatch, of_text).document(Document(messages=several), "a:1")


def test_the_prompt_of_a_chat_ends_where_its_completion_begins() -> None:
    row = {"prompt": [ASKED, SAID, AGAIN], "completion": [THREE]}
    layout = layout_of(row, None, "")
    assert document_of(row, layout, "").first == 3
    assert document_of({**row, "system": "Be brief."}, layout, "").first == 4
    alone = {"messages": [ASKED, SAID], "system": "Be brief."}
    assert document_of(alone, layout_of(alone, None, ""), "").first == 0


def test_the_prompt_of_a_text_ends_where_its_completion_begins() -> None:
    row = {"prompt": "One and one are", "completion": " two."}
    document = document_of(row, layout_of(row, None, ""), "")
    assert document.text == "One and one are two."
    assert document.text[document.prompt :] == " two."


def test_alpacas_text_stands_for_a_plain_question_only() -> None:
    row: dict[str, Any] = {"instruction": "Add.", "input": "1 and 1", "output": "2"}
    layout = layout_of(row, None, "")
    document = document_of(row, layout, "")
    assert document.text.endswith("### Input:\n1 and 1\n\n### Response:\n2")
    assert document.text[document.prompt :] == "2"
    for more in ({"history": [["a", "b"]]}, {"system": "Be brief."}, {"tools": [TOOL]}):
        assert document_of({**row, **more}, layout, "").text == ""
