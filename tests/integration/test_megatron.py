"""The Megatron backend on CPU ranks: against transformers' models, against itself in other layouts, and its suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from primus.recipes.model import Asked
from primus.recipes.resolve import resolve
from primus.training import outcome, suite
from primus.training.job import Job, JobResult
from primus.training.outcome import Outcome

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = Path(__file__).with_name("megatron_reference.py")
CPU = Asked(backend="megatron", gpu="cpu", proxy=True)


def run(python: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.fixture(scope="module")
def python() -> str:
    """Python with megatron-core and transformers: PRIMUS_TEST_PYTHON's, else the one that runs the tests."""
    chosen = os.environ.get("PRIMUS_TEST_PYTHON", sys.executable)
    missing = run(chosen, "-c", "import megatron.core, transformers")
    if missing.returncode:
        pytest.skip(f"{chosen}: {missing.stderr.strip().splitlines()[-1]}; PRIMUS_TEST_PYTHON names another")
    return chosen


def train(python: str, job: Job) -> JobResult:
    ended = run(python, "-m", "primus.cli.main", *job.arguments(), "--json")
    assert ended.returncode in (0, 1), ended.stderr
    return JobResult(exit_code=ended.returncode, output=job.output)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "mistral", "mixtral", "deepseek_v2", "deepseek_v3"])
def test_the_model_computes_what_transformers_computes_with_the_same_weights(python: str, family: str) -> None:
    ended = run(python, "-W", "ignore", str(REFERENCE), family)
    assert ended.returncode == 0, ended.stderr
    gap, largest = map(float, ended.stdout.split())
    # Unscaled rotary positions make it 5e-2, a window one token too wide 8e-1.
    assert gap < 1e-4 * largest


def five_steps(python: str, name: str, output: Path, *words: str) -> Outcome:
    job = Job(name="train", recipe=resolve(name, ["training.steps=5", *words], CPU), output=output)
    left = outcome.read(job, train(python, job))
    failed = [verdict for verdict in outcome.basic_verdicts(left) if not verdict.passed]
    assert failed == []
    return left


TENSOR = "model.tensor_model_parallel_size=2"
SEQUENCE = "model.sequence_parallel=true"
PIPELINE = "model.pipeline_model_parallel_size=2"
ALONE = "model.expert_model_parallel_size=1"


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("llama3.1-8b", [[], [TENSOR], [TENSOR, SEQUENCE], [PIPELINE], ["ddp.use_distributed_optimizer=false"]]),
        ("deepseek-v2-lite", [[], [ALONE], [ALONE, TENSOR, SEQUENCE], [ALONE, PIPELINE]]),
    ],
)
def test_every_layout_trains_the_same_model(python: str, tmp_path: Path, name: str, layouts: list[list[str]]) -> None:
    runs = [
        five_steps(python, name, tmp_path / str(number), "model.layers=4", *words)
        for number, words in enumerate(layouts)
    ]
    first = runs[0].series.steps
    for words, other in zip(layouts, runs, strict=True):
        for left, right in zip(first, other.series.steps, strict=True):
            assert right.loss == pytest.approx(left.loss, rel=1e-5), words
            assert right.grad_norm == pytest.approx(left.grad_norm, rel=1e-3), words


@pytest.mark.parametrize(("name", "precision"), [("deepseek-v2-lite", "fp32"), ("llama3.1-8b", "bf16")])
def test_the_suite_passes(python: str, tmp_path: Path, name: str, precision: str) -> None:
    asked = Asked(backend="megatron", gpu="cpu", proxy=True, precision=precision)
    jobs = suite.plan(name, tmp_path, (), asked)
    verdicts = suite.judge(jobs, suite.run(jobs, lambda job: train(python, job)))
    assert [verdict for verdict in verdicts if not verdict.passed] == []
