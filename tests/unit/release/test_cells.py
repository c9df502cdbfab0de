import json
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli.host.run import _cells
from primus_images.errors import InputError
from primus_images.gates.check import Outcome
from primus_images.gates.examined import Finding, GateReport
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve as pinned
from primus_images.recipes.load import names
from primus_images.recipes.resolve import resolve
from primus_images.release.cells import cell_of, cells_of
from primus_images.release.summary import Validated, table
from primus_images.release.validation import _passed_before
from primus_images.training.judge import suite
from primus_images.training.run.job import Job
from tables import table_of

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


def record(jobs: tuple[Job, ...]) -> dict[str, Any]:
    recipe = suite.recipe_of(jobs)
    return {
        "passed": True,
        "gpu": "none",
        "made": "2026-11-20T20:00:00Z",
        "image": {"content": "sha256:1"},
        "recipe": {"sha256": recipe.digest, "precision": "fp32"},
        "suite": {"sha256": suite.digest(recipe, jobs)},
        "verdicts": [
            {"name": "base: finite", "passed": True},
            {"name": "gate budget", "passed": True},
        ],
        "jobs": [{"series": [{"loss": 7.0}, {"loss": 3.0}]}],
    }


@pytest.mark.parametrize(
    ("key", "inner", "value"), table_of("cells.only_a_record_of_the_same_is_kept")
)
def test_only_a_record_of_the_same_is_kept(
    tmp_path: Path, jobs: tuple[Job, ...], key: str, inner: str | None, value: object
) -> None:
    image = {"content": "sha256:1"}
    gates = said()
    assert _passed_before(tmp_path, image, jobs, gates) is None
    made = record(jobs)
    (tmp_path / "record.json").write_text(json.dumps(made))
    assert _passed_before(tmp_path, image, jobs, gates) == made
    if inner is None:
        made[key] = value
    else:
        made[key][inner] = value
    (tmp_path / "record.json").write_text(json.dumps(made))
    assert _passed_before(tmp_path, image, jobs, gates) is None
    (tmp_path / "record.json").write_text("{broken")
    assert _passed_before(tmp_path, image, jobs, gates) is None


def test_jobs_of_a_preview_are_kept_while_its_gates_say_the_same(
    tmp_path: Path, jobs: tuple[Job, ...]
) -> None:
    made = record(jobs)
    made |= {
        "passed": False,
        "verdicts": [made["verdicts"][0], {"name": "gate budget", "passed": False}],
    }
    (tmp_path / "record.json").write_text(json.dumps(made))
    failing = said(Finding(severity="error", message="too large"))
    assert _passed_before(tmp_path, {"content": "sha256:1"}, jobs, failing) == made
    assert _passed_before(tmp_path, {"content": "sha256:1"}, jobs, said()) is None


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
    for target, recipe in (("cpu", None), ("mi355x", "mistral-7b")):
        ((_, level),) = _cells(pinned(project, target), "cpu", recipe=recipe, level=None)
        assert level == "standard"
    assert {
        level for _, level in _cells(pinned(project, "cpu"), "cpu", recipe=None, level="full")
    } == {"full"}


def said(*findings: Finding) -> Outcome:
    """What the gates say of an image when one of them finds this."""
    report = GateReport(gate="budget", summary="", findings=findings)
    return Outcome(target="cpu", ref="v26.11-cpu", digest="sha256:1", reports=(report,))


def test_the_table_names_what_failed(tmp_path: Path, jobs: tuple[Job, ...]) -> None:
    bad = record(jobs) | {"passed": False, "verdicts": [{"name": "base: finite", "passed": False}]}
    text = table(
        [
            Validated(record=record(jobs), folder=tmp_path / "one", earlier=True),
            Validated(record=bad, folder=tmp_path / "two"),
        ]
    )
    first, second, last = text.splitlines()
    assert first.startswith("✓ one")
    assert first.endswith("2 checks  (kept)")
    assert "✗ base: finite" in second
    assert last == "FAILED: 1 of 2 passed"
