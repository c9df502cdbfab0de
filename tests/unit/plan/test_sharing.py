"""Which bytes images share, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primus.plan.explain import sharing, sharing_text
from project_kit import Kit, make_project

A = {"base": 900, "x": 90, "fa": 10}
B = {"base": 900, "x": 90, "fb": 10}
C = {"base": 900, "y": 1100}


def test_shared_and_own_bytes() -> None:
    rows = sharing({"a": A, "b": B, "c": C})
    assert {target: tuple(row.values()) for target, row in rows.items()} == {
        "a": (1000, 990, 10), "b": (1000, 990, 10), "c": (2000, 900, 1100),
    }  # fmt: skip
    lines = sharing_text({"a": A, "b": B, "c": C}).splitlines()
    assert lines[-1].split() == ["c", "2.0", "kB", "900", "B", "1.1", "kB"]


def test_what_is_not_built_is_unknown_and_never_a_guess() -> None:
    images = {"a": A, "b": {"base": 900, "key": None, "fb": 10}}
    assert [tuple(row.values()) for row in sharing(images).values()] == [(1000, 900, 100), (None, None, None)]
    assert sharing_text(images).splitlines()[-1].split() == ["b", "unknown", "unknown", "unknown"]


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
    assert "shared" in kit.primus("plan", "demo", "other").out
    assert "shared" not in kit.primus("plan", "demo").out
    assert "sharing" not in json.loads(kit.primus("plan", "demo", "--json").out)[0]
