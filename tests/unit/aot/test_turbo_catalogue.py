"""The catalogue of kernels, and what the build shows to the program that compiles it."""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from primus.aot.bake import _elsewhere
from primus.aot.catalogue import CATALOGUE_FILE, load_catalogue
from primus.aot.gpu import Gpu
from primus.errors import CheckFailed, InputError
from primus.gates.rules.turbo import turbo
from primus.plan import aot as plan
from primus.plan.project import Project
from primus.plan.resolve import resolve_all

ROOT = Path(__file__).parents[3]
TURBO = ROOT / "src/primus/aot"


def test_every_kernel_has_a_reference_and_every_call_a_name_of_its_own() -> None:
    catalogue = load_catalogue()
    tree = ast.parse((TURBO / "workloads.py").read_text())
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "WORKLOADS"
    ]
    assert isinstance(table, ast.Dict)
    assert {k.test for k in catalogue.kernels} == {ast.literal_eval(key) for key in table.keys if key}
    labels = [case.label for case in catalogue.cases(catalogue.kernels)]
    assert len(labels) == len(set(labels)) > 1000


def test_a_component_without_kernels_for_the_gpu_is_named() -> None:
    catalogue = load_catalogue()
    assert [k.name for k in catalogue.of(["flash-attention"], "amd")] == ["flash-attention"]
    with pytest.raises(InputError, match="no kernel of 'flash-attention' for GPUs of nvidia") as caught:
        catalogue.of(["liger-kernel", "flash-attention"], "nvidia")
    assert caught.value.hint == "components with kernels: liger-kernel"


def test_a_kernel_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.yaml"
    path.write_text(CATALOGUE_FILE.read_text().replace("name: liger-rope", "name: liger-swiglu"))
    with pytest.raises(InputError, match="kernel 'liger-swiglu' is a duplicate"):
        load_catalogue(path)


def test_what_targets_list_is_in_the_catalogue_for_their_gpu() -> None:
    project, catalogue = Project(ROOT), load_catalogue()
    targets = {one.name: one for one in resolve_all(project, project.target_names())}
    listed = {name: one.target.turbo for name, one in targets.items() if one.target.turbo}
    assert {"mi300x", "mi325x", "mi350x", "mi355x"} <= set(listed)
    for name, components in listed.items():
        vendor = "amd" if (targets[name].arch or "").startswith("gfx") else "nvidia"
        assert catalogue.of(components, vendor)
        assert targets[name].environment["TRITON_CACHE_MANAGER"] == "primus.aot.cache:BakedCacheManager"


def test_the_compiling_program_sees_every_module_it_imports() -> None:
    shown = set(plan._SOURCES)
    for name in shown:
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse((ROOT / "src/primus" / name).read_text())):
            if not (isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "primus"):
                continue
            stem = node.module.replace(".", "/").removeprefix("primus").removeprefix("/")
            wanted = {f"{stem}/{alias.name}.py" for alias in node.names} | {f"{stem}.py"}
            assert wanted & shown, f"{name} imports {node.module}, which the sandbox is not shown"


def test_the_baked_folder_has_one_name() -> None:
    tree = ast.parse((TURBO / "cache.py").read_text())
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    assert values["BAKED"] == plan.BAKED


def answer(**changes: object) -> dict[str, object]:
    good = {"arch": "gfx942", "calls": 3, "kernels": 2, "missing": [], "failures": [], "passed": True}
    return {**good, **changes}


def test_the_gate_names_what_is_compiled_anew() -> None:
    assert turbo(answer()).passed
    assert turbo(answer()).summary == "3 calls ask for 2 kernels for gfx942, 0 of them not there"
    missing = [{"kernel": "liger-rope", "function": "_triton_rope", "case": "liger-rope x"}]
    (finding,) = turbo(answer(missing=missing, passed=False)).findings
    assert finding.message == "liger-rope is compiled again: _triton_rope, requested by liger-rope x"
    assert not turbo(answer(failures=["liger-rope does not compile"], passed=False)).passed
    assert [f.message for f in turbo(answer(kernels=0, passed=False)).findings] == ["no kernel was requested"]
    assert not turbo(answer(passed=False)).passed, "files were left in Triton's own cache"


def test_the_catalogue_is_listed_without_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from primus.cli.main import main

    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["turbo", "list", "--json", "--kernel", "liger-rope"]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert kernel["entry"] == "liger_kernel.ops:LigerRopeFunction"
    assert main(["turbo", "list", "--kernel", "liger-rop"]) == 2
    assert main(["turbo", "check", "--gpu", "mi300x"]) == 3
    assert main(["turbo", "compile", "--gpu", "mi300x"]) == 3


def test_what_happens_in_the_other_process_is_told_in_this_one() -> None:
    assert _elsewhere(lambda: ("kernels", 2)) == ("kernels", 2)
    with pytest.raises(ModuleNotFoundError) as caught:
        _elsewhere(lambda: importlib.import_module("no_such_library"))
    assert caught.value.name == "no_such_library"
    with pytest.raises(CheckFailed, match="the process that requests the kernels ended with exit code 7"):
        _elsewhere(lambda: os._exit(7))


@pytest.mark.parametrize(
    ("arch", "capability", "width"),
    [
        ("gfx942", (9, 4), 64),
        ("gfx90a", (9, 0), 64),
        ("gfx1250", (12, 5), 32),
        ("sm_90", (9, 0), 32),
        ("sm_100", (10, 0), 32),
    ],
)
def test_a_gpu_is_described_as_its_own_libraries_do(
    arch: str, capability: tuple[int, int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = SimpleNamespace(GPUTarget=lambda *words: words)
    for name in ("triton", "triton.backends", "triton.backends.compiler"):
        monkeypatch.setitem(sys.modules, name, compiler)
    gpu = Gpu(arch=arch, units=1)
    assert gpu.capability == capability
    assert gpu.target[2] == width  # type: ignore[index]
