"""The validation suite: its jobs, the verdicts on their results, and the record of both.

There are three levels. ``quick`` runs the recipe once. ``standard`` repeats it, resumes it, splits
its batch and passes an epoch. ``full`` adds another layout of the ranks and every other precision
of the recipe.
"""

import hashlib
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from primus_images.errors import InputError
from primus_images.recipes.choose import CPU, computes
from primus_images.recipes.faults import accumulation_faults
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import changed, resolve
from primus_images.recipes.rules import rules_of
from primus_images.recipes.schema import backend_rules
from primus_images.recipes.setting import Choices
from primus_images.training.judge import checks, proof, reference
from primus_images.training.judge.checks import EVERY_STEP, Steps, Verdict
from primus_images.training.judge.record import (
    Machine,
    Record,
    RecordedImage,
    RecordedJob,
    RecordedRecipe,
    RecordedSuite,
)
from primus_images.training.run import metrics, outcome
from primus_images.training.run.job import Job
from primus_images.training.run.logs import Series
from primus_images.training.run.outcome import Outcome

LEVELS = ("quick", "standard", "full")


# Increase this when a check or the plan changes its meaning, because records of another suite prove
# something else.
FORMAT = 7
RECORD_FORMAT = 1
_PRECISION_JOB = "precision-"
_NORM = "base: reference gradient norm"
# A small text with short and long documents; the same as answers, of which only some tokens are
# trained.
_TEXT = "assets/documents.jsonl"
_ANSWERS = "assets/answers.jsonl"
_DOCUMENTS = 40
_TOKENS = 3600
# Few enough steps for a job that only shows what follows from its batch or its text.
_SHORT = 4
_MOST_STEPS = 40
_EPOCH = "second-epoch"
_EPOCH_RESUMED = "second-epoch-resumed"
_STEPS = {"base: reference data", "base: reference loss", "base: reference update"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The recipe that a caller wants to validate.

    ``among`` is the folder of recipes, and ``wrap`` a command before the Python of each rank.
    """

    recipe: str
    overrides: Sequence[str] = ()
    choices: Choices | None = None
    among: Path | None = None
    wrap: tuple[str, ...] = ()


def plan(request: Request, root: Path, level: str = "standard") -> tuple[Job, ...]:
    """Return the jobs in the order to run them, each with its own folder below ``root``.

    ``base`` also saves the checkpoint for ``resume``, and is the side of ``accumulation`` with one
    micro-batch. What :func:`left_out` names is missing.
    """
    recipe = resolve(request.recipe, request.overrides, request.choices, among=request.among)
    planner = _Planner(request, root, recipe)
    if level == "quick":
        return (planner.base(),)
    jobs = planner.standard()
    if level == "full":
        if _splits_in_two(recipe):
            jobs += planner.layouts()
        jobs += planner.precisions()
    return tuple(jobs)


class _Planner:
    def __init__(self, request: Request, root: Path, recipe: Recipe) -> None:
        self._request = request
        self._root = root
        self._recipe = recipe

    def base(self) -> Job:
        return _judged(self._job("base", self._recipe))

    def standard(self) -> list[Job]:
        recipe = self._recipe
        repeat = self._job("repeat", self._changed({}))
        if recipe.find("eval.patience", 0):
            return [self.base(), repeat, self._split()]
        middle = recipe.get("validation.resume_at", int)
        if middle >= recipe.steps:
            raise InputError(
                f"validation.resume_at: {middle} leaves no step of {recipe.steps} to resume",
                where=recipe.settings["validation.resume_at"].origin,
            )
        saving = self._changed({"checkpoint": middle})
        base = replace(self.base(), recipe=saving)
        rest = self._job("resume", self._changed({}))
        resumed = _resumed(rest, base, middle)
        return [base, repeat, resumed, self._split(), *self._epochs()]

    def _split(self) -> Job:
        recipe = self._recipe
        micro_batches = recipe.get("validation.accumulation", int)
        for key, message, hint in accumulation_faults(recipe):
            origin = recipe.settings[key].origin
            raise InputError(f"{key}: {message}", where=origin, hint=hint)
        batch = {
            "local_batch": recipe.local_batch // micro_batches,
            "global_batch": recipe.global_batch,
        }
        changes = batch | _short(recipe, _SHORT)
        job = self._job("accumulation", self._changed(changes))
        return _judged(job)

    def _epochs(self) -> list[Job]:
        """Return a job that passes an epoch of a small text, and one that resumes in the second."""
        recipe = self._recipe
        if no_epoch(recipe):
            return []
        settings: dict[str, int | str] = {"assets.corpus": _ANSWERS}
        if rules_of(recipe).trains_every_token:
            # It trains every token.
            settings["assets.corpus"] = _TEXT
        elif _packs(recipe):
            settings[f"{recipe.backend}.packing"] = "true"
        passed = _steps_of_an_epoch(recipe)
        saved = passed + 2
        settings |= _short(recipe, passed + 4)
        saving = settings | {"checkpoint": saved}
        whole = self._job(_EPOCH, self._changed(saving))
        rest = self._job(_EPOCH_RESUMED, self._changed(settings))
        return [_judged(whole), _resumed(rest, whole, saved)]

    def layouts(self) -> list[Job]:
        recipe = self._recipe
        batch = {
            "local_batch": recipe.global_batch,
            "global_batch": recipe.global_batch,
            **_short(recipe, 2),
        }
        if recipe.degree("ep") > 1:
            # One rank has all experts; two ranks then differ only in that they share each layer.
            batch["ep"] = 1
        single = self._job("one-rank", self._changed(batch | {"ranks": 1, "checkpoint": 1}))
        shared = self._job("tensor-parallel", self._changed(batch | {"ranks": 2, "tp": 2}))
        if recipe.knows.resharding:
            # From the same weights, because two ranks may draw other ones from a seed than one.
            shared = _resumed(shared, single, 1)
        return [single, shared]

    def precisions(self) -> list[Job]:
        recipe = self._recipe
        jobs = []
        for precision in recipe.precisions:
            if precision == recipe.precision:
                continue
            if computes(recipe.gpu, precision, recipe.backend):
                choices = replace(recipe.choices, precision=precision)
                other = self._changed({}, choices)
                jobs.append(self._job(_PRECISION_JOB + precision, other))
        return jobs

    def _job(self, name: str, recipe: Recipe) -> Job:
        return Job(name=name, recipe=recipe, output=self._root / name, wrap=self._request.wrap)

    def _changed(self, settings: Mapping[str, int | str], choices: Choices | None = None) -> Recipe:
        words = [f"{key}={value}" for key, value in settings.items()]
        return changed(self._recipe, words, choices)


def _judged(job: Job) -> Job:
    """Return the job, judged if the reference can repeat it."""
    return replace(job, judged=proof.unjudged(job.recipe) is None)


def _short(recipe: Recipe, steps: int) -> dict[str, int | str]:
    """Return what a job of ``steps`` changes of ``recipe``: whatever comes only after them."""
    latest = {
        f"{recipe.backend}.{recipe.knows.warmup}": steps,
        f"{recipe.backend}.training.profile_step": 0,
        f"{recipe.backend}.training.profile_after": -1,
        "eval.every": steps,
    }
    late = {key: value for key, value in latest.items() if recipe.find(key, 0) > steps}
    return {"steps": steps, **late}


def _steps_of_an_epoch(recipe: Recipe) -> int:
    """Return the steps after which the ranks have read the small text once."""
    samples = math.ceil(_DOCUMENTS / recipe.global_batch)
    tokens = recipe.global_batch * recipe.seq_len
    stream = math.ceil(_TOKENS / tokens)
    return max(samples, stream)


def _packs(recipe: Recipe) -> bool:
    """Return whether ``recipe`` can be trained on samples of several documents."""
    return (
        "packing" in backend_rules(recipe.backend)
        and recipe.architecture.has_formula
        and recipe.find(f"{recipe.backend}.attention", "sdpa") in ("sdpa", "eager")
        and not _dropout(recipe)
    )


def no_epoch(recipe: Recipe) -> str:
    """Return why the suite passes no epoch of ``recipe``; empty if it does."""
    if recipe.architecture.of_images:
        return "images are no text"
    if recipe.asset("corpus") is None or recipe.asset("tokenizer") is None:
        return "its text or its tokenizer is no file"
    if recipe.section("data") or "epochs" in recipe.settings:
        return "settings of its data and epochs fit its own text only"
    if _steps_of_an_epoch(recipe) > _MOST_STEPS:
        return f"its batch of {recipe.global_batch} needs more than {_MOST_STEPS} steps for it"
    return proof.unjudged(recipe) or ""


def left_out(recipe: Recipe, jobs: Sequence[Job]) -> list[str]:
    """Return what the suite leaves out of its comparisons of ``recipe``, with the reason."""
    names = {job.name for job in jobs}
    reasons = []
    if "repeat" in names and "resume" not in names:
        reasons.append("resuming: eval.patience may end the run before its checkpoint")
    elif "repeat" in names and _EPOCH not in names:
        reasons.append(f"a second epoch: {no_epoch(recipe)}")
    if "accumulation" in names and _dropout(recipe):
        reasons.append("base with accumulation: other micro-batches have other masks of dropout")
    is_timed = recipe.gpu != CPU and not recipe.get("proxy", bool)
    if is_timed and not _reference_fits(recipe):
        reasons.append(f"throughput: {_no_reference(recipe)}")
    return reasons


def _reference_fits(recipe: Recipe) -> bool:
    """Return whether ``recipe`` has a throughput to be judged by, of its own size."""
    return "validation.throughput" in recipe.settings and not _resized(recipe)


def _no_reference(recipe: Recipe) -> str:
    if "validation.throughput" in recipe.settings:
        return f"the recipe's reference is of another size than {', '.join(_resized(recipe))}"
    unit = f"sequences of {recipe.seq_len:,} tokens"
    if recipe.architecture.of_images:
        unit = "images"
    return f"the recipe has no reference for {recipe.gpu} and {unit}"


def _resized(recipe: Recipe) -> list[str]:
    """Return the sizes that the user chose instead of the recipe's."""
    sizes = []
    for key, setting in recipe.settings.items():
        if key.startswith("model.") and setting.origin.startswith("command line"):
            sizes.append(f"{key}={setting.value}")
    return sizes


def _dropout(recipe: Recipe) -> float:
    if recipe.mode != "lora":
        return 0.0
    return float(recipe.find(f"{recipe.backend}.lora.dropout", 0.0))


def _resumed(job: Job, saver: Job, step: int) -> Job:
    return replace(job, resume_from=saver.output / "checkpoint" / f"step-{step}")


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
        and not any(size % 2 for size in sizes)
    )


def recipe_of(jobs: Sequence[Job]) -> Recipe:
    """Return the recipe as the caller requested it: that of a job without changes by the suite."""
    if len(jobs) > 1:
        return jobs[1].recipe
    return jobs[0].recipe


def run(jobs: Sequence[Job], run_job: Callable[[Job], Outcome]) -> dict[str, Outcome]:
    """Run the jobs in order with ``run_job``. If the first fails, no other is run."""
    outcomes: dict[str, Outcome] = {}
    for job in jobs:
        outcomes[job.name] = run_job(job)
        if outcomes[jobs[0].name].exit_code != 0:
            break
    return outcomes


def judge(jobs: Sequence[Job], outcomes: Mapping[str, Outcome]) -> tuple[Verdict, ...]:
    """Return every verdict of the suite. Those of one job begin with its name; those without
    evidence are skipped.
    """
    verdicts: list[Verdict] = []
    not_run = Verdict("exit code", False, "")
    for job in jobs:
        if job.name in outcomes:
            of_job = outcome.basic_verdicts(outcomes[job.name])
        else:
            of_job = (checks.skipped(not_run, f"was not run, because {jobs[0].name} failed"),)
        for verdict in of_job:
            name = f"{job.name}: {verdict.name}"
            verdicts.append(replace(verdict, name=name))
    passed = {verdict.name for verdict in verdicts if verdict.passed}
    comparisons = _Comparisons(jobs, outcomes, passed)
    for names, verdict in comparisons.all():
        verdicts.append(comparisons.skipped_without(names, verdict))
    return (*verdicts, _same_recipe(jobs, outcomes))


# The names of the compared jobs, and the verdict on them.
_Comparison = tuple[tuple[str, ...], Verdict]


class _Comparisons:
    def __init__(
        self, jobs: Sequence[Job], outcomes: Mapping[str, Outcome], passed: Set[str]
    ) -> None:
        self._recipe = recipe_of(jobs)
        self._jobs = {job.name: job for job in jobs}
        self._outcomes = dict(outcomes)
        self._passed = passed
        self._not_run = self._jobs.keys() - outcomes.keys()
        for name in self._not_run:
            job = self._jobs[name]
            self._outcomes[name] = Outcome(job=job, exit_code=1, series=Series())

    def skipped_without(self, names: Sequence[str], verdict: Verdict) -> Verdict:
        for name in names:
            if name in self._not_run:
                return checks.skipped(verdict, f"{name} was not run")
            if self._outcomes[name].exit_code != 0:
                return checks.skipped(verdict, f"{name} failed")
        return verdict

    def all(self) -> Iterator[_Comparison]:
        for verdict in self._of_base():
            yield ("base",), verdict
        if "repeat" in self._jobs:
            yield from self._of_repetitions()
        if "tensor-parallel" in self._jobs:
            step = self._jobs["tensor-parallel"].first_step
            at = Steps(step, step)
            yield self._same_steps("layout", "layout", ("one-rank", "tensor-parallel"), at)
        for name in sorted(self._jobs):
            if name.startswith(_PRECISION_JOB):
                precisions = (self._recipe.precision, name.removeprefix(_PRECISION_JOB))
                tolerance = self._limit("precision_tolerance")
                base = self._series("base")
                verdict = checks.same_loss(precisions, base, self._series(name), tolerance)
                yield ("base", name), verdict

    def _limit(self, key: str) -> float:
        return self._recipe.get(f"validation.{key}", float)

    def _series(self, name: str) -> Series:
        return self._outcomes[name].series

    def _of_base(self) -> Iterator[Verdict]:
        recipe = self._recipe
        base = self._series("base")
        vocabulary = recipe.architecture.vocab_size
        if vocabulary and recipe.find(f"{recipe.backend}.weights", "random") == "random":
            yield checks.loss_plausible(base, vocabulary, self._limit("first_loss_tolerance"))
        repeated = self._passed >= _STEPS
        yield checks.loss_falls(base, self._limit("loss_drop"), repeated=repeated)
        repeated = _NORM in self._passed
        yield checks.grad_norm_steady(base, self._limit("grad_norm_jump"), repeated=repeated)
        if recipe.gpu != CPU and _reference_fits(recipe):
            summary = self._outcomes["base"].summary
            speed = summary.tokens_per_second
            unit = "tokens"
            if recipe.architecture.of_images:
                speed = summary.images_per_second
                unit = "images"
            tolerance = self._limit("throughput_tolerance")
            yield checks.throughput(speed, self._limit("throughput"), tolerance, unit)

    def _of_repetitions(self) -> Iterator[_Comparison]:
        recipe = self._recipe
        names = ("base", "repeat")
        _, verdict = self._same_steps("same result again", "repeat", names)
        if not verdict.passed and not recipe.deterministic:
            key = recipe.knows.keys["deterministic"]
            advice = f"its kernels may add up in any order, {key}=true forbids it"
            verdict = replace(verdict, reason=f"{verdict.reason}; {advice}")
        yield names, verdict
        base, repeat = (self._outcomes[name] for name in names)
        tolerance = self._limit("repeat_tolerance")
        yield names, _same_weights("same weights again", base, repeat, tolerance)
        if "resume" in self._jobs:
            yield from self._of_resumed("resume", ("base", "resume"))
        if _EPOCH in self._jobs:
            yield from self._of_resumed("second epoch", (_EPOCH, _EPOCH_RESUMED))
        if not _dropout(recipe):
            names = ("base", "accumulation")
            yield self._same_steps("accumulation", "accumulation", names, Steps(last=1))

    def _of_resumed(self, name: str, names: tuple[str, str]) -> Iterator[_Comparison]:
        whole, rest = names
        later = Steps(first=self._jobs[rest].first_step)
        yield self._same_steps(name, "resume", names, later)
        first = self._outcomes[whole]
        second = self._outcomes[rest]
        tolerance = self._limit("resume_tolerance")
        yield names, _same_weights(f"{name}: last weights", first, second, tolerance)

    def _same_steps(
        self, name: str, limit: str, runs: tuple[str, str], steps: Steps = EVERY_STEP
    ) -> _Comparison:
        first, second = (self._series(run) for run in runs)
        tolerance = self._limit(f"{limit}_tolerance")
        return runs, checks.same_steps(name, first, second, tolerance, steps)


def _same_weights(name: str, base: Outcome, repeat: Outcome, tolerance: float) -> Verdict:
    first = base.facts.get("weights_sha256")
    second = repeat.facts.get("weights_sha256")
    limit = "reported, not judged"
    if tolerance == 0:
        limit = "equal"
    if first is None or second is None:
        return Verdict(name, False, "a run ended without the digest of its weights", limit=limit)
    equal = first == second
    reason = "final weights differ"
    if equal:
        reason = "final weights of both runs, all ranks, are equal"
    passed = equal or tolerance > 0
    measured = f"{first[:12]} and {second[:12]}"
    return Verdict(name, passed, reason, measured=measured, limit=limit)


def _same_recipe(jobs: Sequence[Job], outcomes: Mapping[str, Outcome]) -> Verdict:
    digests = {name: run.recipe_sha256 for name, run in outcomes.items()}
    wrong = []
    for job in jobs:
        if digests.get(job.name) != job.recipe.digest:
            wrong.append(job.name)
    names = ", ".join(wrong)
    reason = "the runs resolved the planned recipe"
    if wrong:
        reason = f"another recipe was run in: {names}"
    right = len(jobs) - len(wrong)
    measured = f"{right} of {len(jobs)}"
    verdict = Verdict("recipe", not wrong, reason, measured=measured, limit="all")
    if any(digests.get(name) for name in wrong):
        return verdict
    return checks.skipped(verdict, f"nothing was run in: {names}")


def digest(recipe: Recipe, jobs: Sequence[Job]) -> str:
    """Return the digest of the suite of ``jobs``."""
    return digest_of_suite(FORMAT, [job.name for job in jobs], recipe.section("validation"))


def digest_of_suite(number: int, jobs: Sequence[str], limits: Mapping[str, Any]) -> str:
    """Return the digest of a suite from its format, the names of its jobs and the recipe's
    validation section.
    """
    content = {"format": number, "jobs": list(jobs), "validation": limits}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a suite ran, and when (``made``, in ISO 8601). ``gpu`` is a generation, or ``none``."""

    target: str
    image: RecordedImage
    gpu: str
    made: str
    engine: str = ""
    machine: Machine = field(default_factory=Machine)


def record(
    jobs: Sequence[Job],
    outcomes: Mapping[str, Outcome],
    verdicts: Sequence[Verdict],
    place: Place,
) -> Record:
    """Return the record of one validation, without the findings of gates."""
    recipe = recipe_of(jobs)
    first = jobs[0]
    recorded_jobs = []
    ran = True
    for job in jobs:
        of_job = outcomes.get(job.name)
        recorded_jobs.append(_recorded_job(job, of_job))
        if of_job is None or not of_job.series.steps:
            ran = False
    all_passed = all(verdict.passed for verdict in verdicts)
    facts: dict[str, Any] = {}
    measurements: dict[str, Any] = {}
    base = outcomes.get(first.name)
    if base is not None:
        facts = dict(base.facts)
        measurements = asdict(base.summary)
    suite = RecordedSuite(
        sha256=digest(recipe, jobs), format=FORMAT, reference=_reference_version()
    )
    return Record(
        format=RECORD_FORMAT,
        made=place.made,
        passed=bool(verdicts) and ran and all_passed,
        target=place.target,
        image=place.image,
        gpu=place.gpu,
        recipe=_recorded_recipe(recipe),
        wrap=shlex.join(first.wrap),
        suite=suite,
        versions=dict(facts.get("versions", {})),
        facts=facts,
        measurements=measurements,
        verdicts=tuple(verdicts),
        jobs=tuple(recorded_jobs),
        engine=place.engine,
        machine=place.machine,
    )


def _reference_version() -> str:
    """Return a hash of the reference's code. Another reference proves something else."""
    digest_of_code = hashlib.sha256()
    folder = Path(reference.__file__).parent
    for path in sorted(folder.iterdir()):
        if path.suffix in (".py", ".yaml"):
            digest_of_code.update(path.read_bytes())
    return digest_of_code.hexdigest()[:16]


def _recorded_recipe(recipe: Recipe) -> RecordedRecipe:
    return RecordedRecipe(
        name=recipe.name,
        backend=recipe.backend,
        mode=recipe.mode,
        precision=recipe.precision,
        gpu=recipe.gpu,
        description=str(recipe.find("description", "")),
        sha256=recipe.digest,
        ranks=recipe.world_size,
        assets=dict(recipe.asset_digests),
        settings={key: setting.value for key, setting in recipe.settings.items()},
    )


def _recorded_job(job: Job, outcome: Outcome | None) -> RecordedJob:
    command = ("primus", *job.arguments())
    if outcome is None:
        return RecordedJob(name=job.name, command=command, ran=False)
    return RecordedJob(
        name=job.name,
        command=command,
        ran=True,
        argv=tuple(outcome.run.argv),
        exit_code=outcome.exit_code,
        cause=outcome.cause or None,
        seconds=outcome.run.seconds,
        exact=outcome.series.exact,
        series=tuple(metrics.rows(outcome.series, job.recipe, outcome.facts)),
    )
