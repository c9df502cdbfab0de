"""Records of gates, and the row of README made of them, on a small project."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_files import bundle, elf
from primus.errors import InputError
from primus.release.docs import generated
from primus.release.gate_record import load_gate_records
from project_kit import Kit, make_project


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    kit = make_project(tmp_path / "project")
    kit.edit("images/demo.yaml", "channels: [local]", "gpu: mi355x\nchannels: [local]\npreviews: {local: a test}")
    kit.write("parts/alpha/lib/librocblas.so", elf({".hip_fatbin": bundle(["gfx942"])}))
    kit.write("README.md", "<!-- targets -->\n<!-- end -->\n")
    kit.build("demo", "other")
    return kit


def test_a_record_says_what_was_found(kit: Kit) -> None:
    assert kit.primus("check", "demo", "--record").code == 1
    assert kit.primus("check", "other", "--record").code == 0
    records = load_gate_records(kit.root)
    assert list(records) == ["demo", "other"]
    assert [gate["gate"] for gate in records["demo"]["gates"] if not gate["passed"]] == ["coverage"]
    assert {layer["name"] for layer in records["demo"]["layers"]} == {"alpha", "beta", "recipes"}
    assert all(gate["passed"] for gate in records["other"]["gates"])


def test_readme_says_so_as_long_as_the_lock_is_the_same(kit: Kit) -> None:
    def row() -> str:
        return next(line for line in generated(kit.root)["README.md"].splitlines() if line.startswith("| `demo`"))

    kit.write(
        "images/locks/local/demo.json",
        json.dumps({"format": 1, "target": "demo", "channel": "local", "pins": {}, "files": []}),
    )
    assert "| – | not checked yet |" in row()
    assert kit.primus("check", "demo", "--record").code == 1
    assert "B | fails coverage |" in row()
    lock = kit.root / "images/locks/local/demo.json"
    lock.write_text(lock.read_text() + "\n")
    assert "| – | not checked yet |" in row()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"target": "x"}'])
def test_a_record_that_is_none_is_named(kit: Kit, text: str) -> None:
    kit.write("benchmarks/results/gates-demo.json", text)
    with pytest.raises(InputError, match="not a record of gates") as caught:
        load_gate_records(kit.root)
    assert caught.value.where == "benchmarks/results/gates-demo.json"
