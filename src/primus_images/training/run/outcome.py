"""How a run ended: its result, which other programs read, and all that its folder shows."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from primus_images.errors import InputError, PrimusError
from primus_images.files import json_if_readable, write_file
from primus_images.schema import build, read_json
from primus_images.training.judge import checks, proof
from primus_images.training.judge.checks import Verdict
from primus_images.training.run import failure, logs, metrics
from primus_images.training.run.job import Job
from primus_images.training.run.logs import Series
from primus_images.training.run.metrics import Summary
from primus_images.training.run.ranks import expected_facts

RESULT_FILE = "result.json"
# In place of it: the signal by which somebody ended a run.
STOPPED = "stopped.json"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended: the launcher's exit code, command and wall time, verdicts and figures.

    ``host_memory_gib`` is the largest resident memory of one process. ``optimizations_off`` is name
    → reason. ``cause`` is the first cause of a failure. ``refused`` is the reason why no rank was
    started; ``exit_code`` is then that of the command. ``passed``, ``verdicts`` and ``summary`` are
    missing until the run's checks have been applied.
    """

    exit_code: int
    seconds: float = 0.0
    argv: tuple[str, ...] = ()
    host_memory_gib: float | None = None
    optimizations: tuple[str, ...] = ()
    optimizations_off: Mapping[str, str] = field(default_factory=dict)
    passed: bool | None = None
    cause: str = ""
    refused: str = ""
    verdicts: tuple[Verdict, ...] = ()
    summary: Summary | None = None


def write_result(result: RunResult, folder: Path) -> None:
    """Write the result to the folder of the run, atomically."""
    write_file(
        folder / RESULT_FILE, json.dumps(asdict(result), indent=2, ensure_ascii=False) + "\n"
    )


def write_stop(name: str, folder: Path) -> None:
    """Record the signal that ended the run in ``folder``, which has no result."""
    with suppress(OSError):  # the signal ends the command in any case
        write_file(folder / STOPPED, json.dumps({"signal": name}) + "\n")


def read_result(folder: Path) -> RunResult:
    """Read the result of the run in ``folder``. Raises InputError if it is damaged, or OSError."""
    return build(RunResult, read_json(folder / RESULT_FILE))


def write_refusal(error: PrimusError, folder: Path) -> None:
    """Record why a run was not started, if its ``folder`` exists and contains no run."""
    if not folder.is_dir() or (folder / "log.txt").exists() or (folder / "checkpoint").exists():
        return
    reason = str(error).partition("\n")[0]
    with suppress(OSError):  # the error itself is printed in any case
        write_result(RunResult(exit_code=error.exit_code, passed=False, refused=reason), folder)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything that can be judged about a finished run.

    ``exit_code`` is the launcher's or, if that was 0, shows another failure. ``run`` is the result
    that the run wrote, ``recipe_sha256`` the recipe that it resolved. The evidence of a judged run
    is in ``folder``.
    """

    job: Job
    exit_code: int
    series: Series
    facts: Mapping[str, Any] = field(default_factory=dict)
    run: RunResult = field(default_factory=lambda: RunResult(exit_code=1))
    recipe_sha256: str | None = None
    cause: str = ""
    folder: Path = Path()

    @property
    def summary(self) -> Summary:
        """The figures of the run."""
        return metrics.summarize(self.series, self.job.recipe, self.facts)


def read(job: Job, exit_code: int, folder: Path | None = None, reason: str = "") -> Outcome:
    """Read what a finished job left. Missing or damaged files count as no evidence.

    ``exit_code`` is that of ``primus train``, ``folder`` the job's folder as this process sees it,
    and ``reason`` the reason for a failure if the folder may not contain it.
    """
    folder = folder or job.output
    try:
        run = read_result(folder)
    except (OSError, InputError):
        run = RunResult(exit_code=exit_code)
    if run.exit_code:
        exit_code = run.exit_code
    elif exit_code == 1 and run.passed is False:
        # The launcher ended with 0, and a check failed, which is in the list of verdicts.
        exit_code = 0
    return Outcome(
        job=job,
        exit_code=exit_code,
        series=logs.read_run(folder),
        facts=json_if_readable(folder / "facts.json")
        or json_if_readable(job.output / "facts.json"),
        run=run,
        recipe_sha256=json_if_readable(folder / "job.json").get("recipe", {}).get("sha256"),
        folder=folder,
        cause=reason or str(failure.cause(folder, exit_code, job.output) or ""),
    )


def basic_verdicts(outcome: Outcome) -> tuple[Verdict, ...]:
    """Return the verdicts that every run must pass.

    Of a failed job, those without evidence are skipped.
    """
    job = outcome.job
    last = job.last_step
    if "eval.patience" in job.recipe.settings:
        last = int(outcome.facts.get("last_step", last))
    verdicts = [
        checks.exit_code(outcome.exit_code, outcome.cause),
        checks.steps_logged(outcome.series, job.first_step, last),
        checks.finite(outcome.series),
        checks.precision(outcome.facts, job.recipe.get("precision", str)),
        checks.ran_as_asked(outcome.facts, expected_facts(job)),
    ]
    if outcome.exit_code == 0:
        if job.judged:
            verdicts += _proven(outcome)
        return tuple(verdicts)
    if job.judged:
        verdicts.append(checks.skipped(Verdict("reference", False, ""), "the job failed"))
    return tuple(_skipped_without_evidence(verdict, outcome) for verdict in verdicts)


def _skipped_without_evidence(verdict: Verdict, outcome: Outcome) -> Verdict:
    """Return the verdict on a failed job, skipped if the job left nothing to judge."""
    steps = outcome.series.steps
    expected = all(step.step <= outcome.job.last_step for step in steps)
    lacking = {
        "steps logged": expected and not outcome.series.problems,
        "finite": not steps,
        "precision": not outcome.facts,
        "configuration": not outcome.facts,
    }
    if not lacking.get(verdict.name):
        return verdict
    why = "the job failed before its first step"
    if steps:
        why = f"the job failed after step {steps[-1].step}"
    return checks.skipped(verdict, why)


def _proven(outcome: Outcome) -> list[Verdict]:
    recipe = outcome.job.recipe
    findings = json_if_readable(outcome.folder / "proof.json")
    arrivals = _seconds(outcome.folder / "clock.json")
    busy = _seconds(outcome.folder / "witness/seconds.json")
    own: dict[int, float] = {}
    for file in outcome.folder.glob("witness/clock-*.json"):
        for step, seconds in _seconds(file).items():
            own[step] = max(own.get(step, 0.0), seconds)
    return [
        *proof.verdicts(findings, outcome.series),
        proof.figures(outcome.facts, findings, outcome.series, recipe, outcome.run.host_memory_gib),
        proof.clock(outcome.series, arrivals, busy, own, findings.get("tokens", math.nan)),
    ]


def _seconds(file: Path) -> dict[int, float]:
    """Return step → seconds in a file; none if it cannot be read."""
    return {int(step): float(seconds) for step, seconds in json_if_readable(file).items()}
