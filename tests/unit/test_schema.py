import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import jsonschema
import pytest
from docs.json_schema import json_schema

from primus_images.errors import InputError
from primus_images.schema import build, parse_json
from primus_images.yamlfile import Document, parse
from tables import table_of


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


@pytest.mark.parametrize(("text", "place", "message", "hint"), table_of("schema.strict"))
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
    message = (
        "must be a number that fits into 64 bits, not '?9999" if digits < 65 else "a number of 400"
    )
    with pytest.raises(InputError, match=message):
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
