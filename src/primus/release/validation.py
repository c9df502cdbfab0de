"""Run the validation suite in an image, a container per job, and keep the evidence."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus.errors import InputError
from primus.images.roots import root_of_image

if TYPE_CHECKING:
    from primus.gates.model import GateReport
    from primus.images.project import Project
    from primus.training.checks import Verdict
    from primus.training.job import Job, JobResult

__all__ = ["outcome_text", "validate"]

_INSIDE = Path("/out")
# A proxy trains in well under a minute; what takes longer than this hangs, and hangs must fail (exit code 124).
_JOB_SECONDS = 900


def validate(
    project: Project, target: str, *, recipe: str | None, output: Path, engine: str, quiet: bool
) -> tuple[dict[str, Any], Path]:
    """Train ``recipe`` in the image of ``target``; the record, and the folder it lies in.

    The recipe is resolved here and again in the image; a difference between the two fails the record.
    """
    from primus.gates.check import check_image
    from primus.images.display import choose_progress
    from primus.report.html import page
    from primus.sandbox.engines import choose
    from primus.training import record as records
    from primus.training import suite

    # The same folder that the image's recipes layer is made from, wherever this code is installed.
    os.environ["PRIMUS_RECIPES"] = str(project.root / "recipes")
    name = recipe or _default_recipe(project, target)
    runner = choose(engine)
    root = root_of_image(project.store, project.work / "unpacked", target, ref=project.ref(target))
    folder = output / target / Path(name).stem
    jobs = suite.plan(name, _INSIDE)
    folder.mkdir(parents=True, exist_ok=True)

    def run_job(job: Job) -> JobResult:
        from primus.sandbox.model import Command, Mount
        from primus.training.job import JobResult

        here = folder / job.output.relative_to(_INSIDE)
        _clear(here)
        if not quiet:
            _say(f"▸ {job.name}: primus {' '.join(job.arguments())}")
        command = Command(
            argv=("timeout", "--kill-after=20", str(_JOB_SECONDS), "primus", *job.arguments()),
            env={"PRIMUS_NO_BANNER": "1"},
            mounts=(Mount(source=folder, target=str(_INSIDE), read_only=False),),
            tty=False,
        )
        with (folder / f"{job.name}.console.txt").open("wb") as log:
            code = runner.run(root, command, stdout=log, stderr=log if quiet else None)
        return JobResult(exit_code=code, output=here)

    with choose_progress(quiet) as progress:
        gates = check_image(project, target, progress)
    outcomes = suite.run(jobs, run_job)
    state = project.store.images()[root.name]
    evidence = records.make(
        jobs,
        outcomes,
        [*suite.judge(jobs, outcomes), *map(_gate_verdict, gates.reports)],
        target=target,
        image={"ref": root.name, "manifest": state["digest"], "content": _content(root.config_bytes)},
        gpu="none",
        made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        extra={"engine": runner.name, "gates": gates.as_json(), "not_run": _not_run(project, target)},
    )
    records.write(evidence, folder / "record.json")
    (folder / "report.html").write_text(page(evidence), encoding="utf-8")
    return evidence, folder


def _gate_verdict(report: GateReport) -> Verdict:
    """A gate as a verdict among the others: an image that fails one does not pass, however well it trains."""
    from primus.training.checks import Verdict

    errors = [f for f in report.findings if f.severity == "error"]
    more = f"; {errors[0].path}: {errors[0].message}" if errors else ""
    return Verdict(name=f"gate {report.gate}", passed=report.passed, reason=report.summary + more)


def _not_run(project: Project, target: str) -> list[str]:
    """What this record does not speak for, in sentences: jobs run on the CPU whatever the image is made for."""
    arch = project.arch(target)
    return [f"the GPU part ({arch}): the jobs ran on the CPU; nothing here is a pass for the GPU"] if arch else []


def _default_recipe(project: Project, target: str) -> str:
    recipes = project.target(target).recipes
    if not recipes:
        raise InputError(
            f"target {target} names no recipe", where=project.target_place(target), hint="primus validate --recipe NAME"
        )
    return recipes[0]


def _content(config: bytes) -> str:
    from primus.images.canonical import digest_of

    return digest_of(config)


def _clear(folder: Path) -> None:
    """Remove what an earlier validation left, so that none of it can be taken for this one's."""
    import shutil

    if folder.exists():
        shutil.rmtree(folder)


def _say(text: str) -> None:
    import sys

    print(text, file=sys.stderr, flush=True)


def outcome_text(record: dict[str, Any], folder: Path) -> str:
    """Verdicts and the loss in a few lines."""
    lines = []
    jobs: dict[str, list[str]] = {job["name"]: [] for job in record["jobs"]}
    for verdict in record["verdicts"]:
        job, colon, name = verdict["name"].partition(": ")
        if verdict["passed"] and colon and job in jobs:
            jobs[job].append(name)
        else:
            lines.append(f"  {'✓' if verdict['passed'] else '✗'} {verdict['name']}: {verdict['reason']}")
    lines = [*(f"  ✓ {job}: {', '.join(names)}" for job, names in jobs.items() if names), *lines]
    lines += [f"  – not run: {sentence}" for sentence in record.get("not_run", ())]
    losses = [row["loss"] for row in record["jobs"][0].get("series", [])]
    if losses:
        lines.append(f"  loss {losses[0]:.4f} → {losses[-1]:.4f} over {len(losses)} steps  {_spark(losses)}")
    failed = sum(not v["passed"] for v in record["verdicts"])
    lines.append(
        f"{'FAILED' if not record['passed'] else 'passed'}: {len(record['verdicts']) - failed} checks passed, "
        f"{failed} failed"
    )
    lines.append(f"  → {os.path.relpath(folder / 'report.html')}")
    return "\n".join(lines)


def _spark(values: list[float]) -> str:
    """The curve in one line of text."""
    low, high = min(values), max(values)
    blocks = "▁▂▃▄▅▆▇█"
    step = max(1, len(values) // 40)
    return "".join(blocks[round((v - low) / (high - low or 1) * 7)] for v in values[::step])
