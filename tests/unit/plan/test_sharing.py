"""Which bytes images share, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primus.plan.explain import SharedLayer, sharing, sharing_text
from project_kit import Kit, make_project

Layers = dict[str, SharedLayer]
BASE = {"base": SharedLayer("base", 900)}
A: Layers = {**BASE, "x": SharedLayer("kernels x", 90), "fa": SharedLayer("facts", 10)}
B: Layers = {**BASE, "x": SharedLayer("kernels x", 90), "fb": SharedLayer("facts", 10)}
C: Layers = {**BASE, "y": SharedLayer("kernels y", 1100)}


def test_shared_and_own_bytes() -> None:
    rows = sharing({"a": A, "b": B, "c": C})
    sizes = {target: (row["bytes"], row["shared"], row["own"]) for target, row in rows.items()}
    assert sizes == {"a": (1000, 990, 10), "b": (1000, 990, 10), "c": (2000, 900, 1100)}
    assert rows["a"]["with"] == {"b": {"shared": 990, "share": 0.99}, "c": {"shared": 900, "share": 0.45}}
    assert rows["b"]["with"]["c"] == rows["c"]["with"]["b"] == {"shared": 900, "share": 0.45}


def test_what_is_not_built_is_unknown_and_never_a_guess() -> None:
    unbuilt = {**BASE, "key": SharedLayer("kernels x", None), "fb": SharedLayer("facts", 10)}
    rows = sharing({"a": A, "b": unbuilt})
    assert [(row["bytes"], row["shared"], row["own"]) for row in rows.values()] == [
        (1000, 900, 100),
        (None, None, None),
    ]
    assert rows["a"]["with"]["b"] == {"shared": None, "share": None}
    assert "a ↔ b  unknown        unknown" in sharing_text({"a": A, "b": unbuilt})


def test_the_table_marks_what_is_shared() -> None:
    lines = sharing_text({"a": A, "b": B, "c": C}).splitlines()
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
