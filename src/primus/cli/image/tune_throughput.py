"""The part `throughput` of `primus tune`: print the plan, run the candidates, and write the winner as a recipe file."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

from primus.cli.arguments import new_file, whole
from primus.errors import CheckFailed, InputError
from primus.files import write_file
from primus.gpus.detect import detect
from primus.recipes.fit import USABLE, gpu_bytes
from primus.recipes.recipe import Recipe
from primus.recipes.resolve import resolve
from primus.terminal import Screen, counted
from primus.training import machine, start
from primus.training.job import Job
from primus.tuning.results import Key, alone, folder_of
from primus.tuning.throughput import Point, candidates, different, gain, overlay, search
from primus.tuning.trial import Result, Trials, ending
from primus.turbo.optimizations import missing_packages

OPTIONS = ("output", "dry_run", "pairs", "limit", "total_limit", "warmup")
_NOT_TRIED = "not tried: --total-limit"
_GIB = 2**30


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare the options of `throughput`."""
    group.add_argument("--output", type=new_file("--output", ".yaml"), metavar="FILE", help="recipe file to write")
    group.add_argument("--dry-run", action="store_true", help="print the candidates and run nothing")
    group.add_argument(
        "--pairs", type=whole(least=3), default=3, metavar="N", help="final runs of start and winner each (default: 3)"
    )
    group.add_argument(
        "--warmup", type=whole(least=1), default=5, metavar="N", help="first steps that do not count (default: 5)"
    )
    group.add_argument(
        "--limit", type=whole(least=1), default=900, metavar="S", help="seconds one run may take (default: 900)"
    )
    group.add_argument(
        "--total-limit", type=whole(least=1), metavar="S", help="seconds for the whole search (default: no limit)"
    )


def tune(requested: Recipe, options: argparse.Namespace) -> int:
    """Search, print the table and write the recipe file. Returns 0. Raises InputError, HostError and CheckFailed."""
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
        _show_plan(points, available, as_json=options.json)
        return 0
    machine.check(recipe, force=True)
    start.check_backend(Job(name="start", recipe=recipe, output=Path()))
    distributions = metadata.packages_distributions()
    installed = dict.fromkeys(
        distributions.get(name.partition(".")[0], [name])[0] for name in ("torch", *knows.packages)
    )
    versions = {name: metadata.version(name) for name in installed}
    gpus = detect()
    key = Key.of(recipe, json.dumps(versions), f"{recipe.gpu} {gpus.sentence()}")
    folder = folder_of(recipe.name, options.folder or Path("output/tune_throughput")) / key.digest
    trials = Trials(source=options.recipe, folder=folder, limit=options.limit, warmup=options.warmup)
    if not options.json:
        _show_plan(points, available, as_json=False)
    with alone(trials.folder), ending():
        rows = _Rows(points, trials, options)
        winner = search(points, rows.measure)
        if winner is None:
            # Without the loss of the recipe's own settings, nothing shows that another candidate computes the same.
            raise CheckFailed(
                f"the recipe's own settings failed: {rows.rows[0][1].reason}",
                hint=f"the log is in {trials.folder}; start from settings that train, such as a smaller micro batch",
            )
        evidence = None if winner is points[0] else rows.pairs(winner)
    text = f"primus tune throughput {shlex.join([options.recipe, *requested.choices.words(), *requested.overrides])}"
    # Record the figures that the decision is made from. A gain within the spread does not count.
    better = evidence is not None and evidence[0] > evidence[1]
    if better and options.output and winner.recipe:
        because = _because(
            winner, rows.finals, evidence or (0, 0), versions, gpus.sentence() if gpus.names else "a CPU"
        )
        _write(options, overlay(options.recipe, winner.recipe, list(only_here), because, text, options.output), winner)
    _show_end(rows, winner, evidence, better, versions, options)
    return 0


class _Rows:
    """The runs so far, with progress on stderr."""

    def __init__(self, points: Sequence[Point], trials: Trials, options: argparse.Namespace) -> None:
        self.rows: list[tuple[Point, Result]] = []
        self.finals: tuple[list[float], list[float]] = [], []
        self._start, self._trials, self._options = points[0], trials, options
        self._most = sum(not point.out for point in points) + 2 * options.pairs
        self._runs = 0
        self._spent = 0.0
        self._longest = 0.0
        self._began = time.monotonic()

    def measure(self, point: Point) -> float | None:
        """Return the rate of a point; None if it failed, has another loss than the start, or no time is left."""
        # The final runs decide, so the search reserves time for them.
        if not self._has_time(point, 0, runs=1 + 2 * self._options.pairs):
            nothing = Result(tokens_per_second=None, memory_gib=None, losses=(), reason=_NOT_TRIED, seconds=0)
            self.rows.append((point, nothing))
            return None
        result = self._run(point, 0)
        if not result.reason and point is not self._start and point.recipe:
            tolerance = point.recipe.find("validation.accumulation_tolerance", 0.01)
            reason = different(result.losses, self.rows[0][1].losses, tolerance)
            result = replace(result, reason=reason)
        self.rows.append((point, result))
        return None if result.reason else result.tokens_per_second

    def pairs(self, winner: Point) -> tuple[float, float] | None:
        """Run the start and ``winner`` in turns; return gain and spread. Raises CheckFailed if a run fails."""
        for number in range(1, self._options.pairs + 1):
            for point, rates in zip((self._start, winner), self.finals, strict=True):
                if not self._has_time(point, number, runs=1):
                    raise CheckFailed(
                        f"--total-limit {self._options.total_limit}: no time is left for the final runs",
                        hint="run the same command again to continue: finished runs are kept",
                    )
                result = self._run(point, number)
                if result.reason or result.tokens_per_second is None:
                    raise CheckFailed(
                        f"{point.title} ran once and then failed: {result.reason}",
                        hint=f"the log is in {self._trials.folder}; delete that folder to search again",
                    )
                rates.append(result.tokens_per_second)
        return gain(*self.finals)

    def _has_time(self, point: Point, number: int, runs: int) -> bool:
        """Return whether ``runs`` runs of the point, each as long as the longest, fit in --total-limit."""
        total: float | None = self._options.total_limit
        if total is None or not self._runs or (point.recipe and self._trials.known(point.recipe, number)):
            return True
        return time.monotonic() - self._began + runs * self._longest <= total

    def _run(self, point: Point, number: int) -> Result:
        if point.recipe is None:
            raise InputError(point.out)
        result = self._trials.known(point.recipe, number)
        suffix = " (kept from before)" if result else ""
        if result is None:
            self._say(f"run {self._runs + 1} of at most {self._most}{self._left()}: {point.title}")
            result = self._trials.run(point.recipe, number)
        self._runs, self._spent = self._runs + 1, self._spent + result.seconds
        self._longest = max(self._longest, result.seconds)
        rate = f"{result.tokens_per_second:,.0f} tokens/s/rank" if result.tokens_per_second else result.reason
        self._say(f"  {point.title}: {rate}{suffix}")
        return result

    def _left(self) -> str:
        if not self._runs:
            return ""
        seconds = self._spent / self._runs * max(1, self._most - self._runs)
        return f", {seconds / 60:.0f} min left" if seconds >= 90 else f", {seconds:.0f} s left"

    def _say(self, text: str) -> None:
        if not self._options.json:
            print(text, file=sys.stderr, flush=True)


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


def _write(options: argparse.Namespace, text: str, winner: Point) -> None:
    """Write the recipe file, then resolve it to verify that it gives the settings that were measured."""
    try:
        write_file(options.output, text)
    except OSError as error:
        raise InputError(f"cannot write {options.output}: {error.strerror}", hint="choose another --output") from error
    if winner.recipe is None:
        return
    again = resolve(str(options.output.absolute()), (), winner.recipe.choices)
    for word in winner.words:
        key = word.partition("=")[0]
        if again.settings[key].value != winner.recipe.settings[key].value:
            raise CheckFailed(f"{options.output} does not give the {key} that was measured")


def _show_plan(points: Sequence[Point], available: float | None, *, as_json: bool) -> None:
    rows = []
    for point in points:
        peak = f"{point.peak / _GIB:,.1f} GiB" if point.peak else "–"
        rows.append((str(point.batch), point.checkpointing, point.turbo, peak, point.out or "to try"))
    if as_json:
        names = ("batch", "checkpointing", "turbo", "peak", "verdict")
        plan = [dict(zip(names, row, strict=True), words=point.words) for row, point in zip(rows, points, strict=True)]
        print(json.dumps({"available_bytes": available, "plan": plan}, indent=2))
        return
    head = ("micro batch", "checkpointing", "turbo", "predicted", "")
    print("\n".join(Screen.of().table(rows, head=head, right={0, 3})))


def _show_end(
    rows: _Rows, winner: Point, evidence: tuple[float, float] | None, better: bool, versions: dict[str, str],
    options: argparse.Namespace,
) -> None:  # fmt: skip
    written = str(options.output) if better and options.output else None
    if options.json:
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
            "not_tried": sum(result.reason == _NOT_TRIED for _, result in rows.rows),
        }
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return
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
    print("\n" + "\n".join(Screen.of().table(table, head=head, right={0, 3, 4})))
    if untried := sum(result.reason == _NOT_TRIED for _, result in rows.rows):
        print(f"{counted(untried, 'candidate')} not tried within {options.total_limit} s; run again to continue")
    if evidence is None:
        print(f"the recipe's own settings are the fastest{' of those tried' if untried else ''}")
    elif not better:
        change = f"{abs(evidence[0]):.1%} {'faster' if evidence[0] > 0 else 'slower'}"
        print(f"no change: in alternating runs, {winner.title} is {change}; the spread is {evidence[1]:.1%}")
    else:
        print(
            f"{winner.title}: {evidence[0]:.1%} faster, spread {evidence[1]:.1%}, {len(rows.finals[0])} pairs of runs"
        )
        print(f"use it with: {' '.join(winner.words)}")
    if written:
        print(f"→ {written}")
