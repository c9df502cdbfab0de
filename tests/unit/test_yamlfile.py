from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st

from primus_images import yamlfile
from primus_images.errors import InputError
from primus_images.yamlfile import parse, parse_values, scalar, spell, value


@pytest.mark.parametrize(
    ("text", "meaning"),
    [("3.10", "3.10"), ("0x10", "0x10"), ("", None), ("~", None), ('"null"', "null")],
)
def test_plain_scalars_stay_what_was_typed(text: str, meaning: str | None) -> None:
    assert parse(f"a: {text}", "f").data == {"a": meaning}


def test_places_are_one_based_and_fall_back_to_the_parent() -> None:
    document = parse("a:\n  - x: 1\n    y: 2\n", "f")
    assert document.where(("a", 0, "y")) == "f:3:5"
    assert document.where(("a", 0, "absent", "deeper")) == "f:2:5"
    assert document.where(("nowhere",)) == "f:1:1"
    assert (parse("", "f").data, parse("", "f").where()) == (None, "f:1:1")


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("1e-6", 1e-6),
        ("3e-4", 3e-4),
        ("3E+4", 3e4),
        ("-.5", -0.5),
        ("+1.", 1.0),
        ("1.5e3", 1500.0),
        ("010", 10),
        ("0o17", 15),
        ("0xfF", 255),
        ("-0", 0),
        ("+7", 7),
        ("-.inf", float("-inf")),
        (".INF", float("inf")),
        ("true", True),
        ("TRUE", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("Null", None),
        ("NULL", None),
        # YAML 1.1 makes numbers, dates and truth values of these.
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-11-20", "2026-11-20"),
        ("0b11", "0b11"),
        ("0o8", "0o8"),
        ("0x", "0x"),
        ("1e", "1e"),
        (".", "."),
        ("nan", "nan"),
        ("inf", "inf"),
        ("tRue", "tRue"),
        ("١", "١"),
        ("1 ", "1 "),
        ("=", "="),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, meaning: object) -> None:
    assert (type(scalar(text)), scalar(text)) == (type(meaning), meaning)
    if text.strip() == text and text not in ("", "."):
        assert parse_values(f"a: {text}", "f").data == {"a": meaning}
        assert value(text, "here") == meaning


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False)
    | st.text()
)


@given(_SCALARS | st.lists(_SCALARS))
def test_what_is_spelled_is_read_back(given_value: object) -> None:
    try:
        spelled = spell(given_value)  # type: ignore[arg-type]
        values = parse_values(f"a: {spelled}", "f").data
    except InputError as error:
        assert "is not allowed" in error.message  # characters that no YAML file can hold
        return
    assert repr(values) == repr({"a": given_value})


def test_aliases_are_values_of_their_own() -> None:
    values = parse_values("a: &x {k: [1, 2.5]}\nb: *x\n", "f")
    assert values.data == {"a": {"k": [1, 2.5]}, "b": {"k": [1, 2.5]}}
    assert values.origin(("b", "k", 1)) == "f:1:15"
    assert values.where(("a", "k")) == "f:1:8"
    assert values.origin(("a", "k")) == "f:1:11"


def test_a_value_of_a_command_line() -> None:
    assert value("[1, 2e-3, x]", "here") == [1, 2e-3, "x"]
    assert value('"3"', "here") == "3"
    for text in ("{a: 1}", "[[1]]", "[1", "\udcff"):
        with pytest.raises(InputError, match="is not a plain value"):
            value(text, "here")


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("a: 1\nb: \x07", "f:2:4", "the character U+0007 is not allowed"),
        ('a: "\\0"', "f:1:4", "the character U+0000 is not allowed"),
        ('a: "\\e]52;c;eA==\\a"', "f:1:4", "the character U+001B is not allowed"),
        ('a: "b\\x9b1m"', "f:1:4", "the character U+009B is not allowed"),
        ('a: {"\\r": b}', "f:1:5", "the character U+000D is not allowed"),
        ("a: 1\na: 2", "f:2:1", "duplicate key 'a'"),
        ("a: *x", "f:1:4", "undefined alias"),
        ("a: &x 1\nb: &x 2", "f:2:4", "second occurrence"),
        ("a: !t 1", "f:1:4", "the tag !t is not supported"),
        ("a: !!str 1", "f:1:4", "the tag tag:yaml.org,2002:str is not supported"),
        ("a: 1\n---\nb: 2", "f:2:1", "found another document"),
        ("<<: {a: 1}", "f:1:1", "merge keys (<<) are not part"),
        ("? [a]\n: 1", "f:1:3", "a key must be plain text"),
        ("a:\n\t- b", "f:2:1", "a tab cannot indent a line"),
        ("a: b: c", "f:1:5", "mapping values are not allowed"),
        ("a: 1\n<<<<<<< ours\nb: 1\n", "f:2:1", "a merge conflict is not resolved here"),
        ("a: &a [*a]", "f:1:4", "nested too deeply"),
    ],
)
def test_an_error_has_its_place(text: str, place: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, "f")
    assert caught.value.where == place
    assert message in caught.value.message


def test_what_ships_is_read_without_libyaml_too() -> None:
    """An image's PyYAML may lack its compiled part, which takes a plain `a?` in a list."""
    for path in (Path(yamlfile.__file__).parent).rglob("*.yaml"):
        assert yaml.load(path.read_text(encoding="utf-8"), yaml.SafeLoader) is not None, path


def test_a_quoted_key_is_no_merge() -> None:
    assert parse('"<<": 1', "f").data == {"<<": "1"}


def test_how_deep_and_how_much_a_file_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("[" * 65 + "]" * 65, "f").data
    with pytest.raises(InputError, match="more than 64 levels"):
        parse("[" * 66 + "]" * 66, "f")
    with pytest.raises(InputError, match="nested too deeply"):
        parse("[" * 100_000, "f")
    monkeypatch.setattr(yamlfile, "_MOST_VALUES", 4)
    assert parse("[1, 2, 3]", "f").data == ["1", "2", "3"]
    with pytest.raises(InputError, match="more than 4, aliases included"):
        parse("[&x 1, *x, *x, *x]", "f")


def test_how_long_a_file_may_be() -> None:
    assert parse("x" * 500_000, "f").data == "x" * 500_000
    with pytest.raises(InputError, match="500,000"):
        parse("x" * 500_001, "f")
