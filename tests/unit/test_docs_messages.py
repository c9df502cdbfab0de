"""The messages that docs/using.md explains are messages of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from project_kit import Kit

ROOT = Path(__file__).parents[2]
SECTION = re.search(r"^### Locking channel `amd`$(.*?)^### ", (ROOT / "docs/using.md").read_text(), re.M | re.S)
# The column before the last holds the messages.
MESSAGES = [
    message
    for line in (SECTION[1] if SECTION else "").splitlines()
    if line.startswith("| ") and not line.startswith(("| source", "| message", "| command"))
    for message in re.findall(r"`([^`]+)`", line.split(" | ")[-2])
    if " " in message
]
ENOUGH = 10  # characters of the message that the code must have word for word


@cache
def sentences() -> list[list[str]]:
    """Every text of the code, split where a value is filled in."""
    found = []
    for path in (ROOT / "src/primus").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)).split("\0"))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= ENOUGH:
                found.append([node.value])
    return found


def begins(message: str, pieces: list[str]) -> bool:
    """Whether ``message`` can be the beginning of the text of ``pieces``, with any value between two of them."""
    place, fixed = 0, 0
    for number, piece in enumerate(pieces):
        at = message.find(piece, place) if number else (0 if message.startswith(piece) else -1)
        if at < 0:
            rest = max((n for n in range(1, len(piece)) if message.endswith(piece[:n])), default=0)
            return (fixed + rest) >= ENOUGH and (bool(rest) if not number else True)
        place, fixed = at + len(piece), fixed + len(piece)
        if place == len(message) and fixed >= ENOUGH:
            return True
    return fixed >= ENOUGH


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_that_the_page_explains_is_one_of_the_code(message: str) -> None:
    # What stands for a value at the end, or for more of the sentence, says nothing.
    plain = message.removesuffix("…").strip().removesuffix(":")
    assert any(begins(plain, pieces) for pieces in sentences()), message


def test_enough_messages_are_explained_and_an_invented_one_is_seen() -> None:
    assert len(MESSAGES) >= 20
    assert not any(begins("the moon is full of X, and URL has none", pieces) for pieces in sentences())


def test_publish_without_a_repository_says_what_is_missing(tmp_path: Path) -> None:
    said = Kit(ROOT).primus("publish", "mi355x")
    assert said.code == 2
    assert "--to is missing" in said.err
    assert "nox -s publish-mi355x -- --to" in said.err
