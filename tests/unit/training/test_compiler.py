"""A job that compiles needs a compiler that works and Python's headers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from primus.errors import HostError
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.training import machine


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def with_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "Python.h").touch()
    monkeypatch.setattr(machine, "headers", lambda: folder)
    return folder


@pytest.mark.parametrize(
    ("gpu", "there", "environment", "said"),
    [
        (True, [], {}, "neither gcc nor clang"),
        (True, ["gcc"], {}, ""),
        (True, ["clang"], {}, ""),
        (True, ["g++"], {}, "neither gcc nor clang"),
        (True, ["gcc"], {"CC": "icc"}, "CC names no other compiler"),
        (True, ["mycc"], {"CC": "mycc"}, ""),
        (False, ["gcc"], {}, "no g++"),
        (False, ["g++"], {}, ""),
        (False, ["c"], {"CXX": "c"}, ""),
    ],
)
@pytest.mark.usefixtures("with_headers")
def test_programs_are_those_that_the_libraries_call(
    tmp_path: Path, gpu: bool, there: list[str], environment: dict[str, str], said: str
) -> None:
    for name in there:
        program(tmp_path, name, "exit 0")
    found = machine.lacks_compiler({"PATH": str(tmp_path), **environment}, gpu=gpu)
    assert said in found
    assert bool(said) == bool(found)


def test_a_compiler_without_headers_is_not_enough(with_headers: Path, tmp_path: Path) -> None:
    program(tmp_path, "gcc", "exit 0")
    (with_headers / "Python.h").unlink()
    assert "Python's headers are not on this machine" in machine.lacks_compiler({"PATH": str(tmp_path)}, gpu=True)


def test_a_recipe_that_compiles_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path)})
    machine.check(resolve("llama3-proxy", (), Choices(gpu="cpu")))
    with pytest.raises(HostError, match=r"torch\.compile needs a compiler: there is no g\+\+ .*") as refused:
        machine.check(resolve("llama3-proxy", ("compile.enable=true",), Choices(gpu="cpu")))
    assert "compile.enable=false trains without it" in str(refused.value)
    assert "command line" in str(refused.value)
    with pytest.raises(HostError, match=r"training\.compile=false"):
        machine.check(resolve("flux.1-dev", ("training.compile=true",), Choices(gpu="cpu", proxy=True)))
