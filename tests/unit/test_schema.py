import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jsonschema
import pytest
from docs.json_schema import json_schema

from primus_images.errors import InputError
from primus_images.schema import WrongValue, build, parse_json, read_json
from primus_images.yamlfile import Document, parse


@dataclass(frozen=True, kw_only=True)
class Inner:
    """An inner thing."""

    size: int
    rate: float | None = None
    mood: Literal["calm", "wild"] | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    """An outer thing."""

    name: str
    kind: Literal["cold", "warm"] = "cold"
    on: bool = False
    items: tuple[Inner, ...] = ()
    table: Mapping[str, Inner] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    for_: str = "all"
    gaps: Mapping[str, str | None] = field(default_factory=dict)
    other: Inner | None = None

    def __post_init__(self) -> None:
        if self.name == "forbidden":
            raise ValueError("this name is forbidden")


GOOD = (
    "name: x\nkind: warm\non: true\nitems: [{size: 1000, rate: 2e-3}]\ntable: {k: {size: "
    "-1}}\ntags: [a, b]\nfor: us\n"
)


def test_good() -> None:
    assert build(Outer, parse(GOOD, "f")) == Outer(
        name="x",
        kind="warm",
        on=True,
        items=(Inner(size=1000, rate=0.002),),
        table={"k": Inner(size=-1)},
        tags=("a", "b"),
        for_="us",
    )


@pytest.mark.parametrize(
    ("text", "place", "message", "hint"),
    [
        ("name: x\nkinds: warm\n", "f:2:1", "unknown key 'kinds'", "did you mean 'kind'?"),
        ("name: x\nzzzzzz: 1\n", "f:2:1", "unknown key 'zzzzzz'", "known here: name, kind"),
        ("kind: warm\n", "f:1:1", "'name' is missing here", "Its name."),
        ("name: X1\n", "f:1:1", "name must be lower-case letters, not 'X1'", None),
        ("name:\n", "f:1:1", "name must be text, not nothing", None),
        (
            "name: x\nkind: warn\n",
            "f:2:1",
            "kind must be one of cold, warm, not 'warn'",
            "did you mean 'warm'?",
        ),
        ("name: x\non: yes\n", "f:2:1", "on must be true or false, not 'yes'", None),
        ("name: x\nitems: 3\n", "f:2:1", "items must be a list, not '3'", None),
        (
            "name: x\nitems:\n  - {size: big}\n",
            "f:3:6",
            "size must be a whole number, not 'big'",
            None,
        ),
        ("name: x\nitems:\n  - {size: 1, rate: fast}\n", "f:3:15", "rate must be a number", None),
        ("name: x\nitems:\n  - {size: 1, rate: nan}\n", "f:3:15", "rate must be a number", None),
        ("name: x\ntable: []\n", "f:2:1", "table must be a mapping, not a list", None),
        ("name: x\ntable:\n  k: 3\n", "f:3:3", "k must be a mapping with size, rate, mood", None),
        ("name: x\ntags: [a, B]\n", "f:2:11", "tags must be lower-case letters, not 'B'", None),
        ("name: forbidden\n", "f:1:1", "this name is forbidden", None),
        ("", "f:1:1", "the file must be a mapping", None),
    ],
)
def test_strict(text: str, place: str, message: str, hint: str | None) -> None:
    with pytest.raises(InputError) as caught:
        build(Outer, parse(text, "f"))
    assert caught.value.where == place
    assert message in caught.value.message
    if hint is not None:
        assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("digits", [19, 40, 400])
@pytest.mark.parametrize("key", ["size", "rate"])
@pytest.mark.parametrize("read", [parse, parse_json])
def test_a_number_is_not_too_large(
    digits: int, key: str, read: Callable[[str, str], Document]
) -> None:
    with pytest.raises(InputError, match=r"must be a number that fits into 64 bits, not '?9999"):
        build(Inner, read(json.dumps({"size": 1, key: 0}).replace("0", "9" * digits), "f"))


def test_part_of_a_document() -> None:
    document = parse("a: {size: 1}\nb: {size: x}\n", "f")
    data = document.data
    assert isinstance(data, dict)
    assert build(Inner, document, data["a"], ("a",)) == Inner(size=1)
    with pytest.raises(InputError) as caught:
        build(Inner, document, data["b"], ("b",))
    assert caught.value.where == "f:2:5"


def test_null_is_none_where_it_is_allowed_and_the_schema_agrees() -> None:
    text = (
        "name: x\ngaps: {a: null, b: null2}\nother: null\nitems: [{size: 1, rate: null, "
        "mood: null}]\n"
    )
    built = build(Outer, parse(text, "f"))
    assert built.gaps == {"a": None, "b": "null2"}
    assert built.other is None
    assert built.items == (Inner(size=1),)
    validator = jsonschema.Draft202012Validator(json_schema(Outer, title="Outer"))
    item = {"size": 1, "rate": None, "mood": None}
    assert not list(
        validator.iter_errors({"name": "x", "gaps": {"a": None}, "other": None, "items": [item]})
    )
    for wrong in (
        {"nam": "x"},
        {"name": "X"},
        {"kind": "hot"},
        {"items": [{}]},
        {"for_": "us"},
        {"name": None},
        {"tags": [None]},
        {"items": [{"size": None}]},
        {"items": [{"size": 1, "mood": "x"}]},
    ):
        assert list(validator.iter_errors({"name": "x", **wrong})), wrong


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A thing that checks its rows."""

    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if row < 0:
                raise WrongValue("a row is negative", "rows", number)


def test_a_check_of_a_dataclass_names_the_value() -> None:
    document = parse("inner:\n  rows: [1, -2]\n", "f")
    with pytest.raises(InputError, match="a row is negative") as caught:
        build(Checked, document, document.data["inner"], ("inner",))
    assert caught.value.where == "f:2:13"


def test_the_largest_number_is_read() -> None:
    assert build(Inner, parse_json('{"size": 9223372036854775807}', "f")).size == 2**63 - 1
    with pytest.raises(InputError, match="fits into 64 bits"):
        build(Inner, parse_json('{"size": 9223372036854775808}', "f"))


def test_a_json_document_too_long_for_places_has_its_name(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"a": {"b": 1}}')
    assert read_json(path).where(("a", "b")) == f"{path}:1:8"
    path.write_text(json.dumps({"a": "x" * 500_000}))
    assert read_json(path).where(("a",)) == str(path)
