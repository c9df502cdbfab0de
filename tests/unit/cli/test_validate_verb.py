"""`primus validate`: what it trains, and what it shows."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.cli.host import validate as of_validate
from primus_images.cli.host.validate import cells_to_train as _cells
from primus_images.cli.main import main
from primus_images.errors import InputError
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve as pinned
from primus_images.recipes.load import names
from primus_images.recipes.resolve import resolve
from primus_images.release.cells import cell_of, cells_of
from primus_images.training.judge import suite

ROOT = Path(__file__).resolve().parents[3]


def test_the_cpu_target_trains_every_recipe() -> None:
    recipes = Project.find(ROOT).target("cpu")[0].recipes
    assert recipes[0] == "llama3-proxy"
    assert sorted(recipes) == names()


def test_a_recipe_is_trained_by_default_or_in_every_way() -> None:
    one = cell_of("llama3.1-8b")
    assert (one.folder, one.choices.backend, one.choices.proxy) == ("llama3.1-8b", None, True)
    every = [*cells_of(["llama3.1-8b"])]
    assert [cell.folder for cell in every] == [
        "llama3.1-8b-torchtitan-pretrain",
        "llama3.1-8b-megatron-pretrain",
        "llama3.1-8b-fsdp-pretrain",
        "llama3.1-8b-finetune-full",
        "llama3.1-8b-finetune-lora",
    ]
    assert str(every[-1]) == "llama3.1-8b finetune lora"
    recipe = resolve(every[-1].recipe, (), every[-1].choices)
    assert (recipe.backend, recipe.mode, recipe.gpu, recipe.precision) == (
        "finetune",
        "lora",
        "cpu",
        "fp32",
    )
    with pytest.raises(InputError, match="no recipe 'lama'"):
        next(cells_of(["lama"]))
    with pytest.raises(InputError, match=r"llama3\.1-8b is trained in none of mxfp8 on mi300x"):
        next(cells_of(["llama3.1-8b"], gpu="mi300x", precisions=("mxfp8",)))


@pytest.mark.parametrize("target", ["mi300x", "mi355x"])
def test_an_instinct_target_trains_every_recipe_in_float32_and_bfloat16(
    target: str, tmp_path: Path
) -> None:
    project = Project.find(ROOT)
    assert sorted(project.target(target)[0].recipes) == names()
    planned = _cells(pinned(project, target), "cpu", recipe=None, level=None)
    (first, level), *rest = planned
    assert (first.recipe, level) == ("llama3-proxy", "standard")
    assert {level for _, level in rest} == {"quick"}
    ways = {str(cell) for cell in cells_of(names())}
    assert {str(cell) for cell, _ in rest} == {
        f"{way} {precision}" for way in ways for precision in ("fp32", "bf16")
    }
    request = suite.Request(recipe="llama3.1-8b", choices=rest[-1][0].choices)
    (job,) = suite.plan(request, tmp_path, "quick")
    assert job.recipe.precision == "bf16"
    assert len({cell.folder for cell, _ in planned}) == len(planned)


def test_one_recipe_alone_and_the_cpu_target_have_the_standard_suite() -> None:
    project = Project.find(ROOT)
    for target, name in (("cpu", None), ("mi355x", "mistral-7b")):
        ((_, level),) = _cells(pinned(project, target), "cpu", recipe=name, level=None)
        assert level == "standard"
    assert {
        level for _, level in _cells(pinned(project, "cpu"), "cpu", recipe=None, level="full")
    } == {"full"}


def test_a_dry_run_counts_the_jobs_of_each_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["validate", "cpu", "--recipe", "llama3-proxy", "--suite", "quick", "--dry-run"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["recipe", "suite", "jobs"]
    assert lines[1].split()[-2:] == ["quick", "1"]
    assert lines[-1] == "1 job in v26.11-cpu"
    assert main([*words, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["suite"] == "quick"
    assert row["jobs"][0].startswith("primus train ")


@pytest.mark.parametrize("passed", [True, False])
def test_a_validation_passes_if_all_cells_do(
    passed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    given: list[Any] = []
    stats = SimpleNamespace(save=lambda: None)
    image = SimpleNamespace(image=SimpleNamespace(plan="plan"))
    record = SimpleNamespace(passed=passed, as_json=lambda: {"passed": passed})

    def validate(plan: Any, workspace: Any, cells: Any, options: Any) -> list[Any]:
        given.append((plan, len(cells), options))
        return [SimpleNamespace(record=record, folder=Path("folder"))]

    monkeypatch.setattr(of_validate, "build", lambda *_: [image])
    monkeypatch.setattr(of_validate, "plan_images", lambda *_: [stats])
    monkeypatch.setattr(of_validate, "validate_cells", validate)
    monkeypatch.setattr(of_validate, "outcome_text", lambda *_: "a verdict")
    words = ["validate", "cpu", "--recipe", "llama3-proxy"]
    assert main(words) == int(not passed)
    assert capsys.readouterr().out == "a verdict\n"
    plan, cells, options = given[0]
    assert (plan, cells, options.output) == ("plan", 1, ROOT / "out/validation")
    assert (options.again, options.recording, options.quiet) == (False, False, False)
    assert main([*words, "--json", "--again", "--output", "/tmp/x"]) == int(not passed)
    assert json.loads(capsys.readouterr().out) == {"passed": passed}
    assert (given[1][2].again, given[1][2].quiet) == (True, True)
    assert given[1][2].output == Path("/tmp/x")
    assert main([*words, "--json", "--suite", "quick"]) == int(not passed)
    assert json.loads(capsys.readouterr().out) == [{"passed": passed}]


def test_golden_curves_are_of_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "cpu", "--record-golden"]) == 2
    assert "add --suite quick" in capsys.readouterr().err
