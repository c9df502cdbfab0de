import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.cli.host import validate as of_validate
from primus_images.cli.host.validate import cells_to_train as _cells
from primus_images.errors import InputError
from primus_images.gates.check import Outcome
from primus_images.gates.examined import Finding, GateReport
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve as pinned
from primus_images.recipes.load import names
from primus_images.recipes.resolve import resolve
from primus_images.release.cells import cell_of, cells_of
from primus_images.release.summary import Validated, table
from primus_images.release.validation import passed_before
from primus_images.training.judge import suite
from primus_images.training.judge.record import (
    Record,
    RecordedImage,
    RecordedJob,
    RecordedSuite,
)
from primus_images.training.run.job import Job
from records import recipe, record, verdicts

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


def test_every_cell_of_the_cpu_target_has_a_plan_of_the_full_suite(tmp_path: Path) -> None:
    cells = [*cells_of(Project.find(ROOT).target("cpu")[0].recipes)]
    plans = {
        str(cell): suite.plan(
            suite.Request(recipe=cell.recipe, choices=cell.choices), tmp_path, "full"
        )
        for cell in cells
    }
    assert len(plans) == len(cells) > 30
    assert all(
        {"base", "repeat", "resume", "accumulation"} <= {j.name for j in jobs}
        for jobs in plans.values()
    )
    # One rank cannot share experts; the layout check of such a model compares without expert
    # parallelism.
    (one,) = (j for j in plans["deepseek-16b torchtitan pretrain"] if j.name == "one-rank")
    assert one.recipe.degree("ep") == 1
    # Megatron refuses to share latent attention by tensor parallelism, so its suite has no such
    # job.
    assert "tensor-parallel" not in {j.name for j in plans["deepseek-v2-lite megatron pretrain"]}


@pytest.fixture
def jobs(tmp_path: Path) -> tuple[Job, ...]:
    return suite.plan(suite.Request(recipe="llama3-proxy"), tmp_path / "jobs", "quick")


def made(jobs: tuple[Job, ...]) -> Record:
    """The record of a validation that passed."""
    described = suite.recipe_of(jobs)
    series = ({"loss": 7.0}, {"loss": 3.0})
    return record(
        recipe=recipe(sha256=described.digest),
        suite=RecordedSuite(sha256=suite.digest(described, jobs), format=6, reference="0"),
        verdicts=verdicts("base: finite", "gate budget"),
        jobs=(RecordedJob(name="base", ran=True, series=series),),
    )


def state_of(found: Record) -> tuple[str, ...]:
    return (
        found.image.content,
        found.recipe.sha256,
        found.suite.sha256,
        found.gpu,
        found.wrap,
    )


def write(folder: Path, found: Record) -> None:
    (folder / "record.json").write_text(json.dumps(found.as_json()))


@pytest.mark.parametrize(
    "change",
    [
        {"image": RecordedImage(content="sha256:2")},
        {"recipe": recipe(sha256="another")},
        {"suite": RecordedSuite(sha256="another", format=6, reference="0")},
        {"gpu": "mi355x"},
        {"wrap": "nsys"},
        {"verdicts": ()},
        {"verdicts": verdicts("base: finite")},
        {"verdicts": verdicts("base: finite", "gate budget", failed=("base: finite",))},
        {"verdicts": verdicts("base: finite", "gate budget", failed=("gate budget",))},
    ],
)
def test_only_a_record_of_the_same_is_kept(
    tmp_path: Path, jobs: tuple[Job, ...], change: dict[str, Any]
) -> None:
    found = made(jobs)
    state = state_of(found)
    assert passed_before(tmp_path, state, said()) is None
    write(tmp_path, found)
    assert passed_before(tmp_path, state, said()) == found
    write(tmp_path, replace(found, **change))
    assert passed_before(tmp_path, state, said()) is None
    (tmp_path / "record.json").write_text("{broken")
    assert passed_before(tmp_path, state, said()) is None


def test_jobs_of_a_preview_are_kept_while_its_gates_say_the_same(
    tmp_path: Path, jobs: tuple[Job, ...]
) -> None:
    failed = verdicts("base: finite", "gate budget", failed=("gate budget",))
    found = replace(made(jobs), passed=False, verdicts=failed)
    write(tmp_path, found)
    failing = said(Finding(severity="error", message="too large"))
    assert passed_before(tmp_path, state_of(found), failing) == found
    assert passed_before(tmp_path, state_of(found), said()) is None


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


def said(*findings: Finding) -> Outcome:
    """What the gates say of an image when one of them finds this."""
    report = GateReport(gate="budget", summary="", findings=findings)
    return Outcome(target="cpu", ref="v26.11-cpu", digest="sha256:1", reports=(report,))


def test_the_table_names_what_failed(tmp_path: Path, jobs: tuple[Job, ...]) -> None:
    bad = replace(
        made(jobs), passed=False, verdicts=verdicts("base: finite", failed=("base: finite",))
    )
    text = table(
        [
            Validated(record=made(jobs), folder=tmp_path / "one", earlier=True),
            Validated(record=bad, folder=tmp_path / "two"),
        ]
    )
    first, second, last = text.splitlines()
    assert first.startswith("✓ one")
    assert first.endswith("2 checks  (kept)")
    assert "✗ base: finite" in second
    assert last == "FAILED: 1 of 2 passed"


def test_what_is_shown_of_a_validation_counts_its_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = SimpleNamespace(arguments=lambda: ["train", "a b"])
    numbers = {"quick": 1, "standard": 3}
    monkeypatch.setattr(of_validate, "planned_jobs", lambda cell, level, *_: [job] * numbers[level])
    resolved: Any = SimpleNamespace(ref="v26.11-demo")
    options: Any = SimpleNamespace(wrap=(), json=False)
    assert of_validate._show([("one", "quick"), ("two", "standard")], resolved, options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "4 jobs in v26.11-demo"
    assert [line.split() for line in lines[-3:-1]] == [
        ["one", "quick", "1"],
        ["two", "standard", "3"],
    ]
    options.json = True
    of_validate._show([("one", "quick")], resolved, options)
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {"cell": "one", "suite": "quick", "jobs": ["primus train 'a b'"]}
