"""Find the fastest settings of a recipe, or the fastest implementation of its matrix products."""

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

from primus_images.cli.image.recipes import resolved
from primus_images.cli.verb import answer, note, refuse_others
from primus_images.errors import CheckFailed, HostError, InputError
from primus_images.files import write_file
from primus_images.gpus.detect import detect, visible
from primus_images.gpus.table import generation
from primus_images.recipes.choose import CPU
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
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
    measure,
    merge,
    read_shapes,
)
from primus_images.tuning.throughput import Point, Search, candidates, overlay, search
from primus_images.turbo.optimizations import missing_packages

_STAGES = ("dump", "tune", "use")
_GIB = 2**30


def tune(options: argparse.Namespace) -> int:
    """Find the fastest solution for every GEMM of a recipe (`gemm`), or its fastest settings
    (`throughput`).
    """
    refuse_others(options, "tune", options.what, ("gemm", "throughput"))
    recipe = resolved(options)
    if options.what == "throughput":
        return _search(recipe, options)
    place = Place(folder_of(recipe.name, options.folder or Path("output/tune_gemm")))
    for stage in _STAGES if options.stage == "all" else (options.stage,):
        if stage == "dump":
            place.shapes.mkdir(parents=True, exist_ok=True)
            environment = dumping(place, os.environ.get("NODE_RANK", "0"))
            code = _train(recipe, environment, options, steps=options.dump_steps)
        elif stage == "tune":
            code = _tune_gemms(recipe, place, options)
        else:
            code = _train(recipe, check(place, _key_here(recipe)), options)
        if code:
            return code
    return 0


def _tune_gemms(recipe: Recipe, place: Place, options: argparse.Namespace) -> int:
    shapes = read_shapes(place.shapes)
    gpus = list(visible(len(detect().names), os.environ))
    if not gpus:
        raise HostError(
            "there is no GPU on this machine, or the environment hides all", hint="run it on a GPU"
        )
    key = _key_here(recipe)
    work = (
        place.tuned.parent / "work" / key.digest
    )  # of finished parts, which are valid for one key
    with alone(work.parent):
        note(options, f"{counted(len(shapes), 'shape')}; {counted(len(gpus), 'GPU')}")
        validators, rows = measure(shapes, work, gpus)
        merge(place, key, [*validators, *rows])
    changed = sum(row.split(",")[2] != "Default" for row in rows)
    document = {"tuned": str(place.tuned), "shapes": rows, "changed": changed}
    line = f"{changed} of {len(rows)} GEMMs are faster with another implementation than the default"
    return answer(options, document, [line, f"→ {place.tuned}"])


def _key_here(recipe: Recipe) -> Key:
    if recipe.gpu == CPU:
        raise InputError("TunableOp tunes GEMMs of GPUs only", hint="--gpu mi300x")
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise HostError("PyTorch is not installed here", hint="run it in an image") from None
    return Key.of(recipe, version, generation(recipe.gpu).arch)


def _train(
    recipe: Recipe,
    environment: Mapping[str, str],
    options: argparse.Namespace,
    steps: int | None = None,
) -> int:
    words = [*recipe.choices.words(), *recipe.overrides]
    if steps:
        key = recipe.knows.key("steps")
        words = [
            *(word for word in words if word.partition("=")[0] not in ("steps", key)),
            f"{key}={steps}",
        ]
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    note(options, f"primus tune: {variables} primus train {recipe.name} {' '.join(words)}")
    command = [
        sys.executable,
        "-m",
        "primus_images.cli.main",
        "train",
        recipe.name,
        *words,
        *["--json"] * options.json,
    ]
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTORCH_TUNABLEOP_")
    }
    # With several stages, the document is that of the stage "tune".
    stdout = None
    if options.json and options.stage == "all":
        stdout = sys.stderr
    return subprocess.run(
        command, env={**inherited, **environment}, stdout=stdout, check=False
    ).returncode


def _search(requested: Recipe, options: argparse.Namespace) -> int:
    knows = requested.knows
    only_here = {knows.key("steps"): options.steps or options.warmup + 10}
    saving = knows.key("checkpoint")
    if saving in requested.settings:
        only_here[saving] = 0
    if only_here[knows.key("steps")] <= options.warmup:
        raise InputError(f"--steps must be greater than the {options.warmup} steps of --warmup")
    measured = [f"{key}={value}" for key, value in only_here.items()]
    recipe = resolve(options.recipe, requested.overrides, requested.choices, measured)
    if (total := gpu_bytes(recipe.gpu)) is None:
        available = None
    else:
        available = USABLE * total
    unchecked = options.dry_run and not detect().names
    points = candidates(
        options.recipe, recipe, available, (lambda _: ()) if unchecked else missing_packages
    )
    if options.dry_run:
        return _show_plan(points, available, options)
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
            points,
            options.recipe,
            folder,
            limit=options.limit,
            warmup=options.warmup,
            pairs=options.pairs,
            say=partial(note, options),
        )
        winner = search(points, rows.measure)
        if winner is None:
            # Without the loss of the recipe's own settings, nothing shows that another candidate
            # computes the same.
            reason = rows.rows[0][1].reason
            raise CheckFailed(
                f"the recipe's own settings failed: {reason}",
                hint=f"the log is in {folder}; start from settings that train, such as a smaller "
                "micro batch",
            )
        if winner is points[0]:
            evidence = None
        else:
            evidence = rows.pairs(winner)
    # A gain within the spread does not count.
    better = evidence is not None and evidence[0] > evidence[1]
    if evidence and better and options.output and winner.recipe:
        before, after = (statistics.median(rates) for rates in rows.finals)
        host = "a CPU"
        if gpus.names:
            host = gpus.sentence()
        named = json.dumps(versions).strip("{}").replace('"', "")
        because = (
            f"Measured {time.strftime('%Y-%m-%d')} on {host} ({named}): {winner.title} trains "
            f"{after:,.0f} "
            f"tokens/s/rank, the recipe's settings {before:,.0f}; medians of {options.pairs} "
            "alternating runs each, "
            f"gain {evidence[0]:.1%}, spread {evidence[1]:.1%}."
        )
        words = shlex.join([options.recipe, *requested.choices.words(), *requested.overrides])
        command = f"primus tune throughput {words}"
        text = overlay(
            options.recipe, winner.recipe, list(only_here), because, command, options.output
        )
        write_file(options.output, text)
    return _show_end(rows, winner, evidence, better, versions, options)


def _show_plan(
    points: Sequence[Point], available: float | None, options: argparse.Namespace
) -> int:
    rows = []
    for point in points:
        peak = "–"
        if point.peak:
            peak = f"{point.peak / _GIB:,.1f} GiB"
        rows.append(
            (str(point.batch), point.checkpointing, point.turbo, peak, point.out or "to try")
        )
    plan = [
        {name: value for name, value in point._asdict().items() if name != "recipe"}
        for point in points
    ]
    head = ("micro batch", "checkpointing", "turbo", "predicted", "")
    lines = Screen.of().table(rows, head=head, right={0, 3})
    return answer(options, {"available_bytes": available, "plan": plan}, lines)


def _show_end(
    rows: Search,
    winner: Point,
    evidence: tuple[float, float] | None,
    better: bool,
    versions: dict[str, str],
    options: argparse.Namespace,
) -> int:
    written = None
    if better and options.output:
        written = str(options.output)
    document = {
        "versions": versions,
        "runs": [
            {"settings": point.words, "title": point.title, **asdict(result)}
            for point, result in rows.rows
        ],
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
            str(point.batch),
            point.checkpointing,
            point.turbo,
            f"{result.tokens_per_second:,.0f}" if result.tokens_per_second else "–",
            f"{result.memory_gib:,.1f}" if result.memory_gib else "–",
            result.reason or ("fastest" if point is winner else ""),
        )
        for point, result in rows.rows
    ]
    head = ("micro batch", "checkpointing", "turbo", "tokens/s/rank", "GiB", "")
    lines = ["", *Screen.of().table(table, head=head, right={0, 3, 4})]
    if evidence is None:
        lines.append("the recipe's own settings are the fastest")
    elif not better:
        change = f"{abs(evidence[0]):.1%} {'faster' if evidence[0] > 0 else 'slower'}"
        lines.append(
            f"no change: in alternating runs, {winner.title} is {change}; the spread is "
            f"{evidence[1]:.1%}"
        )
    else:
        gain = (
            f"{evidence[0]:.1%} faster, spread {evidence[1]:.1%}, {len(rows.finals[0])} "
            "pairs of runs"
        )
        lines += [f"{winner.title}: {gain}", f"use it with: {' '.join(winner.words)}"]
    return answer(options, document, [*lines, *([f"→ {written}"] if written else [])])
