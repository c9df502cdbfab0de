import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.cli.host import validate as of_validate
from primus_images.gates.check import Outcome
from primus_images.gates.examined import Finding, GateReport
from primus_images.plan.project import Project
from primus_images.release.cells import cells_of
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
