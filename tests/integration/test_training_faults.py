"""Real two-rank runs, broken on purpose. Each fault must be caught by the check meant for it, and by no other.

``--record-faults`` writes what was caught, and by what, to ``benchmarks/results/faults.json``.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from fault_kit import CASES, Case, base, judged, outcome_of
from training_kit import ROOT, failing, run

from primus.gpus.table import UnknownPeak, mfu
from primus.training.checks import Verdict
from primus.training.outcome import Outcome

pytestmark = pytest.mark.integration

RECORD = ROOT / "benchmarks" / "results" / "faults.json"
RENAMED = [
    ("torchtitan", "torchtitan.training.step", "torchtitan.training.steps"),
    ("fsdp", "fsdp.training.warmup", "fsdp.training.warmup_steps"),
    ("megatron", "megatron.training.global_batchsize", "megatron.training.global_batch_size"),
]
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


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """Rows for the record; kept when the option asks for it."""
    rows: list[dict[str, Any]] = []
    yield rows
    if request.config.getoption("--record-faults"):
        assert len(rows) == len(CASES) + len(RENAMED) + 1, "a record of some faults is none: run the whole file"
        versions = next(row.pop("versions") for row in rows if "versions" in row)
        for row in rows:
            row.pop("versions", None)
        record = {
            "command": "pytest tests/integration/test_training_faults.py --record-faults",
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "versions": versions,
            "faults": rows,
        }
        RECORD.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    "backend", ["fsdp", *(pytest.param(b, marks=pytest.mark.slow) for b in ("torchtitan", "megatron"))]
)
def test_the_healthy_run_passes(healthy: Callable[[str], Outcome], backend: str) -> None:
    left = healthy(backend)
    assert failing(judged(left, left)) == []
    assert left.series.exact


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_a_fault_is_caught_by_the_check_meant_for_it(
    python: list[str], healthy: Callable[[str], Outcome], recorded: list[dict[str, Any]], tmp_path: Path, case: Case
) -> None:
    base = healthy(case.backend)
    left = outcome_of(python, case.job(tmp_path / "broken", base.job.output), case.name)
    verdicts = judged(left, base, case.check)
    assert failing(verdicts) == [case.check], verdicts
    caught = next(verdict for verdict in verdicts if not verdict.passed)
    recorded.append({**_row(case.fault, case.backend, caught), "versions": left.facts.get("versions")})
    if case.name == "nan":
        assert caught.reason.startswith("step 3: loss nan")


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPARED, ids=lambda case: f"{case.backend}-{case.name}")
def test_the_same_job_without_its_fault_passes(
    python: list[str], healthy: Callable[[str], Outcome], tmp_path: Path, case: Case
) -> None:
    base = healthy(case.backend)
    left = outcome_of(python, case.job(tmp_path / "whole", base.job.output))
    assert failing(judged(left, base, case.check)) == []


@pytest.mark.parametrize(("backend", "renamed", "known"), RENAMED)
def test_a_renamed_key_is_refused(
    python: list[str], recorded: list[dict[str, Any]], backend: str, renamed: str, known: str
) -> None:
    words = ("train", "llama3.1-8b", "--proxy", "--backend", backend, f"{renamed}=3")
    ended = run(python, "-m", "primus.cli.main", *words)
    assert ended.returncode == 2, ended.stdout
    said = ended.stderr.strip().splitlines()[-1]
    assert f"there is no key {renamed!r}; did you mean {known!r}?" in said
    caught = Verdict(name="keys of the recipe", passed=False, reason=said, measured="exit code 2", limit="known keys")
    recorded.append(_row("renamed key", backend, caught))


def test_the_peak_of_an_unknown_gpu_is_not_guessed(recorded: list[dict[str, Any]]) -> None:
    with pytest.raises(UnknownPeak) as told:
        mfu(400.0, "NVIDIA B900", "bf16")
    caught = Verdict(
        name="table of GPUs", passed=False, reason=str(told.value), measured="no MFU", limit="a known peak"
    )
    recorded.append(_row("peak of an unknown GPU", "all", caught))


@pytest.mark.slow
def test_another_precision_fails(python: list[str], healthy: Callable[[str], Outcome], tmp_path: Path) -> None:
    case = Case(fault="", backend="fsdp", name="loop_bf16", check="precision", words=("fsdp.training.steps=3",))
    left = outcome_of(python, case.job(tmp_path / "broken"), case.name)
    assert failing(judged(left, healthy("fsdp"))) == ["precision"]


def _row(fault: str, backend: str, caught: Verdict) -> dict[str, Any]:
    told = asdict(caught)
    return {"fault": fault, "backend": backend, "check": told.pop("name")} | {
        key: told[key] for key in ("reason", "measured", "limit")
    }
