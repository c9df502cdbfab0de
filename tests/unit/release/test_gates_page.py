"""Records of gates and the page made of them, on a small project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_files import bundle, elf
from primus.errors import InputError
from primus.gates.rules import gates
from primus.release.docs import generated
from primus.release.gate_record import load_gate_records
from primus.release.gates_page import gates_page
from project_kit import Kit, make_project

BENCH: dict[str, Any] = {
    "date": "2026-11-20",
    "command": "nox -s bench-generations",
    "versions": {"primus-images": "1"},
    "machine": {"cpu": "C", "cores": 2, "memory_gib": 8, "system": "S", "kernel": "6", "python": "3.11"},
    "load_average": {"before": [0.5, 0, 0], "after": [1.25, 0, 0]},
    "rows": [
        {"name": "fast", "value": 0.02, "unit": "s", "bar": {"sign": "≤", "limit": 0.2}, "met": True},
        {"name": "small", "value": 23.5, "unit": "%", "bar": {"sign": "≥", "limit": 40.0}, "met": False},
        {"name": "plain", "value": 7, "unit": "s"},
    ],
    "notes": ["a note"],
}


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    kit = make_project(tmp_path / "project")
    kit.edit("images/demo.yaml", "channels: [local]", "gpu: mi355x\nchannels: [local]\npreviews: {local: a test}")
    kit.write("parts/alpha/lib/librocblas.so", elf({".hip_fatbin": bundle(["gfx942"])}))
    kit.write("README.md", "<!-- targets -->\n<!-- end -->\n")
    kit.build("demo", "other")
    return kit


def marks(**others: str) -> str:
    """The cells of a row: passed, except for ``others``."""
    return " | ".join(others.get(name, "✓") for name in gates())


def test_the_page_says_what_the_records_say(kit: Kit) -> None:
    assert kit.primus("check", "demo", "--record").code == 1
    assert kit.primus("check", "other", "--record").code == 0
    records = load_gate_records(kit.root)
    assert list(records) == ["demo", "other"]
    layers = {layer["name"]: layer["bytes"] for layer in records["demo"]["layers"]}
    assert set(layers) == {"alpha", "beta", "recipes"}
    page = gates_page(records, BENCH)
    for line in (
        f"| `demo` | local, preview | {marks(coverage='**✗**', turbo='–')} |",
        f"| `other` | local | {marks(turbo='–')} |",
        "  - ✗ `opt/alpha/lib/librocblas.so`: no code for gfx950: it has gfx942 (fat binary)",
        "| `opt/alpha/lib/librocblas.so` | fat binary | **no** | gfx942 |",
        f"| `demo` | {sum(layers.values())} B | {sum(layers.values())} B | 0 B |",
        "| `demo` ↔ `other` | " + f"{sum(layers.values())} B | 100.00 % |",
        "| fast | 0.02 s | ≤ 0.2 s | yes |",
        "| small | 23.5 % | ≥ 40 % | **no** |",
        "- Load average before 0.50, after 1.25",
    ):
        assert line in page.splitlines(), page


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
