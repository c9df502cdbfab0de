"""The evidence of a validation in one JSON file: image, recipe, measurements and verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from primus.files import write_file
from primus.recipes.recipe import Recipe
from primus.training import metrics, suite
from primus.training.checks import Verdict
from primus.training.job import Job
from primus.training.outcome import Outcome

FORMAT = 1


def make(
    jobs: Sequence[Job],
    outcomes: Mapping[str, Outcome],
    verdicts: Sequence[Verdict],
    *,
    target: str,
    image: Mapping[str, Any],
    gpu: str,
    time: str,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the record of one validation.

    ``image`` identifies the bytes that ran (``{"digest": "sha256:…"}`` and whatever else the caller knows). ``gpu``
    is the GPU's name or "none". ``time`` is the time in ISO 8601. ``passed`` is true only if there are verdicts,
    all of them passed, and every planned job has a series of steps.
    """
    recipe = suite.recipe_of(jobs)
    base = outcomes.get(jobs[0].name)
    ran = all(job.name in outcomes and outcomes[job.name].series.steps for job in jobs)
    return {
        "format": FORMAT,
        "made": time,
        "passed": bool(verdicts) and ran and all(verdict.passed for verdict in verdicts),
        "target": target,
        "image": dict(image),
        "gpu": gpu,
        "recipe": {
            "name": recipe.name,
            "description": recipe.find("description", ""),
            "sha256": recipe.digest,
            "backend": recipe.backend,
            "mode": recipe.mode,
            "precision": recipe.precision,
            "gpu": recipe.gpu,
            "ranks": recipe.world_size,
            "settings": {key: setting.value for key, setting in recipe.settings.items()},
        },
        "suite": {"sha256": suite.digest(recipe, jobs), "format": suite.FORMAT},
        "versions": dict(base.facts.get("versions", {})) if base else {},
        "facts": dict(base.facts) if base else {},
        "measurements": _measurements(recipe, base) if base else {},
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "jobs": [_job(job, outcomes.get(job.name)) for job in jobs],
        **(extra or {}),
    }


def _measurements(recipe: Recipe, outcome: Outcome) -> dict[str, Any]:
    done = metrics.work(recipe, outcome.facts)
    warmup = recipe.get("validation.warmup_steps", int)
    return asdict(metrics.summarize(outcome.series, warmup, done, outcome.slow_rank))


def _job(job: Job, outcome: Outcome | None) -> dict[str, Any]:
    content: dict[str, Any] = {
        "name": job.name,
        "command": ["primus", *job.arguments()],
        "ran": outcome is not None,
    }
    if outcome is None:
        return content
    lines = metrics.as_json_lines(outcome.series, metrics.work(job.recipe, outcome.facts)).splitlines()
    return {
        **content,
        "argv": list(outcome.argv),
        "exit_code": outcome.exit_code,
        **({"cause": outcome.cause} if outcome.cause else {}),
        "seconds": outcome.seconds,
        "exact": outcome.series.exact,
        "series": [json.loads(line) for line in lines],
    }


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write the record to ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
