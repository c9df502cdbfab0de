"""Real jobs that fail: the user is told the first cause, once; what was not judged is skipped; an interrupt is none."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from training_kit import ROOT, train

from primus.recipes.resolve import resolve
from primus.recipes.setting import Asked
from primus.training import outcome
from primus.training.job import Job, JobResult
from project_kit import Kit

pytestmark = pytest.mark.integration


def proxy(output: Path, *words: str, backend: str = "fsdp", resume_from: Path | None = None) -> Job:
    recipe = resolve("llama3.1-8b", ["steps=4", *words], Asked(backend=backend, gpu="cpu", proxy=True))
    return Job(name="job", recipe=recipe, output=output, resume_from=resume_from)


@pytest.fixture
def bad_corpus(tmp_path: Path) -> Path:
    """One whose fault lies where no sample of it looks."""
    path = tmp_path / "corpus.jsonl"
    good, bad = '{"text": "some words"}\n' * 200, '{"text": 7}\n'
    path.write_text(good + bad + '{"text": "some words"}\n' * 4000)
    return path


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("loop_out_of_memory", "rank 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. (a"),
        ("loop_killed", "rank 1: ended by signal 9 (SIGKILL) (the kernel does this when memory runs out"),
        ("import_error", "ModuleNotFoundError: No module named 'fast_kernels'"),
    ],
)  # fmt: skip
def test_the_first_cause_is_told(python: list[str], tmp_path: Path, fault: str, told: str) -> None:
    job = proxy(tmp_path / "job")
    left = outcome.read(job, train(python, job, fault))
    first, *others = outcome.basic_verdicts(left)
    assert first.reason.startswith(told)
    assert all(verdict.skipped for verdict in others), others


# The ranks import for some seconds in silence, more on a busy machine.
@pytest.mark.slow
def test_a_hung_rank_is_named_and_every_rank_leaves_its_stack(python: list[str], tmp_path: Path) -> None:
    job = proxy(tmp_path / "job")
    ended = subprocess.run(
        [*python, "-m", "primus.cli.main", *job.arguments(), "--stall-timeout", "30"], check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "PRIMUS_FAULT": "loop_hangs"}, capture_output=True,
        timeout=120,
    )  # fmt: skip
    assert ended.returncode == 1
    left = outcome.read(job, JobResult(exit_code=1, output=job.output))
    assert re.match(r"rank 1: hung: no progress for 30 s; it is in hanging \(sitecustomize.py:\d+\)", left.cause), left
    log = (job.output / "log.txt").read_text()
    assert re.search(r"^\[rank0\]: .*distributed_c10d.py", log, re.MULTILINE), log
    assert re.search(r"^\[rank1\]: .*sitecustomize.py", log, re.MULTILINE), log


# Megatron reads by the same code as our own loop.
@pytest.mark.parametrize("backend", ["torchtitan", "fsdp", pytest.param("megatron", marks=pytest.mark.slow)])
def test_a_document_that_cannot_be_read_is_the_cause(
    python: list[str], tmp_path: Path, bad_corpus: Path, backend: str
) -> None:
    job = proxy(tmp_path / "job", f"assets.corpus={bad_corpus}", backend=backend)
    left = outcome.read(job, train(python, job))
    # Both ranks of torchtitan tokenize on their own, and either may meet the document first.
    assert re.match(rf"rank [01]: {re.escape(str(bad_corpus))}:201: expected text or chat messages", left.cause), (
        left.cause
    )


@pytest.mark.parametrize("backend", ["torchtitan", "fsdp", "megatron"])
def test_a_run_goes_on_from_its_own_checkpoint_alone(python: list[str], tmp_path: Path, backend: str) -> None:
    base = proxy(tmp_path / "base", "checkpoint=2", backend=backend)
    whole = outcome.read(base, train(python, base))
    kept = base.output / "checkpoint" / "step-2"
    again = proxy(tmp_path / "again", backend=backend, resume_from=kept)
    assert outcome.read(again, train(python, again)).series.losses == whole.series.losses[2:]
    other = proxy(tmp_path / "other", "model.rope_theta=7.0", backend=backend, resume_from=kept)
    refused = subprocess.run(
        [*python, "-m", "primus.cli.main", *other.arguments()], env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "model.rope_theta was 500000" in refused.stderr
    largest = max(kept.glob("*.distcp"), key=lambda file: file.stat().st_size)
    largest.write_bytes(bytes(byte ^ 255 for byte in largest.read_bytes()))
    damaged = proxy(tmp_path / "damaged", backend=backend, resume_from=kept)
    assert f"{kept}: the checkpoint cannot be read" in outcome.read(damaged, train(python, damaged)).cause


def test_an_interrupted_validation_leaves_no_record(cpu_image: Kit, tmp_path: Path) -> None:
    command = cpu_image.command("validate", "cpu", "--no-build", "--suite", "quick", "--output", str(tmp_path))
    command += ["--recipe", "llama3-proxy", "--again"]
    process = subprocess.Popen(
        command, cwd=cpu_image.root, env=cpu_image.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 300
    while not list(tmp_path.rglob("log.txt")) and time.monotonic() < until and process.poll() is None:
        time.sleep(0.2)
    # As a terminal does it: to every process of the group.
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "FAILED" not in said
    assert list(tmp_path.rglob("record.json")) == []
