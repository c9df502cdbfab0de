from __future__ import annotations

from pathlib import Path

import pytest

from primus.errors import InputError
from primus.yamlfile import parse, read


def test_plain_scalars_stay_what_was_typed() -> None:
    data = parse("a: 3.10\nb: yes\nc: 2026-11-20\nd: 0x10\ne: 1_000\n", "f").data
    assert data == {"a": "3.10", "b": "yes", "c": "2026-11-20", "d": "0x10", "e": "1_000"}


@pytest.mark.parametrize("text", ["a:", "a: ~", "a: null"])
def test_nothing_is_none(text: str) -> None:
    assert parse(text, "f").data == {"a": None}


@pytest.mark.parametrize("text", ['a: ""', 'a: "null"', "a: '~'"])
def test_quoted_is_text(text: str) -> None:
    data = parse(text, "f").data
    assert isinstance(data, dict)
    assert isinstance(data["a"], str)


def test_empty_file() -> None:
    assert parse("", "f").data is None
    assert parse("", "f").where() == "f:1:1"


def test_places_are_one_based_and_fall_back_to_the_parent() -> None:
    document = parse("a:\n  - x: 1\n    y: 2\n", "f")
    assert document.where(("a", 0, "y")) == "f:3:5"
    assert document.where(("a", 0, "absent", "deeper")) == "f:2:5"
    assert document.where(("nowhere",)) == "f:1:1"


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "f:3:1", "'a' stands here twice"),
        ("a: {b: 1, b: 2}\n", "f:1:11", "'b' stands here twice"),
        ("a: [1, 2\nb: 3\n", "f:2:2", "not YAML"),
        ("a: b: c\n", "f:1:5", "not YAML"),
        ("a: &x {k: 1}\nb:\n  <<: *x\n", "f:3:3", "a key must be plain text"),
        ("? [a, b]\n: 1\n", "f:1:3", "a key must be plain text"),
        ("a: 1\n---\nb: 2\n", "f:2:1", "not YAML"),
        ("a: \x07\n", "f", "not YAML"),
    ],
)
def test_mistakes_have_a_place(text: str, place: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, "f")
    assert caught.value.where == place
    assert words in caught.value.message


def test_an_anchor_that_holds_itself_is_refused() -> None:
    with pytest.raises(InputError):
        parse("a: &x [*x]\n", "f")


def test_read_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file") as caught:
        read(tmp_path / "absent.yaml", "absent.yaml")
    assert caught.value.where == "absent.yaml"
    with pytest.raises(InputError, match="directory"):
        read(tmp_path, "folder")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe4\n")
    with pytest.raises(InputError, match="not UTF-8"):
        read(tmp_path / "latin.yaml")
    (tmp_path / "good.yaml").write_text("a: ä\n", encoding="utf-8")
    assert read(tmp_path / "good.yaml").data == {"a": "ä"}
