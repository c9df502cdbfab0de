"""Real two-rank runs, broken on purpose. Each fault must be caught by the check meant for it, and
by no other.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from training_kit import Python, failing, train

from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.judge import checks
from primus_images.training.judge.checks import Steps, Verdict
from primus_images.training.run import outcome
from primus_images.training.run.job import Job
from primus_images.training.run.outcome import Outcome

pytestmark = pytest.mark.integration

INSIDE = Path(__file__).with_name("inside")

STEPS = 10
# The step at which the healthy run saves the checkpoint that a resumed run starts from.
KEPT = 8
EVALUATED = ("eval.fraction=0.1", "eval.every=1")
BASES = {
    "fsdp": ("steps=10", "lr=0.01", "seq_len=32", f"checkpoint={KEPT}", *EVALUATED),
    "torchtitan": ("steps=10", f"checkpoint={KEPT}"),
}
# Fault of faults/sitecustomize.py → the check, and settings of the job that it breaks; --precision
# is a choice.
FAULTS = {
    "fsdp": {
        # Saving the best weights before would call the optimizer once more.
        "nan": ("finite", "steps=3", "eval.every=3"),
        "no_updates": ("loss falls",),
        "loop_lost_micro_batch": ("accumulation", "steps=1", "training.micro_batch_size=2"),
        "no_fp8": ("precision", "steps=1", "--precision=fp8"),
        "loop_last_batch_not_evaluated": ("same result again",),
        "loop_smooths_evaluations": ("resume",),
    },
    "torchtitan": {"forgets_its_place": ("resume",), "other_seed": ("same result again",)},
}
# Unit tests break each check, and test_silent_faults.py breaks each backend.
QUICK = ("nan", "loop_lost_micro_batch", "no_fp8", "loop_smooths_evaluations")
CASES = [
    pytest.param(
        backend,
        fault,
        *what[:1],
        what[1:],
        id=fault,
        marks=() if fault in QUICK else pytest.mark.slow,
    )
    for backend, faults in FAULTS.items()
    for fault, what in faults.items()
]


def job_of(backend: str, output: Path, *words: str, resume_from: Path | None = None) -> Job:
    precision = next(
        (word.removeprefix("--precision=") for word in words if word.startswith("--")), "fp32"
    )
    choices = Choices(backend=backend, gpu="cpu", proxy=True, precision=precision)
    settings = {
        word.partition("=")[0]: word
        for word in (*BASES[backend], *words)
        if not word.startswith("--")
    }
    recipe = resolve("llama3.1-8b", [*settings.values()], choices)
    return Job(name="job", recipe=recipe, output=output, resume_from=resume_from)


def judged(run: Outcome, healthy: Outcome, check: str = "") -> tuple[Verdict, ...]:
    """The verdicts on any run, those that its length allows, and ``check`` if it compares runs."""
    recipe, verdicts = run.job.recipe, list(outcome.basic_verdicts(run))
    if run.job.first_step == 1 and recipe.steps >= STEPS:
        verdicts.append(checks.loss_falls(run.series, recipe.get("validation.loss_drop", float)))
    if check == "accumulation":
        tolerance = recipe.get("validation.accumulation_tolerance", float)
        verdicts.append(
            checks.same_steps(check, healthy.series, run.series, tolerance, Steps(last=1))
        )
    elif check == "resume":
        tolerance = recipe.get("validation.resume_tolerance", float)
        verdicts.append(
            checks.same_steps(check, healthy.series, run.series, tolerance, Steps(KEPT + 1))
        )
    elif check == "same result again":
        tolerance = recipe.get("validation.repeat_tolerance", float)
        verdicts.append(checks.same_steps(check, healthy.series, run.series, tolerance))
    return tuple(verdicts)


@pytest.fixture(scope="module")
def healthy(python: Python, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Backend → its run without a fault, made when first asked for."""

    @cache
    def of(backend: str) -> Outcome:
        job = job_of(backend, tmp_path_factory.mktemp(backend) / "base")
        return train(python, job)

    return of


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("torchtitan", marks=pytest.mark.slow)])
def test_the_healthy_run_passes(healthy: Callable[[str], Outcome], backend: str) -> None:
    base = healthy(backend)
    assert failing(judged(base, base)) == []
    assert base.series.exact


@pytest.mark.parametrize(("backend", "fault", "check", "words"), CASES)
def test_a_fault_is_caught_by_the_check_meant_for_it(
    python: Python,
    healthy: Callable[[str], Outcome],
    tmp_path: Path,
    backend: str,
    fault: str,
    check: str,
    words: tuple[str, ...],
) -> None:
    base = healthy(backend)
    checkpoint = base.job.output / "checkpoint" / f"step-{KEPT}" if check == "resume" else None
    job = job_of(backend, tmp_path / "broken", *words, resume_from=checkpoint)
    verdicts = judged(train(python, job, fault), base, check)
    assert failing(verdicts) == [check], verdicts
    if fault == "nan":
        assert any(verdict.reason.startswith("step 3: loss nan") for verdict in verdicts)


def test_a_wrapper_starts_every_rank(python: Python, tmp_path: Path) -> None:
    # What it is given is not run: each rank would import PyTorch anew. The first that ends would
    # stop the other.
    script = 'echo "$RANK $@" >> "$0"; until [ $(wc -l < "$0") = 2 ]; do sleep 0.05; done; exit 3'
    wrap = ("sh", "-c", script, str(tmp_path / "started"))
    run = train(python, replace(job_of("fsdp", tmp_path / "wrapped", "steps=1"), wrap=wrap))
    assert "exit code 3" in run.cause or "exitcode  : 3" in (run.job.output / "log.txt").read_text()
    ranks = [line.split() for line in sorted((tmp_path / "started").read_text().splitlines())]
    assert [words[0] for words in ranks] == ["0", "1"]
    assert all("primus_images.training.backends.fsdp.entry" in words for words in ranks)
    assert " ".join(wrap) in " ".join(run.run.argv)


@pytest.mark.parametrize(
    ("backend", "first"), [("fsdp", 2), pytest.param("torchtitan", 1, marks=pytest.mark.slow)]
)
def test_a_rank_that_computes_wrong_is_named_and_a_verified_run_is_the_same_run(
    python: Python, tmp_path: Path, backend: str, first: int
) -> None:
    """The first step that a backend samples names it."""
    job = replace(job_of(backend, tmp_path / "wrong", "steps=4"), judge_every=2)
    broken = train(python, job, "wrong_kernel")
    assert broken.exit_code
    assert re.match(
        rf"rank 1: .*WrongResultError: step {first}: the CPU of .* it computes wrong", broken.cause
    )
    runs = [
        train(
            python,
            replace(
                job_of(backend, tmp_path / f"verified-{n}", "steps=4", "deterministic=true"),
                judge_every=n,
            ),
        )
        for n in (0, 2)
    ]
    assert failing(outcome.basic_verdicts(runs[1])) == []
    assert runs[0].facts["weights_sha256"] == runs[1].facts["weights_sha256"]


def test_planted_wrong_kernels_are_found_and_healthy_ones_are_not(python: Python) -> None:
    ended = python.run(str(INSIDE / "judge_every.py"))
    assert ended.stdout == '{"planted": 20, "healthy": 0}\n', ended.stderr
