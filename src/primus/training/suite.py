"""The validation suite: which jobs it runs, and the verdicts over what they left. Pure, but for ``run``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from primus.errors import InputError
from primus.recipes.model import Asked, Recipe
from primus.recipes.resolve import resolve
from primus.training import checks, outcome
from primus.training.checks import Verdict
from primus.training.job import Job, JobResult
from primus.training.logs import Series
from primus.training.outcome import Outcome

__all__ = ["digest", "judge", "plan", "recipe_of", "run"]

# Raised when a rule or the plan changes its meaning: a record of another suite proves something else.
FORMAT = 1


def plan(recipe: str, root: Path, overrides: Sequence[str] = (), asked: Asked | None = None) -> tuple[Job, ...]:
    """The jobs, in the order to run them; each has a folder of its own below ``root``.

    Four starts serve all comparisons: ``base`` also leaves the checkpoint for ``resume`` and is the
    one-micro-batch side of ``accumulation``.
    """
    whole = resolve(recipe, overrides, asked)
    middle = whole.get("validation.resume_at", int)
    if middle >= whole.steps:
        raise InputError(
            f"validation.resume_at: {middle} leaves no step of {whole.steps} to resume",
            where=whole.settings["validation.resume_at"].origin,
        )
    knows = whole.knows

    def job(name: str, **settings: int) -> Job:
        words = [f"{knows.key(what)}={value}" for what, value in settings.items()]
        again = resolve(recipe, [*overrides, *words], whole.asked)
        return Job(name=name, recipe=again, output=root / name)

    base = job("base", checkpoint=middle)
    repeat = job("repeat")
    resumed = replace(job("resume"), resume_from=base.output / "checkpoint" / f"step-{middle}")
    split = job(
        "accumulation",
        local_batch=whole.local_batch // whole.get("validation.accumulation", int),
        global_batch=whole.global_batch,
        steps=2,
    )
    return base, repeat, resumed, split


def recipe_of(jobs: Sequence[Job]) -> Recipe:
    """The recipe as the caller asked for it: that of the one job the suite adds nothing to."""
    return next(job.recipe for job in jobs if job.name == "repeat")


def run(jobs: Sequence[Job], run_job: Callable[[Job], JobResult]) -> dict[str, Outcome]:
    """Run the jobs in order through ``run_job`` and read what each left.

    When the first job fails the others are not run: they compare with it. Their absence fails their rules.
    """
    outcomes: dict[str, Outcome] = {}
    for job in jobs:
        left = outcome.read(job, run_job(job))
        outcomes[job.name] = left
        if job is jobs[0] and left.exit_code != 0:
            break
    return outcomes


def judge(jobs: Sequence[Job], outcomes: Mapping[str, Outcome]) -> tuple[Verdict, ...]:
    """Every verdict of the suite; the names of those on one job begin with the job's name.

    A job that was not run fails the rules it was planned for.
    """
    verdicts: list[Verdict] = []
    for job in jobs:
        left = outcomes.get(job.name)
        if left is None:
            verdicts.append(Verdict(name=f"{job.name}: exit code", passed=False, reason="was not run"))
            continue
        verdicts += [replace(verdict, name=f"{job.name}: {verdict.name}") for verdict in outcome.basic_verdicts(left)]
    nothing = Outcome(job=jobs[0], exit_code=1, series=Series())
    base, repeat, resumed, split = (
        outcomes.get(name, nothing) for name in ("base", "repeat", "resume", "accumulation")
    )
    recipe = recipe_of(jobs)

    def limit(key: str) -> float:
        return recipe.get(f"validation.{key}", float)

    vocabulary = recipe.architecture.vocab_size
    verdicts += [
        checks.loss_plausible(base.series, vocabulary, limit("first_loss_tolerance")),
        checks.loss_falls(base.series, limit("loss_drop")),
        checks.grad_norm_steady(base.series, limit("grad_norm_jump")),
        checks.reproducible(base.series, repeat.series, limit("repeat_tolerance")),
        _same_weights(base, repeat, limit("repeat_tolerance")),
        checks.resume(base.series, resumed.series, _resumed_at(jobs), limit("resume_tolerance")),
        checks.accumulation(base.series, split.series, limit("accumulation_tolerance")),
        _same_recipe(jobs, outcomes),
    ]
    return tuple(verdicts)


def _resumed_at(jobs: Sequence[Job]) -> int:
    return next(job.first_step for job in jobs if job.name == "resume")


def _same_weights(base: Outcome, repeat: Outcome, tolerance: float) -> Verdict:
    first, second = base.facts.get("weights_sha256"), repeat.facts.get("weights_sha256")
    name, limit = "same weights again", "equal" if tolerance == 0 else "told, not judged"
    if first is None or second is None:
        return Verdict(name=name, passed=False, reason="a run ended without the digest of its weights", limit=limit)
    equal = first == second
    return Verdict(
        name=name,
        passed=equal or tolerance > 0,
        reason="final weights of both runs, all ranks, are equal" if equal else "final weights differ",
        measured=f"{first[:12]} and {second[:12]}",
        limit=limit,
    )


def _same_recipe(jobs: Sequence[Job], outcomes: Mapping[str, Outcome]) -> Verdict:
    """The recipe the runs resolved (inside the image) is the one planned here, byte for byte."""
    wrong = [
        job.name for job in jobs if job.name not in outcomes or outcomes[job.name].recipe_sha256 != job.recipe.digest
    ]
    return Verdict(
        name="recipe",
        passed=not wrong,
        reason=f"another recipe was run in: {', '.join(wrong)}" if wrong else "the runs resolved the planned recipe",
        measured=f"{len(jobs) - len(wrong)} of {len(jobs)}",
        limit="all",
    )


def digest(recipe: Recipe) -> str:
    """sha256 that names the suite: its format and the recipe's validation section."""
    content = {"format": FORMAT, "validation": recipe.section("validation")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
