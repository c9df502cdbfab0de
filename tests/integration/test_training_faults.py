"""Real two-rank runs, healthy and broken on purpose. Each fault must be caught by the check meant for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from training_kit import failing, train

from primus.recipes.resolve import resolve
from primus.training import checks, outcome, record, suite
from primus.training.job import Job
from primus.training.outcome import Outcome

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    planned = suite.plan("llama3-proxy", tmp_path_factory.mktemp("suite"))
    return {job.name: job for job in planned}


@pytest.fixture(scope="module")
def healthy(python: list[str], jobs: dict[str, Job]) -> dict[str, Outcome]:
    return suite.run(list(jobs.values()), lambda job: train(python, job))


@pytest.fixture
def broken(python: list[str], jobs: dict[str, Job], tmp_path: Path) -> Callable[[str, str], tuple[Outcome, list[str]]]:
    """Run the named job of the plan with a fault: what it left, and which basic checks fail."""

    def run(name: str, fault: str) -> tuple[Outcome, list[str]]:
        job = replace(jobs[name], output=tmp_path / name)
        left = outcome.read(job, train(python, job, fault))
        return left, failing(outcome.basic_verdicts(left))

    return run


def test_the_healthy_suite_passes(jobs: dict[str, Job], healthy: dict[str, Outcome]) -> None:
    planned = list(jobs.values())
    verdicts = suite.judge(planned, healthy)
    assert failing(verdicts) == []
    made = record.make(planned, healthy, verdicts, target="test", image={}, gpu="none", made="")
    assert made["passed"] is True
    assert all(left.series.exact for left in healthy.values())


def test_nan_fails(broken: Callable[[str, str], tuple[Outcome, list[str]]]) -> None:
    left, failed = broken("repeat", "nan")
    assert failed == ["finite"]
    assert checks.finite(left.series).reason.startswith("step 5: loss nan")


def test_an_early_stop_with_exit_code_0_fails(
    broken: Callable[[str, str], tuple[Outcome, list[str]]],
) -> None:
    left, failed = broken("repeat", "early_stop")
    assert "steps logged" in failed
    assert checks.steps_logged(left.series, 1, 20).reason == "missing: 8–20"


def test_a_bad_exit_after_all_steps_fails(broken: Callable[[str, str], tuple[Outcome, list[str]]]) -> None:
    left, failed = broken("repeat", "bad_exit")
    assert failed == ["exit code"]
    assert len(left.series.steps) == 20


def test_a_killed_rank_fails(broken: Callable[[str, str], tuple[Outcome, list[str]]]) -> None:
    left, failed = broken("repeat", "crash")
    assert {"exit code", "steps logged"} <= set(failed)
    assert len(left.series.steps) < 20


def test_another_precision_fails(broken: Callable[[str, str], tuple[Outcome, list[str]]]) -> None:
    left, failed = broken("repeat", "bf16")
    assert failed == ["precision"]
    assert "torch.bfloat16" in checks.precision(left.facts, "fp32").reason


def test_a_lost_micro_batch_fails(
    healthy: dict[str, Outcome], broken: Callable[[str, str], tuple[Outcome, list[str]]]
) -> None:
    left, failed = broken("accumulation", "lost_micro_batch")
    assert failed == [], "this fault leaves no trace in the run itself"
    verdict = checks.accumulation(healthy["base"].series, left.series, 1e-4)
    assert not verdict.passed
    first = left.series.at(1)
    whole = healthy["base"].series.at(1)
    assert first is not None
    assert whole is not None
    assert abs(first.loss - whole.loss) < 1e-4, "the loss alone would not have told"


def test_a_resume_that_forgets_its_place_in_the_data_fails(
    python: list[str], jobs: dict[str, Job], healthy: dict[str, Outcome], tmp_path: Path
) -> None:
    whole = jobs["resume"]
    words = (*whole.recipe.overrides, "checkpoint.exclude_from_loading=[dataloader]")
    job = replace(whole, output=tmp_path / "resume", recipe=replace(whole.recipe, overrides=words))
    left = outcome.read(job, train(python, job))
    assert failing(outcome.basic_verdicts(left)) == []
    assert not checks.resume(healthy["base"].series, left.series, 11, 0.0).passed


def test_another_seed_fails_the_repeat(
    python: list[str], jobs: dict[str, Job], healthy: dict[str, Outcome], tmp_path: Path
) -> None:
    whole = jobs["repeat"]
    words = (*whole.recipe.overrides, "debug.seed=43")
    job = replace(whole, output=tmp_path / "repeat", recipe=replace(whole.recipe, overrides=words))
    left = outcome.read(job, train(python, job))
    assert failing(outcome.basic_verdicts(left)) == ["configuration"]
    assert not checks.reproducible(healthy["base"].series, left.series, 0.0).passed


@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_is_proven_on_one_rank_and_on_two(python: list[str], tmp_path: Path, ranks: int) -> None:
    """One rank computes under autocast, two through FSDP2's mixed precision: both are bf16, and neither is fp32."""
    words = ("precision=bf16", "training.mixed_precision_param=bfloat16", f"ranks={ranks}", "training.steps=2")
    job = Job(name="bf16", recipe=resolve("llama3-proxy", words), output=tmp_path / "bf16")
    left = outcome.read(job, train(python, job))
    assert failing(outcome.basic_verdicts(left)) == []
    assert not checks.precision(left.facts, "fp32").passed
