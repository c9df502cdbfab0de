import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from primus.errors import InputError
from primus.yamlfile import parse, parse_values, read, scalar, spell, value


@pytest.mark.parametrize(
    ("text", "meaning"), [("3.10", "3.10"), ("0x10", "0x10"), ("", None), ("~", None), ('"null"', "null")]
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
    ("text", "place", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "f:3:1", "duplicate key 'a'"),
        ("a: {b: 1, b: 2}\n", "f:1:11", "duplicate key 'b'"),
        ("a: [1, 2\nb: 3\n", "f:2:2", "not YAML"),
        ("a: b: c\n", "f:1:5", "not YAML"),
        ("a: &x {k: 1}\nb:\n  <<: *x\n", "f:3:3", "a key must be plain text"),
        ("? [a, b]\n: 1\n", "f:1:3", "a key must be plain text"),
        ("a: 1\n---\nb: 2\n", "f:2:1", "not YAML"),
        ("a: \x07\n", "f:1:4", "not YAML"),
        ("b: 1\n<<<<<<< HEAD\na: 1\n=======\na: 2\n>>>>>>> other\n", "f:2:1", "a merge conflict is not resolved"),
    ],
)
def test_mistakes_have_a_place(text: str, place: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, "f")
    assert caught.value.where == place
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("a:\n\t- b\n", "use spaces instead of tabs"),
        ("a: b\n  \tc: d\n", "use spaces instead of tabs"),
        ("a: @b\n", "in quotes"),
        ("a: b: c\n", "in quotes"),
        ("a: [1, 2\nb: 3\n", "close the bracket"),
        ("a: 'b\n", "close the quotes"),
        ("- a\nb: c\n", "the same indentation"),
        ('a: "\\q"\n', "single quotes"),
    ],
)
def test_what_is_not_yaml_has_a_remedy(text: str, remedy: str) -> None:
    with pytest.raises(InputError, match="not YAML") as caught:
        parse(text, "f")
    assert remedy in (caught.value.hint or "")


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


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("1e-6", 1e-6), ("3e-4", 3e-4), ("3E+4", 3e4), ("-.5", -0.5), ("+1.", 1.0), ("1.5e3", 1500.0),
        ("010", 10), ("0o17", 15), ("0xfF", 255), ("-0", 0), ("+7", 7), ("-.inf", float("-inf")),
        (".INF", float("inf")),
        ("true", True), ("TRUE", True), ("False", False), ("~", None), ("", None), ("Null", None), ("NULL", None),
        # YAML 1.1 makes numbers, dates and truth values of these.
        ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"), ("y", "y"), ("1_000", "1_000"), ("1:30", "1:30"),
        ("2026-11-20", "2026-11-20"), ("0b11", "0b11"), ("0o8", "0o8"), ("0x", "0x"), ("1e", "1e"), (".", "."),
        ("nan", "nan"), ("inf", "inf"), ("tRue", "tRue"), ("١", "١"), ("1 ", "1 "), ("=", "="),
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text: str, meaning: object) -> None:
    assert (type(scalar(text)), scalar(text)) == (type(meaning), meaning)
    if text.strip() == text and text not in ("", "."):
        assert parse_values(f"a: {text}", "f").data == {"a": meaning}
        assert value(text, "here") == meaning


_SCALARS = st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | st.text()


@given(_SCALARS | st.lists(_SCALARS))
def test_what_is_spelled_is_read_back(given_value: object) -> None:
    try:
        spelled = spell(given_value)  # type: ignore[arg-type]
        values = parse_values(f"a: {spelled}", "f").data
    except InputError as error:
        assert "is not allowed" in error.message  # characters that no YAML file can hold
        return
    assert repr(values) == repr({"a": given_value})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 400_000, "nested too deeply"),
        ("- " * 200_000, "nested too deeply"),
        ("a: " + "9" * 5000, "too long"),
        ("".join(f"a{n}: 1\n" for n in range(30_000)), "too many values"),
        ("a: !!str 3.10", "tag"),
        (
            "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)),
            "too many values",
        ),
        ("a: &a " + "x" * 100_000 + "\nb: [" + ",".join(["*a"] * 15_000) + "]\n", "aliases included"),
        ('a: ["b\\0c"]', "U+0000"),
        ('"b\\0c": 1', "U+0000"),
        ("a: &a [&b [*a]]", "nested too deeply"),
        ("a: *b", "undefined alias"),
        ("a: !!python/object:os.system x", "tag"),
        ("x" * 3_000_000, "longer than"),
        ("a: \ud800", "U+D800"),
    ],
)
def test_hostile_text_is_refused_at_once(text: str, words: str) -> None:
    began = time.process_time()
    for read_text in (parse_values,) if words == "too long" else (parse, parse_values):  # parse leaves numbers as text
        with pytest.raises(InputError) as caught:
            read_text(text, "f")
        assert words in caught.value.message
    # The slowest takes 0.4 s, and 1.1 s on cores that others use; without the limits they take minutes or all memory.
    assert time.process_time() - began < 3


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
