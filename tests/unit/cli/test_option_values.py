"""Values of options: each type takes what it is for, and names what it refuses."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli.verb import TYPES, parser_of, parser_of_shared
from primus_images.errors import InputError


def parsed(kind: str, text: str, **limits: Any) -> Any:
    return TYPES[kind](text, **limits)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("command", "nsys profile -o 'a b'", ["nsys", "profile", "-o", "a b"]),
        ("duration", "90m", 5400),
        ("duration", "1.5h", 5400),
        ("duration", "366d", 366 * 86400),
        ("duration", "1s", 1),
        ("number", "-3", -3),
        ("whole", "0", 0),
        ("whole", "2147483647", 2147483647),
        ("rate", "0.5", 0.5),
        ("rate", "7", 7),
        ("text", "a", "a"),
        ("path", "/a/b", Path("/a/b")),
        ("path", "~/b", Path("~/b").expanduser()),
        ("path", "~no-such-user/b", Path("~no-such-user/b")),
    ],
)
def test_a_value_is_of_its_type(kind: str, text: str, value: Any) -> None:
    found = parsed(kind, text)
    assert (found, type(found)) == (value, type(value)) or (kind == "duration" and found == value)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("command", "", "does not begin with a program"),
        ("command", "-v a", "does not begin with a program"),
        ("command", "a 'b", "is not a command: no closing quotation"),
        ("duration", "90", "must be a duration such as 90m"),
        ("duration", "0m", "must be a duration"),
        ("duration", "367d", "must be a duration"),
        ("number", "1.5", "must be a whole number, not '1.5'"),
        ("number", "1_0", "must be a whole number"),
        ("whole", "-1", "must be a whole number of at least 0"),
        ("whole", "2147483648", "at most 2,147,483,647"),
        ("rate", "0", "must be a number above 0"),
        ("text", "", "must not be empty"),
        ("path", "", "must not be empty"),
        ("path", "a\x1b", "must not contain control characters"),
        ("folder", "s3://a", "must be a folder, not an address: 's3://a'"),
        ("folder", "/etc/hostname/x", "/etc/hostname is not a folder"),
        ("folder", "/etc", "/etc belongs to the system"),
        ("folder", "/usr/../etc/", "belongs to the system"),
    ],
)
def test_what_is_none_is_named(kind: str, text: str, says: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        parsed(kind, text)
    assert says in str(caught.value)


def test_limits_are_those_of_the_option() -> None:
    assert parsed("whole", "3", least=3, most=4) == 3
    for text in ("2", "5"):
        with pytest.raises(argparse.ArgumentTypeError, match="of at least 3 and at most 4"):
            parsed("whole", text, least=3, most=4)


def test_a_new_file_is_in_a_folder_that_is_there(tmp_path: Path) -> None:
    assert parsed("new_file", f"{tmp_path}/a.yaml", suffix=".yaml") == tmp_path / "a.yaml"
    (tmp_path / "old.yaml").touch()
    for name, says in (
        ("old.yaml", "old.yaml already exists"),
        ("gone/a.yaml", f"{tmp_path}/gone does not exist; create it: mkdir -p {tmp_path}/gone"),
        ("a.json", "a.json does not end with .yaml"),
    ):
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            parsed("new_file", f"{tmp_path}/{name}", suffix=".yaml")
        assert says in str(caught.value)


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (["llama3-proxy", "lr=1", "--steps", "2", "seed=3"], ["lr=1", "seed=3"]),
        (["--steps", "2", "llama3-proxy", "lr=1"], ["lr=1"]),
        (["llama3-proxy", "--", "-a=1"], ["./-a=1"]),
    ],
)
def test_settings_and_options_may_be_mixed(words: list[str], overrides: list[str]) -> None:
    found = parser_of("train").parse_args(words)
    assert (found.recipe, found.overrides) == ("llama3-proxy", overrides)


def test_words_after_two_dashes_are_the_command_of_a_container() -> None:
    found = parser_of("run").parse_args(["demo", "--env", "A", "--", "echo", "--", "-v"])
    assert (found.target, found.env) == ("demo", ["A"])
    assert found.command == ["echo", "--", "-v"]


def test_shared_options_are_not_abbreviated() -> None:
    assert parser_of_shared("old", "x").parse_args(["--proxy"]).proxy is True
    with pytest.raises(InputError, match="unrecognized arguments: --prox"):
        parser_of_shared("old", "x").parse_args(["--prox"])
