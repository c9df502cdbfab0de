"""Find the fastest settings of a recipe, or the fastest implementation of its matrix products."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from primus.cli.image.common import RECIPE, choices, resolved
from primus.cli.verb import JSON, Option, answer, flag, folder, group, new_file, option, refuse_others, verb, whole
from primus.errors import CheckFailed, HostError, InputError
from primus.files import write_file
from primus.gpus.detect import detect, visible
from primus.gpus.table import generation
from primus.recipes.choose import CPU
from primus.recipes.recipe import Recipe
from primus.recipes.resolve import resolve
from primus.recipes.rules import USABLE, gpu_bytes
from primus.terminal import Screen, counted
from primus.training import machine, start
from primus.training.job import Job
from primus.tuning.gemm import Key, Place, alone, check, dumping, folder_of, measure, merge, read_shapes
from primus.tuning.throughput import Point, candidates, overlay, search
from primus.tuning.trial import Search
from primus.turbo.optimizations import missing_packages

_STAGES = ("dump", "tune", "use")
_GIB = 2**30


def _count(name: str, meaning: str, metavar: str = "N", *, least: int = 1, default: int | None = None) -> Option:
    return option(name, type=whole(least=least), default=default, metavar=metavar, help=meaning)


@verb(
    option("what", choices=("gemm", "throughput"), help="what to tune"),
    *RECIPE,
    *choices(),
    option("--folder", type=folder, metavar="DIR", help="results (default: output/tune_gemm|throughput)"),
    group(
        "gemm",
        option("--stage", choices=(*_STAGES, "all"), default="all", help="one stage (default: all)"),
        _count("--dump-steps", "steps of the stage dump (default: 3)", default=3),
    ),
    group(
        "throughput",
        option("--output", type=new_file(".yaml"), metavar="FILE", help="recipe file to write"),
        flag("--dry-run", "print the candidates and run nothing"),
        _count("--pairs", "final runs of start and winner each (default: 3)", least=3, default=3),
        _count("--warmup", "first steps that do not count (default: 5)", default=5),
        _count("--limit", "seconds one run may take (default: 900)", "S", default=900),
    ),
    JSON,
    example="primus tune gemm llama2-7b --stage tune",
)
def tune(options: argparse.Namespace) -> int:
    """Find the fastest solution for every GEMM of a recipe (`gemm`), or its fastest settings (`throughput`).

    `throughput` tries optimizations, activation checkpointing and micro batches that fit into memory, each in a short
    training run. After an interruption, run the same command again: finished runs are not repeated.

    `gemm` has three stages: `dump` trains a few steps and records the GEMMs, `tune` measures each on all GPUs with
    PyTorch's TunableOp, `use` trains with the result, which is valid for one version of PyTorch, GPU and recipe.
    Exit code 1: the recipe failed, or GEMMs could not be measured; 3: PyTorch or the GPUs are missing.
    """
    refuse_others(options, tune.parser("tune"), options.what, ("gemm", "throughput"))
    recipe = resolved(options)
    if options.what == "throughput":
        return _search(recipe, options)
    place = Place(folder_of(recipe.name, options.folder or Path("output/tune_gemm")))
    code = 0
    for stage in _stages(options):
        if stage == "dump":
            place.shapes.mkdir(parents=True, exist_ok=True)
            steps = f"{recipe.knows.key('steps')}={options.dump_steps}"
            code = _train(recipe, steps, dumping(place, os.environ.get("NODE_RANK", "0")), options)
        elif stage == "tune":
            _tune_gemms(recipe, place, options)
        else:
            code = _train(recipe, None, check(place, _key_here(recipe)), options)
        if code:
            break
    return code


def _stages(options: argparse.Namespace) -> Sequence[str]:
    return _STAGES if options.stage == "all" else (options.stage,)


def _tune_gemms(recipe: Recipe, place: Place, options: argparse.Namespace) -> None:
    shapes, gpus, key = read_shapes(place.shapes), _gpus(), _key_here(recipe)
    work = place.work(key)
    with alone(work.parent):
        if not options.json:
            print(f"{counted(len(shapes), 'shape')}; {counted(len(gpus), 'GPU')}", file=sys.stderr)
        result = measure(shapes, work, gpus)
        merge(place, key, result)
    document = {"tuned": str(place.tuned), "shapes": list(result.rows), "changed": result.changed}
    line = f"{result.changed} of {len(result.rows)} GEMMs are faster with another implementation than the default"
    answer(options, document, [line, f"→ {place.tuned}"])


def _key_here(recipe: Recipe) -> Key:
    if recipe.gpu == CPU:
        raise InputError("TunableOp tunes GEMMs of GPUs only", hint="--gpu mi300x")
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise HostError("PyTorch is not installed here", hint="run it in an image") from None
    return Key.of(recipe, version, generation(recipe.gpu).arch)


def _train(recipe: Recipe, steps: str | None, environment: Mapping[str, str], options: argparse.Namespace) -> int:
    shorter = ("steps", steps.partition("=")[0]) if steps else ()
    overrides = [word for word in recipe.overrides if word.partition("=")[0] not in shorter]
    words = [recipe.name, *recipe.choices.words(), *overrides, *([steps] if steps else [])]
    if not options.json:
        variables = " ".join(f"{name}={value}" for name, value in environment.items())
        print(f"primus tune: {variables} primus train {' '.join(words)}", file=sys.stderr)
    # With several stages, the document is that of the stage "tune".
    ours = options.json and len(_stages(options)) > 1
    command = [sys.executable, "-m", "primus.cli.main", "train", *words, *(["--json"] if options.json else [])]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_TUNABLEOP_")}
    stdout = sys.stderr if ours else None
    return subprocess.run(command, env={**inherited, **environment}, stdout=stdout, check=False).returncode


def _gpus() -> list[str]:
    if not (devices := list(visible(len(detect().names), os.environ))):
        raise HostError("there is no GPU on this machine, or the environment hides all", hint="run it on a GPU")
    return devices


def _search(requested: Recipe, options: argparse.Namespace) -> int:
    knows = requested.knows
    only_here = {knows.key("steps"): options.steps or options.warmup + 10}
    if (saving := knows.keys.get("checkpoint")) and f"{knows.name}.{saving}" in requested.settings:
        only_here[f"{knows.name}.{saving}"] = 0
    if only_here[knows.key("steps")] <= options.warmup:
        raise InputError(f"--steps must be greater than the {options.warmup} steps of --warmup")
    measured = [f"{key}={value}" for key, value in only_here.items()]
    recipe = resolve(options.recipe, requested.overrides, requested.choices, measured)
    total = gpu_bytes(recipe.gpu)
    available = None if total is None else USABLE * total
    unchecked = options.dry_run and not detect().names
    points = candidates(options.recipe, recipe, available, (lambda _: ()) if unchecked else missing_packages)
    if options.dry_run:
        _show_plan(points, available, options)
        return 0
    machine.check(recipe, force=True, memory=machine.unlisted_memory())
    start.check_backend(Job(name="start", recipe=recipe, output=Path()))
    distributions = importlib.metadata.packages_distributions()
    installed = dict.fromkeys(
        distributions.get(name.partition(".")[0], [name])[0] for name in ("torch", *knows.packages)
    )
    versions = {name: importlib.metadata.version(name) for name in installed}
    gpus = detect()
    key = Key.of(recipe, json.dumps(versions), f"{recipe.gpu} {gpus.sentence()}")
    folder = folder_of(recipe.name, options.folder or Path("output/tune_throughput")) / key.digest
    if not options.json:
        _show_plan(points, available, options)
    with alone(folder):
        rows = Search(
            points, options.recipe, folder, limit=options.limit, warmup=options.warmup, pairs=options.pairs,
            say=(lambda _: None) if options.json else partial(print, file=sys.stderr, flush=True),
        )  # fmt: skip
        winner = search(points, rows.measure)
        if winner is None:
            # Without the loss of the recipe's own settings, nothing shows that another candidate computes the same.
            raise CheckFailed(
                f"the recipe's own settings failed: {rows.rows[0][1].reason}",
                hint=f"the log is in {folder}; start from settings that train, such as a smaller micro batch",
            )
        evidence = None if winner is points[0] else rows.pairs(winner)
    text = f"primus tune throughput {shlex.join([options.recipe, *requested.choices.words(), *requested.overrides])}"
    # Record the figures that the decision is made from. A gain within the spread does not count.
    better = evidence is not None and evidence[0] > evidence[1]
    if better and options.output and winner.recipe:
        because = _because(
            winner, rows.finals, evidence or (0, 0), versions, gpus.sentence() if gpus.names else "a CPU"
        )
        write_file(
            options.output, overlay(options.recipe, winner.recipe, list(only_here), because, text, options.output)
        )
    _show_end(rows, winner, evidence, better, versions, options)
    return 0


def _because(
    winner: Point, finals: tuple[list[float], list[float]], evidence: tuple[float, float], versions: object, host: str
) -> str:
    before, after = (statistics.median(rates) for rates in finals)
    named = json.dumps(versions).strip("{}").replace('"', "")
    return (
        f"Measured {time.strftime('%Y-%m-%d')} on {host} ({named}): {winner.title} trains {after:,.0f} "
        f"tokens/s/rank, the recipe's settings {before:,.0f}; medians of {len(finals[0])} alternating runs each, "
        f"gain {evidence[0]:.1%}, spread {evidence[1]:.1%}."
    )


def _show_plan(points: Sequence[Point], available: float | None, options: argparse.Namespace) -> None:
    rows = []
    for point in points:
        peak = f"{point.peak / _GIB:,.1f} GiB" if point.peak else "–"
        rows.append((str(point.batch), point.checkpointing, point.turbo, peak, point.out or "to try"))
    names = ("batch", "checkpointing", "turbo", "peak", "verdict")
    plan = [dict(zip(names, row, strict=True), words=point.words) for row, point in zip(rows, points, strict=True)]
    head = ("micro batch", "checkpointing", "turbo", "predicted", "")
    answer(options, {"available_bytes": available, "plan": plan}, Screen.of().table(rows, head=head, right={0, 3}))


def _show_end(
    rows: Search, winner: Point, evidence: tuple[float, float] | None, better: bool, versions: dict[str, str],
    options: argparse.Namespace,
) -> None:  # fmt: skip
    written = str(options.output) if better and options.output else None
    document = {
        "versions": versions,
        "runs": [{"settings": point.words, "title": point.title, **asdict(result)} for point, result in rows.rows],
        "winner": winner.words,
        "start_tokens_per_second": rows.finals[0],
        "winner_tokens_per_second": rows.finals[1],
        "gain": evidence[0] if evidence else 0.0,
        "spread": evidence[1] if evidence else None,
        "better": better,
        "output": written,
    }
    table = [
        (
            str(point.batch), point.checkpointing, point.turbo,
            f"{result.tokens_per_second:,.0f}" if result.tokens_per_second else "–",
            f"{result.memory_gib:,.1f}" if result.memory_gib else "–",
            result.reason or ("fastest" if point is winner else ""),
        )
        for point, result in rows.rows
    ]  # fmt: skip
    head = ("micro batch", "checkpointing", "turbo", "tokens/s/rank", "GiB", "")
    lines = ["", *Screen.of().table(table, head=head, right={0, 3, 4})]
    if evidence is None:
        lines.append("the recipe's own settings are the fastest")
    elif not better:
        change = f"{abs(evidence[0]):.1%} {'faster' if evidence[0] > 0 else 'slower'}"
        lines.append(f"no change: in alternating runs, {winner.title} is {change}; the spread is {evidence[1]:.1%}")
    else:
        gain = f"{evidence[0]:.1%} faster, spread {evidence[1]:.1%}, {len(rows.finals[0])} pairs of runs"
        lines += [f"{winner.title}: {gain}", f"use it with: {' '.join(winner.words)}"]
    answer(options, document, [*lines, *([f"→ {written}"] if written else [])])
