"""Every optimization is tested with the first recipe that can use it, and its fault is reported."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.errors import HostError
from primus_images.turbo import every

GPUS = SimpleNamespace(driver="550", names=("NVIDIA H200", "NVIDIA H200"))


@pytest.fixture
def tests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Let every test pass but that of one optimization, and one package be missing."""
    called: list[tuple[Any, ...]] = []

    def test(names: tuple[str, ...], *more: Any) -> dict[str, str]:
        called.append((names, *more))
        return {"real-rope": "is wrong"} if names == ("real-rope",) else {}

    def missing(names: tuple[str, ...]) -> list[str]:
        return ["flash_attn", "quack"] if names == ("flash-attention-4",) else []

    monkeypatch.setattr(every, "detect", lambda: GPUS)
    monkeypatch.setattr(every.trial, "test", test)
    monkeypatch.setattr(every.catalogue, "missing_packages", missing)
    monkeypatch.setattr(every.load, "names", lambda *_: ["llama3.1-8b", "flux.1-dev"])
    return called


def test_users_are_the_first_recipes_of_each_optimization(tests: Any) -> None:
    users = every.users("h200")
    assert users["real-rope"].name == "llama3.1-8b"
    assert users["real-rope"].backend == "torchtitan"
    assert users["real-rope"].gpu == "h200"
    assert {recipe.name for recipe in users.values()} >= {"llama3.1-8b"}
    for optimization, recipe in users.items():
        assert optimization in every.catalogue.usable(recipe)


def test_document_names_what_failed_and_what_is_missing(
    tests: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    document = every.tested("h200", tmp_path)
    users = set(every.users("h200"))
    assert document["passed"] is False
    assert document["faults"] == {"real-rope": "is wrong"}
    assert document["missing"] == {"flash-attention-4": "flash_attn, quack not installed"}
    assert {*document["tested"]} == users - {"real-rope", "flash-attention-4"}  # type: ignore[misc]
    names, shapes, key, folder, _ = tests[0]
    assert len(names) == 1
    (recipe, *_) = every.users("h200").values()
    assert shapes == asdict(every.catalogue.shapes_of(recipe))
    assert key == ["550", ("NVIDIA H200",)]
    assert folder == tmp_path


def test_exit_code_says_how_it_ended(
    tests: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["every", "h200", str(tmp_path)])
    assert every.main() == 1
    assert json.loads(capsys.readouterr().out)["faults"] == {"real-rope": "is wrong"}
    monkeypatch.setattr(every, "tested", lambda *_: {"faults": {}})
    assert every.main() == 0

    def broken(*_: object) -> None:
        raise HostError("the driver is broken")

    monkeypatch.setattr(every, "tested", broken)
    assert every.main() == HostError("x").exit_code
    assert "primus self-tests: the driver is broken" in capsys.readouterr().err
    monkeypatch.setattr(every, "detect", lambda: SimpleNamespace(names=()))
    assert every.main() == 3
    assert capsys.readouterr().err == "primus self-tests: there is no GPU on this machine\n"
