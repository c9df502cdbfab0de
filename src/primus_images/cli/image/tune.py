"""Find the fastest settings of a recipe, or the fastest implementation of its matrix products."""

import importlib.metadata
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from primus_images.cli.image.request import LocalRecipeOptions
from primus_images.cli.verb import answer, note, refuse_others
from primus_images.errors import CheckFailed, HostError, InputError
from primus_images.files import write_file
from primus_images.gpus.detect import detect, visible_gpus
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import changed
from primus_images.recipes.rules import USABLE, gpu_bytes
from primus_images.terminal import Screen, counted
from primus_images.training.run import machine, start
from primus_images.training.run.job import Job
from primus_images.tuning.gemm import (
    Key,
    Place,
    alone,
    check,
    dumping,
    folder_of,
    key_here,
    measure,
    merge,
    read_shapes,
)
from primus_images.tuning.throughput import (
    Effort,
    Evidence,
    Point,
    Result,
    Search,
    candidates,
    overlay,
    search,
)
from primus_images.turbo.optimizations import missing_packages

_STAGES = ("dump", "tune", "use")
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class TuneOptions(LocalRecipeOptions):
    """The options of ``tune``: of both kinds, of ``gemm``, and of ``throughput``."""

    what: str
    folder: Path | None

    stage: str
    dump_steps: int

    output: Path | None
    dry_run: bool
    pairs: int
    warmup: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The end of a search. ``spread`` is None if the recipe's own settings are the fastest."""

    runs: Search
    winner: Point
    gain: float = 0.0
    spread: float | None = None

    @property
    def better(self) -> bool:
        """Whether the gain exceeds the spread."""
        return self.spread is not None and self.gain > self.spread


def tune(options: TuneOptions) -> int:
    """Find the fastest solution for every GEMM of a recipe (`gemm`), or its fastest settings
    (`throughput`).
    """
    refuse_others(options, "tune", options.what, ("gemm", "throughput"))
    recipe = options.request_of(options.recipe).resolved()
    if options.what == "throughput":
        return _tune_throughput(recipe, options)
    place = Place(folder_of(recipe.name, options.folder or Path("output/tune_gemm")))
    stages: Sequence[str] = _STAGES
    if options.stage != "all":
        stages = [options.stage]
    for stage in stages:
        if stage == "dump":
            code = _dump(recipe, place, options)
        elif stage == "tune":
            code = _tune_gemms(recipe, place, options)
        else:
            code = _train(recipe, check(place, key_here(recipe)), options)
        if code:
            return code
    return 0


def _dump(recipe: Recipe, place: Place, options: TuneOptions) -> int:
    # A run on the CPU would end well, and record nothing.
    key_here(recipe)
    _require_gpus()
    place.shapes.mkdir(parents=True, exist_ok=True)
    environment = dumping(place, os.environ.get("NODE_RANK", "0"))
    code = _train(recipe, environment, options, steps=options.dump_steps)
    if not code:
        # Raises InputError if the run recorded nothing.
        read_shapes(place.shapes)
    return code


def _require_gpus() -> list[str]:
    gpus = list(visible_gpus())
    if not gpus:
        raise HostError(
            "there is no GPU on this machine, or the environment hides all", hint="run it on a GPU"
        )
    return gpus


def _tune_gemms(recipe: Recipe, place: Place, options: TuneOptions) -> int:
    shapes = read_shapes(place.shapes)
    gpus = _require_gpus()
    key = key_here(recipe)
    # Finished parts are valid for one key.
    work = place.tuned.parent / "work" / key.digest
    with alone(work.parent):
        note(options, f"{counted(len(shapes), 'shape')}; {counted(len(gpus), 'GPU')}")
        validators, rows = measure(shapes, work, gpus)
        merge(place, key, [*validators, *rows])
    changed = sum(row.split(",")[2] != "Default" for row in rows)
    document = {"tuned": str(place.tuned), "shapes": rows, "changed": changed}
    line = f"{changed} of {len(rows)} GEMMs are faster with another implementation than the default"
    return answer(options, document, [line, f"→ {place.tuned}"])


def _train(
    recipe: Recipe,
    environment: Mapping[str, str],
    options: TuneOptions,
    steps: int | None = None,
) -> int:
    words = [*recipe.choices.words(), *recipe.overrides]
    if steps:
        key = recipe.knows.key("steps")
        words = [word for word in words if word.partition("=")[0] not in ("steps", key)]
        words.append(f"{key}={steps}")
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    note(options, f"primus tune: {variables} primus train {recipe.name} {' '.join(words)}")
    command = [sys.executable, "-P", "-m", "primus_images.cli.main", "train", recipe.name, *words]
    # With several stages, the document is that of the stage "tune".
    stdout = None
    if options.json:
        command.append("--json")
        if options.stage == "all":
            stdout = sys.stderr
    variables_of_run = dict(environment)
    for name, value in os.environ.items():
        if not name.startswith("PYTORCH_TUNABLEOP_"):
            variables_of_run.setdefault(name, value)
    return subprocess.run(command, env=variables_of_run, stdout=stdout, check=False).returncode


def _tune_throughput(requested: Recipe, options: TuneOptions) -> int:
    settings = _settings_to_measure(requested, options)
    words = [f"{key}={value}" for key, value in settings.items()]
    recipe = changed(requested, words)
    available = None
    total = gpu_bytes(recipe.gpu)
    if total is not None:
        available = USABLE * total
    missing: Callable[[tuple[str, ...]], Sequence[str]] = missing_packages
    if options.dry_run and not detect().names:
        missing = _none_missing
    points = candidates(recipe, available, missing)
    if options.dry_run:
        plan = [_plan_of(point) for point in points]
        shown = {"available_bytes": available, "plan": plan}
        return answer(options, shown, _plan_lines(points))
    machine.check(recipe, force=True, memory=machine.unlisted_memory())
    start.check_backend(Job(name="start", recipe=recipe, output=Path()))
    if not options.json:
        print("\n".join(_plan_lines(points)))
    versions = _versions(recipe)
    outcome = _searched(points, recipe, versions, options)
    if outcome.better and options.output and outcome.winner.recipe:
        text = overlay(
            options.recipe,
            outcome.winner.recipe,
            list(settings),
            Evidence(command=_command(requested, options), because=_because(outcome, versions)),
            options.output,
        )
        write_file(options.output, text)
    document = _document(outcome, versions, options)
    return answer(options, document, _lines(outcome, options))


def _settings_to_measure(recipe: Recipe, options: TuneOptions) -> dict[str, int]:
    """Return the settings that only the measurement has: few steps, and no checkpoints."""
    knows = recipe.knows
    steps = options.steps or options.warmup + 10
    if steps <= options.warmup:
        raise InputError(f"--steps must be greater than the {options.warmup} steps of --warmup")
    settings = {knows.key("steps"): steps}
    if knows.key("checkpoint") in recipe.settings:
        settings[knows.key("checkpoint")] = 0
    return settings


def _none_missing(_names: tuple[str, ...]) -> tuple[str, ...]:
    return ()


def _plan_of(point: Point) -> dict[str, object]:
    plan = point._asdict()
    del plan["recipe"]
    return plan


def _plan_lines(points: Sequence[Point]) -> list[str]:
    rows = []
    for point in points:
        peak = "–"
        if point.peak:
            peak = f"{point.peak / _GIB:,.1f} GiB"
        row = (str(point.batch), point.checkpointing, point.turbo, peak, point.out or "to try")
        rows.append(row)
    head = ("micro batch", "checkpointing", "turbo", "predicted", "")
    return Screen.of().table(rows, head=head, right={0, 3})


def _versions(recipe: Recipe) -> dict[str, str]:
    """Return the versions of PyTorch and of the packages of the recipe's backend."""
    distributions = importlib.metadata.packages_distributions()
    versions = {}
    for package in ("torch", *recipe.knows.packages):
        name = distributions.get(package.partition(".")[0], [package])[0]
        versions[name] = importlib.metadata.version(name)
    return versions


def _searched(
    points: Sequence[Point], recipe: Recipe, versions: Mapping[str, str], options: TuneOptions
) -> _Outcome:
    key = Key.of(recipe, json.dumps(versions), f"{recipe.gpu} {detect().sentence()}")
    folder = folder_of(recipe.name, options.folder or Path("output/tune_throughput")) / key.digest
    with alone(folder):
        runs = Search(
            points,
            options.recipe,
            folder,
            Effort(limit=options.limit, warmup=options.warmup, pairs=options.pairs),
            partial(note, options),
        )
        winner = search(points, runs.measure)
        if winner is None:
            # Without the loss of the recipe's own settings, nothing shows that another candidate
            # computes the same.
            reason = runs.rows[0][1].reason
            raise CheckFailed(
                f"the recipe's own settings failed: {reason}",
                hint=f"the log is in {folder}; start from settings that train, such as a smaller "
                "micro batch",
            )
        if winner is points[0]:
            return _Outcome(runs=runs, winner=winner)
        gain, spread = runs.pairs(winner)
        return _Outcome(runs=runs, winner=winner, gain=gain, spread=spread)


def _because(outcome: _Outcome, versions: Mapping[str, str]) -> str:
    """Return the reason that the written recipe gives for its settings."""
    before, after = (statistics.median(rates) for rates in outcome.runs.finals)
    gpus = detect()
    host = "a CPU"
    if gpus.names:
        host = gpus.sentence()
    software = ", ".join(f"{name}: {version}" for name, version in versions.items())
    return (
        f"Measured {time.strftime('%Y-%m-%d')} on {host} ({software}): {outcome.winner.title} "
        f"trains {after:,.0f} tokens/s/rank, the recipe's settings {before:,.0f}; medians of "
        f"{len(outcome.runs.finals[0])} alternating runs each, gain {outcome.gain:.1%}, spread "
        f"{outcome.spread:.1%}."
    )


def _command(requested: Recipe, options: TuneOptions) -> str:
    words = [options.recipe, *requested.choices.words(), *requested.overrides]
    return f"primus tune throughput {shlex.join(words)}"


def _document(
    outcome: _Outcome, versions: Mapping[str, str], options: TuneOptions
) -> dict[str, object]:
    runs = []
    for point, result in outcome.runs.rows:
        runs.append({"settings": point.words, "title": point.title, **asdict(result)})
    output = None
    if outcome.better and options.output:
        output = str(options.output)
    return {
        "versions": versions,
        "runs": runs,
        "winner": outcome.winner.words,
        "start_tokens_per_second": outcome.runs.finals[0],
        "winner_tokens_per_second": outcome.runs.finals[1],
        "gain": outcome.gain,
        "spread": outcome.spread,
        "better": outcome.better,
        "output": output,
    }


def _lines(outcome: _Outcome, options: TuneOptions) -> list[str]:
    rows = [_result_row(point, result, outcome.winner) for point, result in outcome.runs.rows]
    head = ("micro batch", "checkpointing", "turbo", "tokens/s/rank", "GiB", "")
    lines = ["", *Screen.of().table(rows, head=head, right={0, 3, 4})]
    winner = outcome.winner
    if outcome.spread is None:
        return [*lines, "the recipe's own settings are the fastest"]
    if not outcome.better:
        word = "slower"
        if outcome.gain > 0:
            word = "faster"
        change = f"{winner.title} is {abs(outcome.gain):.1%} {word}"
        line = f"no change: in alternating runs, {change}; the spread is {outcome.spread:.1%}"
        return [*lines, line]
    pairs = len(outcome.runs.finals[0])
    gain = f"{outcome.gain:.1%} faster, spread {outcome.spread:.1%}, {pairs} pairs of runs"
    lines += [f"{winner.title}: {gain}", f"use it with: {' '.join(winner.words)}"]
    if options.output:
        lines.append(f"→ {options.output}")
    return lines


def _result_row(point: Point, result: Result, winner: Point) -> tuple[str, ...]:
    rate = "–"
    if result.tokens_per_second:
        rate = f"{result.tokens_per_second:,.0f}"
    memory = "–"
    if result.memory_gib:
        memory = f"{result.memory_gib:,.1f}"
    remark = result.reason
    if not remark and point is winner:
        remark = "fastest"
    return (str(point.batch), point.checkpointing, point.turbo, rate, memory, remark)
