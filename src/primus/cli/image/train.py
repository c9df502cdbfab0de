"""Run a recipe on this machine."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from primus.cli.image.common import RECIPE, choices, refuse_tuning, resolved, short_origin
from primus.cli.verb import JSON, flag, folder, option, path, print_json, verb, whole
from primus.errors import HostError, InputError, Interrupted, PrimusError
from primus.gpus.detect import detect
from primus.recipes.choose import CPU
from primus.system.host import lost_warning
from primus.terminal import Screen, counted
from primus.training import identity, launch, logs, machine, metrics, outcome, proof, ranks, start, tokens
from primus.training.backend import backend_of
from primus.training.job import Job, step_of, steps
from primus.training.outcome import Outcome

# The options of one run, whichever verb starts it.
RUN = (
    option("--output", type=folder("--output"), metavar="DIR", help="output folder (default: runs/RECIPE-TIME)"),
    *choices(),
    option(
        "--resume-from",
        type=path("--resume-from"),
        metavar="DIR",
        help="a checkpoint, or a run (its newest checkpoint)",
    ),
    option(
        "--accept-change",
        action="append",
        default=[],
        metavar="FIELD",
        help="resume even if FIELD (assets.corpus, model.rope_theta, … or all) differs from the checkpoint",
        complete=lambda **_: ("all", "model", "assets.corpus", "assets.tokenizer", "data_parallel"),
    ),
    option(
        "--stall-timeout",
        type=whole(least=0),
        default=1800,
        metavar="S",
        help="end the job after S seconds without output of a rank; name the rank that hangs (default: 1800; 0: never)",
    ),
    option(
        "--compile-cache",
        type=folder("--compile-cache"),
        metavar="DIR",
        help="keep compiled GPU kernels here for later runs (default: runs/.compile-cache; with --output: not kept)",
    ),
    option(
        "--log", choices=start.TRACKERS, help="also write the figures for TensorBoard or Weights & Biases (offline)"
    ),
    flag("--no-preflight", "start without checking the machine"),
    flag("--judge", "afterwards, repeat every step in float64 and compare"),
    flag("--force", "start even if the predicted memory exceeds the GPU's"),
    flag("--dry-run", "print the resolved job and start nothing"),
    JSON,
)


@verb(
    *RECIPE,
    *RUN,
    example="primus train llama3-proxy --steps 30 optimizer.lr=0.005",
)
def train(options: argparse.Namespace) -> int:
    """Run a recipe on this machine: start its ranks, show the loss, and check the results.

    RECIPE is the name of a recipe or the path of its file. key=value arguments override settings. The name of the
    backend can be omitted from its keys, and settings that all backends share have short names, as in steps=5 or tp=2.
    Exit code 0: trained, and every check passed; 1: the job or a check failed; 2: invalid input; 3: the machine lacks
    something that the job needs.
    """
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
    recipe = resolved(options, memory=memory)
    refuse_tuning(recipe)
    if options.accept_change and not options.resume_from:
        raise InputError("--accept-change needs --resume-from")
    cache = options.compile_cache or (None if options.output else Path("runs") / ".compile-cache")
    output = options.output = options.output or (
        Path("runs") / f"{recipe.name.rpartition('/')[2].removesuffix('.yaml')}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    checkpoint = _checkpoint(options.resume_from) if options.resume_from else None
    job = Job(
        name=output.name,
        recipe=recipe,
        output=output.absolute(),
        resume_from=checkpoint,
        judged=options.judge,
        compiled=cache and cache.absolute(),
    )
    if options.judge and (why := "it needs a run from step 1" if checkpoint else proof.unjudged(recipe)):
        raise InputError(f"--judge: {why}")
    if job.first_step > job.last_step:
        raise InputError(
            f"{checkpoint} is already at step {job.first_step - 1} of {job.last_step}", hint="raise --steps"
        )
    if options.dry_run:
        _show_plan(job, as_json=options.json)
        return 0
    start.check_resume(job, [field for word in options.accept_change for field in word.split(",")])
    backend_of(recipe).check_weights(recipe)
    backend_of(recipe).check_data(recipe)
    machine.check(recipe, force=options.force, memory=memory)
    start.check_backend(job)
    if not options.no_preflight:
        _preflight(job)
    tokens.without_torch()
    job = start.prepare(job, lambda line: None if options.json else print(f"primus: {line}", file=sys.stderr))
    if others := launch.dropped(os.environ):
        print(f"primus: not passed to the ranks: {', '.join(others)} (of another torchrun)", file=sys.stderr)
    if lost := lost_warning(job.output):
        print(f"primus: {lost}", file=sys.stderr)
    if not options.json:
        if recipe.gpu != CPU and not recipe.get("proxy", bool) and not recipe.find("tuned", ""):
            tune = f"primus tune throughput {recipe.name}"
            print(
                f"primus: nobody has tuned these settings on {recipe.gpu}; `{tune}` finds the fastest", file=sys.stderr
            )
        print(_headline(job), file=sys.stderr)
        if recipe.gpu != CPU and job.trial:
            print("\n".join(Screen.of(sys.stderr).wrap(job.trial.sentence(), hanging="  ")), file=sys.stderr)
    progress = _Progress(job, quiet=options.json)
    try:
        ended = start.start(job, progress.line, options.stall_timeout)
    except KeyboardInterrupt:
        progress.end()
        raise Interrupted("interrupted", hint=_continue(job)) from None
    progress.end()
    run = ended.run
    if options.json:
        document = {
            "passed": run.passed,
            "output": str(job.output),
            "exit_code": ended.exit_code,
            "seconds": run.seconds,
            **({"cause": run.cause} if run.cause else {}),
            "recipe_sha256": recipe.digest,
            "optimizations": {"used": job.turbo, "off": dict(job.trial.off) if job.trial else {}},
            "summary": asdict(ended.summary),
            "verdicts": [asdict(verdict) for verdict in run.verdicts],
        }
        print_json(document)
    else:
        _show_end(job, ended)
    return 0 if run.passed else 1


def _preflight(job: Job) -> None:
    """Run the quick preflight checks before a job on GPUs. Raises HostError with the first problem and its remedy."""
    if job.recipe.gpu == CPU or not detect().names:
        return
    # Seam "preflight": there is nothing to check for a run on the CPU.
    from primus.system import host, preflight

    alone = job.recipe.get("nodes", int) == 1
    where = "" if alone else f"node {host.name_here()}: "
    findings = [
        finding
        for finding in preflight.preflight(host.Host(output=job.output))
        if not (alone and finding.check in preflight.OF_SEVERAL_NODES)
    ]
    for finding in findings:
        if finding.level == "failed":
            raise HostError(
                f"{where}{finding.check}: {finding.message}",
                hint=f"{finding.remedy}; --no-preflight starts the job without this check",
            )
    for finding in findings:
        if finding.level == "slow":
            print(f"primus: {where}{finding.check}: {finding.message}\n  → {finding.remedy}", file=sys.stderr)


def _checkpoint(path: Path) -> Path:
    if not path.is_dir():
        raise InputError(
            f"there is no checkpoint folder {path}", hint="name a folder …/checkpoint/step-N, or the folder of a run"
        )
    checkpoint = path.absolute()
    if not (checkpoint / ".metadata").is_file():
        checkpoint = _newest(checkpoint, path)
    try:
        step_of(checkpoint)
    except ValueError as error:
        raise InputError(str(error)) from error
    return checkpoint


def _newest(run: Path, shown: Path) -> Path:
    """Return the newest complete checkpoint of ``run``, or else the newest. Prints which incomplete ones it skips."""
    complete = [step for step in steps(run / "checkpoint") if (step / ".metadata").is_file()]
    if not complete:
        raise InputError(
            f"{shown} contains no checkpoint", hint="name a folder …/checkpoint/step-N, or a run that has one"
        )
    left_out: list[str] = []
    for step in reversed(complete):
        if identity.complete(step):
            if left_out:
                print(f"primus: {step.name} is used; incomplete: {', '.join(left_out)}", file=sys.stderr)
            return step
        left_out.append(step.name)
    return complete[-1]


def _headline(job: Job) -> str:
    recipe = job.recipe
    parts = [
        f"{recipe.name}: {recipe.backend}, {recipe.mode}, {recipe.precision}, {recipe.gpu}, "
        + counted(recipe.world_size, "rank"),
        f"steps {job.first_step}–{job.last_step}",
        f"batch {recipe.global_batch} × {recipe.seq_len} tokens",
        f"seed {recipe.seed}",
    ]
    return " · ".join(parts) + f"\n→ {job.output}"


def _show_plan(job: Job, *, as_json: bool) -> None:
    if as_json:
        print(ranks.job_file(job), end="")
        return
    print(_headline(job))
    rows = [
        (key, str(setting.value), short_origin(setting.origin, job.recipe))
        for key, setting in job.recipe.settings.items()
    ]
    print("\n".join(Screen.of().table(rows, indent="  ")))
    print("\n" + " ".join(ranks.argv(job, "python3", _ELSEWHERE | dict(os.environ))))


# --dry-run shows a job of several nodes on any machine, also without the variables of a node.
_ELSEWHERE = {"NODE_RANK": "$NODE_RANK", "MASTER_ADDR": "$MASTER_ADDR"}


class _Progress:
    """One line that is rewritten on a terminal; a few lines in a log."""

    def __init__(self, job: Job, *, quiet: bool) -> None:
        self._job = job
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._last = 0
        if not quiet and self._live:
            self._print("  starting the ranks …")

    def line(self, text: str) -> None:
        if text.startswith("primus: ") and not self._quiet:
            # A message of a rank, such as a workaround for something that this PyTorch lacks.
            self.end()
            self._print(f"  {text.rstrip()}\n")
        step = logs.step_in(text)
        if self._quiet or step is None or step.step <= self._last:
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
        if not self._quiet and self._live:
            self._print("\r\x1b[K")

    def _print(self, text: str) -> None:
        try:
            print(text, end="", file=sys.stderr, flush=True)
        except OSError:  # the job goes on when its terminal is closed; the flush at exit would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _last_kept(job: Job) -> Path | None:
    """Return the newest complete checkpoint from before the last step, or None."""
    complete = [step for step in steps(job.output / "checkpoint") if identity.complete(step)]
    return complete[-1] if complete and step_of(complete[-1]) < job.last_step else None


def _continue(job: Job) -> str:
    """Return the advice for a run that ended early: how to continue it."""
    if checkpoint := _last_kept(job):
        return f"--resume-from {job.output} continues after step {step_of(checkpoint)}"
    return "the run saved no checkpoint; checkpoint=N saves one every N steps"


def _show_end(job: Job, ended: Outcome) -> None:
    screen, summary = Screen.of(), ended.summary
    verdicts, seconds = ended.run.verdicts, ended.run.seconds
    figures = metrics.sentence(summary, "GPU" if ended.facts.get("device") == "cuda" else "rank")

    def say(text: str) -> None:
        print(screen.fit(text))

    # The exit code comes first, because it explains everything that is missing.
    for verdict in verdicts:
        if verdict.name == "exit code" and not verdict.passed:
            say(f"✗ the job failed: {verdict.reason}")
        elif not verdict.passed and not verdict.skipped:
            limits = f"measured {verdict.measured or 'nothing'}, limit {verdict.limit}"
            say(f"✗ {verdict.name}: {verdict.reason} ({limits})")
    if any(not verdict.passed for verdict in verdicts):
        left_out = [verdict.name for verdict in verdicts if verdict.skipped]
        if left_out:
            say(f"– skipped: {', '.join(left_out)}")
        say(f"failed after {seconds:.0f} s\n  → the log is {job.output / 'log.txt'}")
        if _last_kept(job):
            say(f"  → {_continue(job)}")
        return
    say(
        f"✓ {summary.steps} steps in {seconds:.0f} s, "
        f"loss {summary.first_loss:.4f} → {summary.last_loss:.4f}, "
        f"{figures}\n  → {job.output / 'metrics.jsonl'}"
    )
    if (job.output / "weights").is_dir():
        say(f"  → {job.output / 'weights'} for transformers{' and PEFT' * (job.recipe.mode == 'lora')}")
