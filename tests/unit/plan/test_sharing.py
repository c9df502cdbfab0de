"""Which bytes images share, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primus.plan.sharing import Image, LayerOf, pairs, parts, sharing_text
from project_kit import Kit, make_project


def layer(name: str, size: int | None, identity: str = "") -> LayerOf:
    return LayerOf(name=name, identity=identity or name, size=size)


BASE = layer("base", 900)
A = Image(target="a", layers=(BASE, layer("kernels x", 90), layer("facts", 10, "fa")))
B = Image(target="b", layers=(BASE, layer("kernels x", 90), layer("facts", 10, "fb")))
C = Image(target="c", layers=(BASE, layer("kernels y", 1100)))


def test_shared_and_own_bytes() -> None:
    found = {p.target: (p.size, p.shared, p.own) for p in parts([A, B, C])}
    assert found == {"a": (1000, 990, 10), "b": (1000, 990, 10), "c": (2000, 900, 1100)}
    shares = {p.targets: (p.shared, p.share) for p in pairs([A, B, C])}
    assert shares == {("a", "b"): (990, 0.99), ("a", "c"): (900, 0.45), ("b", "c"): (900, 0.45)}


def test_what_is_not_built_is_unknown_and_never_a_guess() -> None:
    unbuilt = Image(target="b", layers=(BASE, layer("kernels x", None, "key"), layer("facts", 10, "fb")))
    assert [(p.size, p.shared, p.own) for p in parts([A, unbuilt])] == [(1000, 900, 100), (None, None, None)]
    (pair,) = pairs([A, unbuilt])
    assert (pair.shared, pair.share) == (None, None)
    assert "a ↔ b  unknown        unknown" in sharing_text([A, unbuilt])


def test_the_table_marks_what_is_shared() -> None:
    lines = sharing_text([A, B, C]).splitlines()
    assert lines[0].split() == ["layer", "bytes", "a", "b", "c"]
    rows = {line.split("  ")[0]: line.split()[-3:] for line in lines[1:]}
    assert rows["base"] == ["=", "=", "="]
    assert lines[1].split() == ["kernels", "y", "1.1", "kB", "+"]
    assert next(line for line in lines if line.startswith("c ")).split() == ["c", "2.0", "kB", "900", "B", "1.1", "kB"]
    assert lines[-3].split() == ["a", "↔", "b", "990", "B", "99.00", "%"]


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_project(tmp_path / "project")


def test_plan_says_it_before_and_after_a_build(kit: Kit) -> None:
    rows = json.loads(kit.primus("plan", "--all", "--json").out)
    assert [row["sharing"]["shared"] for row in rows] == [None, None]
    kit.edit("images/other.yaml", "components: [alpha, beta, recipes]", "components: [alpha, beta]")
    kit.build("demo", "other")
    demo, other = json.loads(kit.primus("plan", "--all", "--json").out)
    sizes = {line["name"]: line["bytes"] for line in demo["layers"]}
    assert demo["sharing"]["own"] == sizes["recipes"]
    assert demo["sharing"]["shared"] == other["sharing"]["bytes"] == sizes["alpha"] + sizes["beta"]
    assert other["sharing"]["own"] == 0
    assert demo["sharing"]["with"]["other"] == other["sharing"]["with"]["demo"]
    text = kit.primus("plan", "demo", "other").out
    assert "demo ↔ other" in text
    assert "↔" not in kit.primus("plan", "demo").out
    assert "sharing" not in json.loads(kit.primus("plan", "demo", "--json").out)[0]
