"""Run a recipe on this machine."""

import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from primus_images.cli.image.recipes import short_origin
from primus_images.cli.image.request import PresetOptions, Request
from primus_images.cli.verb import answer, note, parser_of_shared
from primus_images.errors import HostError, InputError, PrimusError
from primus_images.files import plain
from primus_images.gpus.detect import detect
from primus_images.recipes.architecture import size
from primus_images.recipes.choose import CPU
from primus_images.recipes.published import another_model
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import rules_of
from primus_images.system.host import lost_warning
from primus_images.terminal import Screen, counted
from primus_images.training.backends.protocol import backend_of
from primus_images.training.judge import proof
from primus_images.training.run import (
    identity,
    logs,
    machine,
    metrics,
    outcome,
    processes,
    ranks,
    start,
)
from primus_images.training.run.job import Job, step_of, steps
from primus_images.training.run.logs import Series
from primus_images.training.run.outcome import Outcome
from primus_images.training.text import encoder, tokens

COMPILED = Path("runs", ".compile-cache")
# Of a parameter in a checkpoint: itself, and two moments of AdamW, in float32.
_BYTES_SAVED = 12
# The share of a run's time that evaluations and checkpoints may take unsaid, if it lasts so long.
_LARGE_SHARE = 0.1
_LONG_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class PassedOptions:
    """The options of ``train`` that ``launch`` passes on to every node."""

    accept_change: Sequence[str]
    stall_timeout: int
    wrap: Sequence[str]
    judge_every: int
    compile_cache: Path | None
    log: str | None
    no_preflight: bool
    burn_in: float | None
    judge: bool
    force: bool
    tuned_gemms: Path | None


@dataclass(frozen=True, kw_only=True)
class RunOptions(PresetOptions, PassedOptions):
    """The options of the verbs that start a run."""

    output: Path | None
    resume_from: Path | None
    dry_run: bool


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """The options of ``train``."""

    recipe: str


def train(options: TrainOptions) -> int:
    """Run a recipe on this machine: start its ranks, show the loss, and check the results."""
    return run(options.request_of(options.recipe), options)


def run(request: Request, options: RunOptions) -> int:
    """Run what is requested, and return the exit code."""
    try:
        return _run(request, options)
    except PrimusError as error:
        # An existing folder that the caller names also gets the reason of a refusal.
        if options.output and not options.dry_run:
            outcome.write_refusal(error, options.output)
        raise


def _run(request: Request, options: RunOptions) -> int:
    memory = machine.unlisted_memory()
    job = _job(request, options, memory)
    if options.dry_run:
        if not options.force:
            machine.check_prediction(job.recipe, anyway="--force shows it anyway")
        if options.json:
            print(ranks.job_file(job), end="")
        else:
            print(_plan(job), end="")
        return 0
    machine.check(job.recipe, force=options.force, memory=memory)
    start.check_backend(job)
    if options.tuned_gemms:
        _read_tuned_gemms(job.recipe, options.tuned_gemms)
    if not options.no_preflight:
        _preflight(job, options.burn_in)
    encoder.without_torch()
    job = start.prepare(job, lambda line: note(options, f"primus: {line}"))
    _print_warnings(job, options)
    _print_headline(job, options)
    began = time.monotonic()
    ended = _followed(job, options)
    if ended.run.passed:
        lines = _success(job, ended, time.monotonic() - began)
    else:
        lines = _failure(job, ended)
    shown = map(Screen.of().fit, lines)
    return answer(options, _document(job, ended), shown, passed=bool(ended.run.passed))


def _job(request: Request, options: RunOptions, memory: float | None) -> Job:
    """Return the job, after all checks that need no machine."""
    compiled = options.compile_cache
    if compiled is None and options.output is None:
        compiled = COMPILED
    if compiled is not None:
        compiled = compiled.absolute()
    if options.log:
        request = request.with_words(f"{options.log}=true")
    recipe = checked_recipe(request, options, resumed=bool(options.resume_from), memory=memory)
    if "epochs" in recipe.settings:
        request = _with_steps(request, recipe, options, compiled)
        recipe = checked_recipe(request, options, resumed=bool(options.resume_from), memory=memory)
    output = options.output or default_output(recipe.name)
    _refuse_source(recipe, output)
    checkpoint = None
    if options.resume_from:
        checkpoint = newest_checkpoint(options.resume_from)
    job = Job(
        name=output.name,
        recipe=recipe,
        output=plain(output),
        resume_from=checkpoint,
        judged=options.judge,
        compiled=compiled,
        wrap=tuple(options.wrap),
        judge_every=options.judge_every,
    )
    if job.first_step > job.last_step:
        step = job.first_step - 1
        raise InputError(
            f"{checkpoint} is already at step {step} of {job.last_step}", hint="raise --steps"
        )
    if checkpoint:
        accepted: list[str] = []
        for word in options.accept_change:
            accepted += word.split(",")
        identity.check(checkpoint, recipe, accepted)
    backend_of(recipe).check_data(recipe)
    backend_of(recipe).check_weights(recipe)
    return job


def _read_tuned_gemms(recipe: Recipe, folder: Path) -> None:
    """Let the ranks read the result of ``primus tune gemm`` that is below ``folder``.

    Raises InputError if there is none, or one of other settings.
    """
    # Seam "tuning": only this option needs it.
    from primus_images.tuning import gemm

    variables = gemm.check(gemm.Place(gemm.folder_of(recipe.name, folder)), gemm.key_here(recipe))
    for name in list(os.environ):
        if name.startswith("PYTORCH_TUNABLEOP_"):
            del os.environ[name]
    os.environ.update(variables)


def default_output(recipe: str) -> Path:
    """Return the folder of a run of ``recipe`` that begins now."""
    name = Path(recipe).name.removesuffix(".yaml")
    return Path("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _refuse_source(recipe: Recipe, output: Path) -> None:
    sources = {"weights": recipe.weights}
    for key in recipe.section("assets"):
        sources[key] = recipe.asset(key)
    for key, source in sources.items():
        if source is not None and output.absolute() == source.absolute():
            raise InputError(
                f"--output {output} holds the {key} of the run", hint="choose another --output"
            )


def _print_warnings(job: Job, options: RunOptions) -> None:
    recipe = job.recipe
    dropped = processes.dropped(os.environ)
    if dropped:
        print(
            f"primus: not passed to the ranks: {', '.join(dropped)} (of another torchrun)",
            file=sys.stderr,
        )
    lost = lost_warning(job.output)
    if lost:
        print(f"primus: {lost}", file=sys.stderr)
    if recipe.gpu != CPU and not recipe.get("proxy", bool) and not recipe.find("tuned", ""):
        faster = f"`primus tune throughput {recipe.name}` finds the fastest"
        note(options, f"primus: nobody has tuned these settings on {recipe.gpu}; {faster}")


def _print_headline(job: Job, options: RunOptions) -> None:
    screen = Screen.of(sys.stderr)
    note(options, screen.fit(_headline(job)))
    if "saving.minutes" in job.recipe.settings:
        note(options, *screen.wrap(_saving(job), hanging="  "))
    if job.recipe.gpu != CPU and job.trial:
        note(options, *screen.wrap(job.trial.sentence(), hanging="  "))


def _saving(job: Job) -> str:
    """Return when checkpoints are saved, and the space that they take."""
    recipe = job.recipe
    minutes = recipe.get("saving.minutes", float)
    interval = f"{minutes:.4g} minutes"
    if minutes < 1:
        interval = f"{60 * minutes:.3g} seconds"
    elif minutes == 1:
        interval = "1 minute"
    sentence = f"a checkpoint every {interval}, and one after the last step"
    keep = recipe.find("saving.keep", 0)
    if not keep or recipe.mode == "lora":
        return sentence
    free = shutil.disk_usage(job.output).free
    needed = keep * size(recipe.architecture).total * _BYTES_SAVED
    return (
        f"{sentence}, the newest {keep} kept: {needed / 1e9:,.1f} GB of {free / 1e9:,.0f} GB free"
    )


def _followed(job: Job, options: RunOptions) -> Outcome:
    """Start the job, and show its steps until it ends."""
    progress = _Progress(job, live=Screen.of(sys.stderr).colour and not options.json)
    show: Callable[[str], None] = progress.line
    if options.json:
        show = _nothing
    try:
        return start.start(job, show, options.stall_timeout)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_continue(job)) from None
    finally:
        progress.end()


def _nothing(_line: str) -> None:
    pass


def _document(job: Job, ended: Outcome) -> dict[str, object]:
    result = ended.run
    off: dict[str, str] = {}
    if job.trial:
        off = dict(job.trial.off)
    document: dict[str, object] = {
        "passed": result.passed,
        "output": str(job.output),
        "exit_code": ended.exit_code,
        "seconds": result.seconds,
        "recipe_sha256": job.recipe.digest,
        "optimizations": {"used": job.turbo, "off": off},
        "summary": asdict(ended.summary),
        "verdicts": [asdict(verdict) for verdict in result.verdicts],
    }
    if result.cause:
        document["cause"] = result.cause
    if not job.recipe.architecture.has_formula:
        document["not_judged"] = proof.unjudged(job.recipe)
    return document


def passed_on(options: PassedOptions) -> tuple[str, ...]:
    """Return the words that set the options as in ``options``; none for what has its default."""
    words: list[str] = []
    for action in parser_of_shared("passed", "train")._actions:
        value = getattr(options, action.dest)
        name = action.option_strings[-1]
        if value == action.default:
            continue
        if isinstance(value, bool):
            words.append(name)
        # A command, and a time in seconds, are written otherwise than Python does.
        elif name == "--wrap":
            words.append(f"{name}={shlex.join(value)}")
        elif isinstance(value, float):
            words.append(f"{name}={value}s")
        elif isinstance(value, list):
            words += [f"{name}={item}" for item in value]
        else:
            words.append(f"{name}={value}")
    return tuple(words)


def checked_recipe(
    request: Request,
    options: PassedOptions,
    *,
    resumed: bool,
    here: bool = True,
    memory: float | None = None,
) -> Recipe:
    """Resolve the recipe of a run. Raises InputError for options that exclude each other.

    ``here`` and ``memory``: as for ``resolve``.
    """
    recipe = request.resolved(here=here, memory=memory)
    if options.accept_change and not resumed:
        raise InputError("--accept-change needs --resume-from")
    if options.judge:
        _check_judge(recipe, resumed)
    if options.burn_in:
        _check_burn_in(recipe, options)
    if options.judge_every:
        _check_judge_every(recipe, options)
    return recipe


def _check_judge(recipe: Recipe, resumed: bool) -> None:
    reason = proof.unjudged(recipe)
    if resumed:
        reason = "it needs a run from step 1"
    if reason:
        raise InputError(f"--judge: {reason}")


def _check_burn_in(recipe: Recipe, options: PassedOptions) -> None:
    if options.no_preflight:
        raise InputError("--burn-in tests GPUs before the run, and --no-preflight leaves it out")
    if recipe.gpu == CPU:
        raise InputError(
            "--burn-in tests GPUs before the run, and the recipe is resolved for a CPU"
        )


def _check_judge_every(recipe: Recipe, options: PassedOptions) -> None:
    reason = rules_of(recipe).unverified
    if reason:
        raise InputError(
            f"--judge-every: {reason}",
            hint="use another backend, or `primus preflight` between runs",
        )
    if "epochs" not in recipe.settings and options.judge_every > recipe.steps:
        raise InputError(
            f"--judge-every {options.judge_every} verifies nothing in {recipe.steps} steps"
        )
    if options.judge:
        raise InputError(
            "--judge-every and --judge exclude each other: both record what the model computes"
        )


def _with_steps(
    request: Request, recipe: Recipe, options: RunOptions, compiled: Path | None
) -> Request:
    """Return the request with the steps of its epochs.

    The corpus is tokenized and counted, in the folder of all runs, since its own run follows.
    """
    backend = backend_of(recipe)
    backend.check_data(recipe)
    encoder.without_torch()
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cache").mkdir()
        job = Job(
            name="epochs", recipe=recipe, output=folder, judged=options.judge, compiled=compiled
        )
        shared = None
        if not options.dry_run:
            shared = start.tokens_folder(job)
        backend.tokenize(job, shared, lambda _: None)
        packing = recipe.find(f"{recipe.backend}.packing", False)
        samples = tokens.stored(folder / "cache").samples(recipe.seq_len, packing=packing)
    epochs = recipe.get("epochs", float)
    count = math.ceil(epochs * samples / recipe.global_batch)
    each = f"{counted(samples, 'sample')}, {recipe.global_batch} a step"
    note(options, f"primus: {epochs:g} epochs of {each}: {counted(count, 'step')}")
    words = [word for word in request.words if not word.startswith("epochs=")]
    return Request(recipe=request.recipe, choices=request.choices, words=(*words, f"steps={count}"))


def _preflight(job: Job, burn_in: float | None) -> None:
    if job.recipe.gpu == CPU or not (detect().names or burn_in):
        return
    # Seam "preflight": there is nothing to check for a run on the CPU.
    from primus_images.system import host, nodes, preflight

    alone = job.recipe.get("nodes", int) == 1
    node = ""
    if not alone:
        node = f"node {host.name_here()}: "
    machine_here = host.Host(output=job.output)
    findings = preflight.preflight(machine_here)
    if burn_in:
        findings += nodes.burn_in(
            machine_here, burn_in, lambda line: print(f"primus: {line}", file=sys.stderr)
        )
    for finding in sorted(findings, key=lambda finding: finding.level != "failed"):
        if alone and finding.check in preflight.OF_SEVERAL_NODES:
            continue
        message = f"{node}{finding.check}: {finding.message}"
        if finding.level == "failed":
            raise HostError(
                message, hint=f"{finding.remedy}; --no-preflight starts the job without this check"
            )
        if finding.level == "slow":
            print(f"primus: {message}\n  → {finding.remedy}", file=sys.stderr)


def newest_checkpoint(path: Path) -> Path:
    """Return the checkpoint that ``path`` is, or the newest of the run that it is.

    Of a run, a complete one is preferred.
    """
    if not path.is_dir():
        raise InputError(
            f"there is no checkpoint folder {path}",
            hint="name a folder …/checkpoint/step-N, or the folder of a run",
        )
    checkpoint = plain(path)
    if not (checkpoint / ".metadata").is_file():
        saved = [
            step for step in steps(checkpoint / "checkpoint") if (step / ".metadata").is_file()
        ]
        if not saved:
            raise InputError(
                f"{path} contains no checkpoint",
                hint="name a folder …/checkpoint/step-N, or the folder of a run",
            )
        checkpoint = next((step for step in reversed(saved) if identity.complete(step)), saved[-1])
        incomplete = [step.name for step in saved[saved.index(checkpoint) + 1 :]]
        if incomplete:
            print(
                f"primus: {checkpoint.name} is used; incomplete: {', '.join(incomplete)}",
                file=sys.stderr,
            )
    if checkpoint not in steps(checkpoint.parent):
        raise InputError(
            f"{checkpoint} is not named step-N",
            hint="name a folder …/checkpoint/step-N, or the folder of a run",
        )
    return checkpoint


def _headline(job: Job) -> str:
    recipe = job.recipe
    kind = f"{recipe.name}: {recipe.backend}, {recipe.mode}, {recipe.precision}, {recipe.gpu}"
    span = f"steps {job.first_step}–{job.last_step}"
    batch = f"batch {recipe.global_batch} × {recipe.seq_len} tokens"
    parts = [f"{kind}, {counted(recipe.world_size, 'rank')}", span, batch, f"seed {recipe.seed}"]
    other = another_model(recipe)
    lines = [" · ".join(parts)]
    if other:
        lines.append(f"  {other}")
    lines += [f"  {sentence}" for sentence in recipe.says]
    if job.resume_from:
        lines.append(f"  from {job.resume_from}")
    return "\n".join([*lines, f"→ {job.output}"])


def _plan(job: Job) -> str:
    recipe = job.recipe
    rows = [
        (key, str(row.value), short_origin(row.origin, recipe))
        for key, row in recipe.settings.items()
    ]
    # A job of several nodes is shown on any machine: without the variables of a node, the command
    # of the first.
    elsewhere = {"NODE_RANK": "0", "MASTER_ADDR": "$MASTER_ADDR"}
    command = " ".join(ranks.argv(job, "python3", elsewhere | dict(os.environ)))
    return "\n".join(
        [Screen.of().fit(_headline(job)), *Screen.of().table(rows, indent="  "), "", command, ""]
    )


class _Progress:
    """One line that is rewritten on a terminal; a few lines in a log."""

    def __init__(self, job: Job, *, live: bool) -> None:
        self._job = job
        self._live = live
        self._last = 0
        if live:
            self._print("  starting the ranks …")

    def line(self, text: str) -> None:
        if text.startswith("primus: "):
            # A message of a rank, such as a workaround for something that this PyTorch lacks.
            self.end()
            self._print(f"  {text.rstrip()}\n")
        step = logs.step_in(text)
        if step is None or step.step <= self._last:
            return
        self._last = step.step
        shown = (
            f"  step {step.step}/{self._job.last_step}  loss {step.loss:.4f}  "
            f"gradient norm {step.grad_norm:.3f}  {step.tokens_per_second:,.0f} tokens/s/rank"
        )
        every = max(1, (self._job.last_step - self._job.first_step + 1) // 5)
        if self._live:
            self._print(f"\r\x1b[K{shown}")
        elif step.step in (self._job.first_step, self._job.last_step) or step.step % every == 0:
            self._print(f"{shown}\n")

    def end(self) -> None:
        if self._live:
            self._print("\r\x1b[K")

    def _print(self, text: str) -> None:
        try:
            print(text, end="", file=sys.stderr, flush=True)
        except (
            OSError
        ):  # the job goes on when its terminal is closed; the flush at exit would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _newest_complete(output: Path) -> Path | None:
    """Return the newest complete checkpoint of the run in ``output``."""
    complete = identity.complete_checkpoints(output)
    if complete:
        return complete[-1]
    return None


def _last_kept(job: Job) -> Path | None:
    newest = _newest_complete(job.output)
    if newest and step_of(newest) < job.last_step:
        return newest
    return None


def _continue(job: Job) -> str:
    checkpoint = _last_kept(job)
    if checkpoint:
        return f"--resume-from {job.output} continues after step {step_of(checkpoint)}"
    interval = job.recipe.checkpoint_interval
    minutes = job.recipe.checkpoint_minutes
    if interval or minutes:
        due = f"{interval} steps" if interval else f"{minutes:g} minutes"
        return f"the run saved no checkpoint: the first was due after {due}"
    return "the run saved no checkpoint; checkpoint=500 (steps) or checkpoint=30m saves some"


def _failure(job: Job, ended: Outcome) -> Iterator[str]:
    verdicts = ended.run.verdicts
    # The exit code comes first, because it explains everything that is missing.
    for verdict in verdicts:
        if verdict.name == "exit code" and not verdict.passed:
            yield f"✗ the job failed: {verdict.reason}"
        elif not verdict.passed and not verdict.skipped:
            limits = f"measured {verdict.measured or 'nothing'}, limit {verdict.limit}"
            yield f"✗ {verdict.name}: {verdict.reason} ({limits})"
    skipped = [verdict.name for verdict in verdicts if verdict.skipped]
    if skipped:
        yield f"– skipped: {', '.join(skipped)}"
    log = job.output / "log.txt"
    if log.exists():
        where = f"the log is {log}"
    else:
        where = f"there is no log: {log} was deleted while the job ran"
    yield f"failed after {ended.run.seconds:.0f} s\n  → {where}"
    if _last_kept(job):
        yield f"  → {_continue(job)}"


def _success(job: Job, ended: Outcome, waited: float) -> Iterator[str]:
    summary = ended.summary
    seconds = ended.run.seconds
    steps_run = counted(ended.summary.steps, "step")
    figures = metrics.sentence(summary, "GPU" if ended.facts.get("device") == "cuda" else "rank")
    losses = f"loss {summary.first_loss:.4f} → {summary.last_loss:.4f}"
    yield (
        f"✓ {steps_run} in {seconds:.0f} s, {losses}, {figures}\n  → {job.output / 'metrics.jsonl'}"
    )
    if job.judged:
        passed = f"{len(ended.run.verdicts)} checks passed"
        yield f"  judged in {waited - seconds:.0f} s: {passed}, also those against the reference"
    if not job.recipe.architecture.has_formula:
        yield f"  not judged: {proof.unjudged(job.recipe)}"
    yield from _pauses(job, ended.series)
    checkpoint = _newest_complete(job.output)
    if checkpoint:
        yield f"  → {checkpoint}: --resume-from {job.output} continues with more steps"
    yield from _exported(job, checkpoint)
    yield f"  → `primus report {job.output}` draws its curves"


def _pauses(job: Job, series: Series) -> Iterator[str]:
    """Say how much of a run's time evaluations and checkpoints took, if it is much."""
    recipe = job.recipe
    whole, paused = metrics.time_between_steps(series, recipe)
    if job.judged or whole < _LONG_SECONDS or paused < _LARGE_SHARE * whole:
        return
    remedies = []
    if recipe.section("eval"):
        remedies.append(f"eval.every (now {ranks.steps_between_evaluations(job)})")
    if recipe.checkpoint_interval:
        remedies.append(f"checkpoint (now {recipe.checkpoint_interval})")
    elif recipe.checkpoint_minutes:
        remedies.append(f"checkpoint (now {recipe.checkpoint_minutes:g}m)")
    if remedies:
        yield (
            f"  evaluation and checkpoints took {paused / whole:.0%} of the time: raise "
            f"{' or '.join(remedies)}"
        )


def _exported(job: Job, checkpoint: Path | None) -> Iterator[str]:
    """Yield where the weights are, and what loads them."""
    weights = job.output / "weights"
    if weights.is_dir():
        name = "AutoModelForCausalLM"
        if (weights / "adapter_config.json").exists():
            name = "AutoPeftModelForCausalLM"
        yield f'  → {weights}: {name}.from_pretrained("{weights}") loads it'
        yield f"  → `primus chat {job.output}` talks to it"
    elif checkpoint and job.recipe.mode != "lora" and not job.recipe.architecture.of_images:
        yield f"  → `primus export {job.output} DIR` writes its weights for transformers"
