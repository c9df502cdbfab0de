"""The validation suite: its jobs, the verdicts on their results, and the record of both.

There are three levels. ``quick`` runs the recipe once. ``standard`` repeats it, resumes it and
splits its batch. ``full`` adds another layout of the ranks and every other precision of the recipe.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from primus_images.errors import InputError
from primus_images.recipes.choose import CPU, computes
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.judge import checks, proof, reference
from primus_images.training.judge.checks import Verdict
from primus_images.training.run import metrics, outcome
from primus_images.training.run.job import Job
from primus_images.training.run.logs import Series
from primus_images.training.run.outcome import Outcome

LEVELS = ("quick", "standard", "full")


# Increase this when a check or the plan changes its meaning, because records of another suite prove
# something else.
FORMAT = 6
RECORD_FORMAT = 1
_PRECISION_JOB = "precision-"
_NORM = "base: reference gradient norm"
_STEPS = {"base: reference data", "base: reference loss", "base: reference update"}


def plan(
    recipe: str,
    root: Path,
    overrides: Sequence[str] = (),
    choices: Choices | None = None,
    level: str = "standard",
    among: Path | None = None,
    wrap: tuple[str, ...] = (),
) -> tuple[Job, ...]:
    """Return the jobs in the order to run them, each with its own folder below ``root``; ``among``
    has the recipes. ``wrap`` is that of each job.

    ``base`` also saves the checkpoint for ``resume``, and is the side of ``accumulation`` with one
    micro-batch.
    """
    whole = resolve(recipe, overrides, choices, among=among)
    judged = proof.unjudged(whole) is None
    if level == "quick":
        return (Job(name="base", recipe=whole, output=root / "base", judged=judged, wrap=wrap),)
    middle = whole.get("validation.resume_at", int)
    if middle >= whole.steps:
        raise InputError(
            f"validation.resume_at: {middle} leaves no step of {whole.steps} to resume",
            where=whole.settings["validation.resume_at"].origin,
        )

    def job(name: str, settings: Mapping[str, int], choices: Choices = whole.choices) -> Job:
        words = [f"{what}={value}" for what, value in settings.items()]
        changed = resolve(recipe, whole.overrides, choices, words, among)
        return Job(name=name, recipe=changed, output=root / name, wrap=wrap)

    base = replace(job("base", {"checkpoint": middle}), judged=judged)
    resumed = replace(job("resume", {}), resume_from=base.output / "checkpoint" / f"step-{middle}")
    part = whole.local_batch // whole.get("validation.accumulation", int)
    split = job(
        "accumulation", {"local_batch": part, "global_batch": whole.global_batch, "steps": 2}
    )
    jobs = [base, job("repeat", {}), resumed, split]
    if level == "full":
        if _splits_in_two(whole):
            batch = {
                "local_batch": whole.global_batch,
                "global_batch": whole.global_batch,
                "steps": 2,
            }
            if whole.degree("ep") > 1:
                # One rank has all experts; two ranks then differ only in that they share each
                # layer.
                batch["ep"] = 1
            single = job("one-rank", batch | {"ranks": 1, "checkpoint": 1})
            # From the same weights, because two ranks may draw other ones from a seed than one.
            split = replace(
                job("tensor-parallel", batch | {"ranks": 2, "tp": 2}),
                resume_from=single.output / "checkpoint" / "step-1"
                if whole.knows.resharding
                else None,
            )
            jobs += [single, split]
        jobs += [
            job(_PRECISION_JOB + precision, {}, replace(whole.choices, precision=precision))
            for precision in whole.precisions
            if precision != whole.precision and computes(whole.gpu, precision, whole.backend)
        ]
    return tuple(jobs)


def _splits_in_two(recipe: Recipe) -> bool:
    if recipe.knows.sharded_precision and recipe.precision != "fp32":
        return False
    model = recipe.architecture
    if model.mla.kv_lora_rank and not recipe.knows.latent_tp:
        return False
    sizes = (model.heads, model.kv_heads, model.vocab_size, model.ffn_size, model.hidden_size)
    return (
        "tp" in recipe.knows.degrees
        and recipe.data_parallel == recipe.world_size
        and not any(s % 2 for s in sizes)
    )


def recipe_of(jobs: Sequence[Job]) -> Recipe:
    """Return the recipe as the caller requested it: that of the job without changes by the suite."""
    return jobs[1 if len(jobs) > 1 else 0].recipe


def run(jobs: Sequence[Job], run_job: Callable[[Job], Outcome]) -> dict[str, Outcome]:
    """Run the jobs in order with ``run_job``. If the first fails, no other is run."""
    outcomes: dict[str, Outcome] = {}
    for job in jobs:
        outcomes[job.name] = run_job(job)
        if job is jobs[0] and outcomes[job.name].exit_code != 0:
            break
    return outcomes


def judge(jobs: Sequence[Job], outcomes: Mapping[str, Outcome]) -> tuple[Verdict, ...]:
    """Return every verdict of the suite. Those of one job begin with its name; those without
    evidence are skipped.
    """
    verdicts: list[Verdict] = []
    for job in jobs:
        absent = checks.skipped(
            Verdict("exit code", False, ""), f"was not run, because {jobs[0].name} failed"
        )
        if job.name in outcomes:
            of_job = outcome.basic_verdicts(outcomes[job.name])
        else:
            of_job = (absent,)
        verdicts += [replace(verdict, name=f"{job.name}: {verdict.name}") for verdict in of_job]
    passed = {verdict.name for verdict in verdicts if verdict.passed}
    ended = {
        job.name: outcomes.get(job.name) or Outcome(job=job, exit_code=1, series=Series())
        for job in jobs
    }
    for names, verdict in _comparisons(jobs, ended, passed):
        lacking = next((name for name in names if ended[name].exit_code != 0), "")
        why = f"{lacking} {'failed' if lacking in outcomes else 'was not run'}"
        verdicts.append(checks.skipped(verdict, why) if lacking else verdict)
    return (*verdicts, _same_recipe(jobs, outcomes))


def _comparisons(
    jobs: Sequence[Job], ended: Mapping[str, Outcome], passed: Set[str]
) -> Iterator[tuple[tuple[str, ...], Verdict]]:
    recipe = recipe_of(jobs)
    planned = {job.name: job for job in jobs}
    series = {name: run.series for name, run in ended.items()}
    vocabulary = recipe.architecture.vocab_size
    base = series["base"]

    def limit(key: str) -> float:
        return recipe.get(f"validation.{key}", float)

    if vocabulary and recipe.find(f"{recipe.backend}.weights", "random") == "random":
        yield ("base",), checks.loss_plausible(base, vocabulary, limit("first_loss_tolerance"))
    yield ("base",), checks.loss_falls(base, limit("loss_drop"), repeated=passed >= _STEPS)
    yield (
        ("base",),
        checks.grad_norm_steady(base, limit("grad_norm_jump"), repeated=_NORM in passed),
    )
    typed = (
        key for key, setting in recipe.settings.items() if setting.origin.startswith("command line")
    )
    resized = any(key.startswith("model.") for key in typed)
    if recipe.gpu != CPU and "validation.throughput" in recipe.settings and not resized:
        speed = ended["base"].summary.tokens_per_second
        yield (
            ("base",),
            checks.throughput(speed, limit("throughput"), limit("throughput_tolerance")),
        )
    if "repeat" in planned:
        tolerance = limit("repeat_tolerance")
        advice = ""
        if not recipe.deterministic:
            advice = (
                "its kernels may add up in any order, "
                f"{recipe.knows.keys['deterministic']}=true forbids it"
            )
        again = checks.same_steps(
            "same result again", base, series["repeat"], tolerance, advice=advice
        )
        yield ("base", "repeat"), again
        yield ("base", "repeat"), _same_weights(ended["base"], ended["repeat"], tolerance)
        resumed = series["resume"]
        first = planned["resume"].first_step
        yield (
            ("base", "resume"),
            checks.same_steps("resume", base, resumed, limit("resume_tolerance"), first=first),
        )
        split = series["accumulation"]
        tolerance = limit("accumulation_tolerance")
        yield (
            ("base", "accumulation"),
            checks.same_steps("accumulation", base, split, tolerance, last=1),
        )
    if "tensor-parallel" in planned:
        names = ("one-rank", "tensor-parallel")
        at = planned[names[1]].first_step
        tolerance = limit("layout_tolerance")
        yield (
            names,
            checks.same_steps(
                "layout", series[names[0]], series[names[1]], tolerance, first=at, last=at
            ),
        )
    for name in sorted(planned):
        if name.startswith(_PRECISION_JOB):
            words = (recipe.precision, name.removeprefix(_PRECISION_JOB))
            yield (
                ("base", name),
                checks.same_loss(words, base, series[name], limit("precision_tolerance")),
            )


def _same_weights(base: Outcome, repeat: Outcome, tolerance: float) -> Verdict:
    first = base.facts.get("weights_sha256")
    second = repeat.facts.get("weights_sha256")
    name = "same weights again"
    limit = "reported, not judged"
    if tolerance == 0:
        limit = "equal"
    if first is None or second is None:
        return Verdict(name, False, "a run ended without the digest of its weights", limit=limit)
    reason = "final weights differ"
    if first == second:
        reason = "final weights of both runs, all ranks, are equal"
    measured = f"{first[:12]} and {second[:12]}"
    return Verdict(name, first == second or tolerance > 0, reason, measured=measured, limit=limit)


def _same_recipe(jobs: Sequence[Job], outcomes: Mapping[str, Outcome]) -> Verdict:
    digests = {
        job.name: outcomes[job.name].recipe_sha256 if job.name in outcomes else None for job in jobs
    }
    wrong = [job.name for job in jobs if digests[job.name] != job.recipe.digest]
    reason = "the runs resolved the planned recipe"
    if wrong:
        reason = f"another recipe was run in: {', '.join(wrong)}"
    verdict = Verdict(
        "recipe",
        not wrong,
        reason,
        measured=f"{len(jobs) - len(wrong)} of {len(jobs)}",
        limit="all",
    )
    if any(digests[name] is not None for name in wrong):
        return verdict
    return checks.skipped(verdict, f"nothing was run in: {', '.join(wrong)}")


def digest(recipe: Recipe, jobs: Sequence[Job]) -> str:
    """Return the digest of the suite of ``jobs``."""
    return digest_of_suite(FORMAT, [job.name for job in jobs], recipe.section("validation"))


def digest_of_suite(number: int, jobs: Sequence[str], limits: Mapping[str, Any]) -> str:
    """Return the digest of a suite from its format, the names of its jobs and the recipe's
    validation section.
    """
    content = {"format": number, "jobs": list(jobs), "validation": limits}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def record(
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
    """Return the record of one validation. ``image`` identifies the bytes that ran; ``time`` is in
    ISO 8601.

    ``passed`` is true only if there are verdicts, all of them passed, and every planned job has a
    series of steps.
    """
    recipe = recipe_of(jobs)
    base = outcomes.get(jobs[0].name)
    # Another reference proves something else.
    code = sorted(
        path
        for path in Path(reference.__file__).parent.iterdir()
        if path.suffix in (".py", ".yaml")
    )
    version = hashlib.sha256(b"".join(path.read_bytes() for path in code)).hexdigest()[:16]
    ran = all(job.name in outcomes and outcomes[job.name].series.steps for job in jobs)
    return {
        "format": RECORD_FORMAT,
        "made": time,
        "passed": bool(verdicts) and ran and all(verdict.passed for verdict in verdicts),
        "target": target,
        "image": dict(image),
        "gpu": gpu,
        "recipe": {
            "name": recipe.name,
            "backend": recipe.backend,
            "mode": recipe.mode,
            "precision": recipe.precision,
            "gpu": recipe.gpu,
            "description": recipe.find("description", ""),
            "sha256": recipe.digest,
            "ranks": recipe.world_size,
            "assets": dict(recipe.asset_digests),
            "settings": {key: setting.value for key, setting in recipe.settings.items()},
        },
        **({"wrap": shlex.join(jobs[0].wrap)} if jobs[0].wrap else {}),
        "suite": {"sha256": digest(recipe, jobs), "format": FORMAT, "reference": version},
        "versions": dict(base.facts.get("versions", {})) if base else {},
        "facts": dict(base.facts) if base else {},
        "measurements": asdict(base.summary) if base else {},
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "jobs": [_job_entry(job, outcomes.get(job.name)) for job in jobs],
        **(extra or {}),
    }


def _job_entry(job: Job, outcome: Outcome | None) -> dict[str, Any]:
    content: dict[str, Any] = {
        "name": job.name,
        "command": ["primus", *job.arguments()],
        "ran": outcome is not None,
    }
    if outcome is None:
        return content
    return {
        **content,
        "argv": list(outcome.run.argv),
        "exit_code": outcome.exit_code,
        **({"cause": outcome.cause} if outcome.cause else {}),
        "seconds": outcome.run.seconds,
        "exact": outcome.series.exact,
        "series": metrics.rows(outcome.series, job.recipe, outcome.facts),
    }
