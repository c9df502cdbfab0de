"""Run a recipe on this machine, and compare finished runs."""

import argparse
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from primus_images.cli.image.recipes import resolved, short_origin
from primus_images.cli.verb import answer, note, parser_of_shared
from primus_images.errors import HostError, InputError, PrimusError
from primus_images.gpus.detect import detect
from primus_images.recipes.choose import CPU
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import rules_of
from primus_images.recipes.weights import another_model
from primus_images.report import html, sheets
from primus_images.report.run import Run, read_all
from primus_images.system.host import lost_warning
from primus_images.terminal import Screen, Styled, counted
from primus_images.training.backends.backend import backend_of
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
from primus_images.training.run.outcome import Outcome
from primus_images.training.text import encoder, tokens


def train(options: argparse.Namespace) -> int:
    """Run a recipe on this machine: start its ranks, show the loss, and check the results."""
    # An existing folder that the caller names also gets the reason of a refusal.
    named: Path | None = options.output
    try:
        return _run(options)
    except PrimusError as error:
        if named and not options.dry_run:
            outcome.write_refusal(error, named)
        raise


def _run(options: argparse.Namespace) -> int:
    memory = machine.unlisted_memory()
    options.overrides = [*options.overrides, *([f"{options.log}=true"] if options.log else [])]
    recipe = recipe_of(options, memory=memory)
    cache = options.compile_cache or (None if options.output else Path("runs") / ".compile-cache")
    if "epochs" in recipe.settings:
        recipe = _with_steps(recipe, options, memory, cache and cache.absolute())
    name = f"{Path(recipe.name).name.removesuffix('.yaml')}-{time.strftime('%Y%m%d-%H%M%S')}"
    output = options.output = options.output or Path("runs") / name
    sources = {
        "weights": recipe.weights,
        **{key: recipe.asset(key) for key in recipe.section("assets")},
    }
    for key, source in sources.items():
        if source is not None and output.absolute() == source.absolute():
            raise InputError(
                f"--output {output} holds the {key} of the run", hint="choose another --output"
            )
    checkpoint = None
    if options.resume_from:
        checkpoint = newest_checkpoint(options.resume_from)
    job = Job(
        name=output.name,
        recipe=recipe,
        output=output.absolute(),
        resume_from=checkpoint,
        judged=options.judge,
        compiled=cache and cache.absolute(),
        wrap=tuple(options.wrap),
        verify_steps=options.verify_steps,
    )
    if job.first_step > job.last_step:
        step = job.first_step - 1
        raise InputError(
            f"{checkpoint} is already at step {step} of {job.last_step}", hint="raise --steps"
        )
    if checkpoint:
        identity.check(
            checkpoint,
            recipe,
            [field for word in options.accept_change for field in word.split(",")],
        )
    backend_of(recipe).check_data(recipe)
    backend_of(recipe).check_weights(recipe)
    if options.dry_run:
        print(ranks.job_file(job) if options.json else _plan(job), end="")
        return 0
    machine.check(recipe, force=options.force, memory=memory)
    start.check_backend(job)
    if not options.no_preflight:
        _preflight(job, options.burn_in)
    encoder.without_torch()
    job = start.prepare(job, lambda line: note(options, f"primus: {line}"))
    others = processes.dropped(os.environ)
    if others:
        print(
            f"primus: not passed to the ranks: {', '.join(others)} (of another torchrun)",
            file=sys.stderr,
        )
    lost = lost_warning(job.output)
    if lost:
        print(f"primus: {lost}", file=sys.stderr)
    if recipe.gpu != CPU and not recipe.get("proxy", bool) and not recipe.find("tuned", ""):
        faster = f"`primus tune throughput {recipe.name}` finds the fastest"
        note(options, f"primus: nobody has tuned these settings on {recipe.gpu}; {faster}")
    note(options, Screen.of(sys.stderr).fit(_headline(job)))
    if recipe.gpu != CPU and job.trial:
        note(options, *Screen.of(sys.stderr).wrap(job.trial.sentence(), hanging="  "))
    progress = _Progress(job, live=Screen.of(sys.stderr).colour and not options.json)
    began = time.monotonic()
    try:
        ended = start.start(
            job, (lambda _: None) if options.json else progress.line, options.stall_timeout
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_continue(job)) from None
    finally:
        progress.end()
    run = ended.run
    document = {
        "passed": run.passed,
        "output": str(job.output),
        "exit_code": ended.exit_code,
        "seconds": run.seconds,
        **({"cause": run.cause} if run.cause else {}),
        **({} if recipe.architecture.has_formula else {"not_judged": proof.unjudged(recipe)}),
        "recipe_sha256": recipe.digest,
        "optimizations": {"used": job.turbo, "off": dict(job.trial.off) if job.trial else {}},
        "summary": asdict(ended.summary),
        "verdicts": [asdict(verdict) for verdict in run.verdicts],
    }
    if run.passed:
        lines = _success(job, ended, time.monotonic() - began)
    else:
        lines = _failure(job, ended)
    return answer(options, document, map(Screen.of().fit, lines), passed=bool(run.passed))


def passed_on(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the words that set the options ``passed`` as in ``options``; none for what has its
    default.
    """
    words: list[str] = []
    for action in parser_of_shared("passed", "train")._actions:
        value = getattr(options, action.dest)
        name = action.option_strings[-1]
        if isinstance(value, bool):
            words += [name] * value
        elif value != action.default:
            # A command, and a time in seconds, are written otherwise than Python does.
            if name == "--wrap":
                text = shlex.join(value)
            elif isinstance(value, float):
                text = f"{value}s"
            else:
                text = value
            words += [f"{name}={each}" for each in (text if isinstance(text, list) else [text])]
    return tuple(words)


def recipe_of(
    options: argparse.Namespace, *, here: bool = True, memory: float | None = None
) -> Recipe:
    """Resolve the recipe of a run, as :func:`resolved`. Raises InputError for options that exclude
    each other.
    """
    recipe = resolved(options, here=here, memory=memory)
    if options.accept_change and not options.resume_from:
        raise InputError("--accept-change needs --resume-from")
    if options.judge and (
        why := "it needs a run from step 1" if options.resume_from else proof.unjudged(recipe)
    ):
        raise InputError(f"--judge: {why}")
    if options.burn_in and (options.no_preflight or recipe.gpu == CPU):
        if options.no_preflight:
            raise InputError(
                "--burn-in tests GPUs before the run, and --no-preflight leaves it out"
            )
        raise InputError(
            "--burn-in tests GPUs before the run, and the recipe is resolved for a CPU"
        )
    if not options.verify_steps:
        return recipe
    why = rules_of(recipe).unverified
    if why:
        raise InputError(
            f"--verify-steps: {why}", hint="use another backend, or `primus preflight` between runs"
        )
    if "epochs" not in recipe.settings and options.verify_steps > recipe.steps:
        raise InputError(
            f"--verify-steps {options.verify_steps} verifies nothing in {recipe.steps} steps"
        )
    if options.judge:
        raise InputError(
            "--verify-steps and --judge exclude each other: both record what the model computes"
        )
    if not recipe.deterministic:
        options.overrides = [*options.overrides, "deterministic=true"]
        recipe = resolved(options, here=here, memory=memory)
    return recipe


def _with_steps(
    recipe: Recipe, options: argparse.Namespace, memory: float | None, cache: Path | None
) -> Recipe:
    """Return ``recipe`` with the steps of its epochs: the corpus is tokenized, on a GPU into
    ``cache``, and counted.
    """
    backend_of(recipe).check_data(recipe)
    encoder.without_torch()
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cache").mkdir()
        job = Job(name="epochs", recipe=recipe, output=folder, judged=options.judge, compiled=cache)
        if options.dry_run:
            shared = None
        else:
            shared = start.shared_folder(job)
        backend_of(recipe).tokenize(job, shared, lambda _: None)
        packing = recipe.find(f"{recipe.backend}.packing", False)
        samples = tokens.stored(folder / "cache").samples(recipe.seq_len, packing=packing)
    epochs = recipe.get("epochs", float)
    steps = math.ceil(epochs * samples / recipe.global_batch)
    each = f"{counted(samples, 'sample')}, {recipe.global_batch} a step"
    note(options, f"primus: {epochs:g} epochs of {each}: {counted(steps, 'step')}")
    options.overrides = [
        *(word for word in options.overrides if not word.startswith("epochs=")),
        f"steps={steps}",
    ]
    return recipe_of(options, memory=memory)


def _preflight(job: Job, burn_in: float | None) -> None:
    if job.recipe.gpu == CPU or not (detect().names or burn_in):
        return
    # Seam "preflight": there is nothing to check for a run on the CPU.
    from primus_images.system import host, nodes, preflight

    alone = job.recipe.get("nodes", int) == 1
    if alone:
        where = ""
    else:
        where = f"node {host.name_here()}: "
    machine_here = host.Host(output=job.output)
    findings = preflight.preflight(machine_here)
    if burn_in:
        findings += nodes.burn_in(
            machine_here, burn_in, lambda line: print(f"primus: {line}", file=sys.stderr)
        )
    for finding in sorted(findings, key=lambda each: each.level != "failed"):
        message = f"{where}{finding.check}: {finding.message}"
        if alone and finding.check in preflight.OF_SEVERAL_NODES:
            continue
        if finding.level == "failed":
            raise HostError(
                message, hint=f"{finding.remedy}; --no-preflight starts the job without this check"
            )
        if finding.level == "slow":
            print(f"primus: {message}\n  → {finding.remedy}", file=sys.stderr)


def newest_checkpoint(path: Path) -> Path:
    """Return the checkpoint that ``path`` is, or the newest complete one of the run that it is, or
    else the newest.
    """
    if not path.is_dir():
        raise InputError(
            f"there is no checkpoint folder {path}",
            hint="name a folder …/checkpoint/step-N, or the folder of a run",
        )
    checkpoint = path.absolute()
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
    return " · ".join(parts) + (f"\n  {other}" if other else "") + f"\n→ {job.output}"


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


def _last_kept(job: Job) -> Path | None:
    complete = [step for step in steps(job.output / "checkpoint") if identity.complete(step)]
    if complete and step_of(complete[-1]) < job.last_step:
        return complete[-1]
    return None


def _continue(job: Job) -> str:
    checkpoint = _last_kept(job)
    if checkpoint:
        return f"--resume-from {job.output} continues after step {step_of(checkpoint)}"
    return "the run saved no checkpoint; checkpoint=N saves one every N steps"


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
    if (weights := job.output / "weights").is_dir():
        adapters = (weights / "adapter_config.json").exists()
        yield f"  → {weights} for transformers{' and PEFT' * adapters}"


def report(options: argparse.Namespace) -> int:
    """Compare finished runs: perf.csv (madengine's columns), perf_MODEL.csv (MAD's) and report.html
    with curves.
    """
    if len(options.runs) > html.MOST_RUNS:
        raise InputError(
            f"{len(options.runs)} runs are too many", hint=f"compare at most {html.MOST_RUNS}"
        )
    runs, left_out = read_all(options.runs)
    for error in left_out:
        print(f"primus report: left out: {error}", file=sys.stderr)
    perf = sheets.text_of("perf", map(sheets.perf_row, runs))
    files = {"perf.csv": perf, **_of_models(runs), "report.html": html.comparison(runs)}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (options.out / name).write_text(text, encoding="utf-8")
    lost = lost_warning(options.out)
    if lost:
        print(f"primus: {lost}", file=sys.stderr)
    paths = [str(options.out / name) for name in files]
    shown = [
        {
            "label": r.label,
            "recipe": r.recipe,
            "passed": r.passed,
            "gpu": r.product or None,
            **asdict(r.summary),
        }
        for r in runs
    ]
    verdicts = [
        Styled(f"✓ {r.label}", "green") if r.passed else Styled(f"✗ {r.label}", "red") for r in runs
    ]
    lines = Screen.of().table([("", *verdicts), *html.figures(runs)])
    return answer(
        options, {"files": paths, "runs": shown}, [*lines, *(f"  → {path}" for path in paths)]
    )


def _of_models(runs: tuple[Run, ...]) -> dict[str, str]:
    rows: dict[str, list[dict[str, str]]] = {}
    for run in runs:
        if "/" in run.recipe:
            stem = Path(run.recipe).stem
        else:
            stem = run.recipe
        rows.setdefault(re.sub(r"[^A-Za-z0-9._+-]", "_", stem)[:100], []).extend(
            sheets.benchmark_rows(run)
        )
    return {
        f"perf_{model}.csv": sheets.text_of("benchmark", rows_of) for model, rows_of in rows.items()
    }
