"""Real two-rank runs, broken on purpose. Each fault must be caught by the check meant for it, and by no other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from fault_kit import CASES, Case, base, judged, outcome_of
from training_kit import failing

from primus.training.outcome import Outcome

pytestmark = pytest.mark.integration

# The other jobs are the base's, only shorter.
COMPARED = [case for case in CASES if case.compared or case.precision == "fp8"]


def marked(case: Case) -> ParameterSet:
    """Slow but for some of our own loop: unit tests break each check, and test_silent_faults.py breaks each backend."""
    quick = case.backend == "fsdp" and case.name in ("nan", "loop_lost_micro_batch", "no_fp8")
    marks = () if quick else pytest.mark.slow
    return pytest.param(case, id=f"{case.backend}-{case.name}", marks=marks)


@pytest.fixture(scope="module")
def healthy(python: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Backend → its base run, made when first asked for."""

    @cache
    def of(backend: str) -> Outcome:
        return base(python, backend, tmp_path_factory.mktemp(backend) / "base")

    return of


@pytest.mark.parametrize(
    "backend", ["fsdp", *(pytest.param(b, marks=pytest.mark.slow) for b in ("torchtitan", "megatron"))]
)
def test_the_healthy_run_passes(healthy: Callable[[str], Outcome], backend: str) -> None:
    left = healthy(backend)
    assert failing(judged(left, left)) == []
    assert left.series.exact


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_a_fault_is_caught_by_the_check_meant_for_it(
    python: list[str], healthy: Callable[[str], Outcome], tmp_path: Path, case: Case
) -> None:
    base = healthy(case.backend)
    left = outcome_of(python, case.job(tmp_path / "broken", base.job.output), case.name)
    verdicts = judged(left, base, case.check)
    assert failing(verdicts) == [case.check], verdicts
    if case.name == "nan":
        assert any(verdict.reason.startswith("step 3: loss nan") for verdict in verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPARED, ids=lambda case: f"{case.backend}-{case.name}")
def test_the_same_job_without_its_fault_passes(
    python: list[str], healthy: Callable[[str], Outcome], tmp_path: Path, case: Case
) -> None:
    base = healthy(case.backend)
    left = outcome_of(python, case.job(tmp_path / "whole", base.job.output))
    assert failing(judged(left, base, case.check)) == []


@pytest.mark.slow
def test_another_precision_fails(python: list[str], healthy: Callable[[str], Outcome], tmp_path: Path) -> None:
    case = Case(fault="", backend="fsdp", name="loop_bf16", check="precision", words=("fsdp.training.steps=3",))
    left = outcome_of(python, case.job(tmp_path / "broken"), case.name)
    assert failing(judged(left, healthy("fsdp"))) == ["precision"]
