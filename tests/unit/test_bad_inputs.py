"""What a user gets wrong ends with exit code 2 and a sentence that names the place, never with a
traceback.
"""

import ast
import re
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from bad_inputs import INPUTS, fault
from primus_images import refusals


@pytest.mark.parametrize("given", INPUTS, ids=[one["name"].replace(" ", "-") for one in INPUTS])
def test_a_bad_input_is_a_sentence(given: dict[str, Any], tmp_path: Path) -> None:
    assert fault(given, tmp_path) is None


def test_there_are_many_of_them() -> None:
    assert len({one["name"] for one in INPUTS}) == len(INPUTS) >= 460
    assert len({tuple(one["run"]) for one in INPUTS if one["run"][0] == "show"}) >= 150


def test_every_refusal_has_a_sentence_and_what_it_needs() -> None:
    texts, named = (
        refusals.texts(),
        {"cannot_write", "no_right_to_write", "read_only"},
    )  # chosen by the error's number
    files = [file.read_text() for file in Path(refusals.__file__).parent.rglob("*.py")]
    nodes = [node for text in files if "refusal(" in text for node in ast.walk(ast.parse(text))]
    for call in (
        node
        for node in nodes
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "refusal"
    ):
        first, values = call.args[0], {word.arg for word in call.keywords}
        ways = (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,)
        names = {way.value for way in ways if isinstance(way, ast.Constant)} or {"read_only"}
        sentences = [
            text
            for name in names
            for key, text in texts[str(name)].items()
            if key in ("why", "hint")
        ]
        needs = {
            re.split(r"[.[]", key)[0]
            for text in sentences
            for _, key, *_ in Formatter().parse(text)
            if key
        }
        assert None in values or needs == values or names == {"read_only"}, ast.unparse(call)
        named |= names
    assert named == texts.keys()
