"""Measuring candidates: each by a short training run in a process of its own, whose result is kept."""

from __future__ import annotations

import errno
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from primus.errors import CheckFailed, HostError, InputError
from primus.files import read_sealed, write_sealed
from primus.recipes.recipe import Recipe
from primus.training import failure
from primus.training.outcome import RunResult, read_result
from primus.tuning.throughput import Point, different, gain

# Seconds that a run gets to end its ranks.
_GRACE = 30


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one run. ``reason`` is why it does not count, or empty; ``seconds`` is its wall time.

    ``tokens_per_second`` is the median of a rank after the warm-up, ``memory_gib`` the peak, ``losses`` those of
    all steps.
    """

    tokens_per_second: float | None
    memory_gib: float | None
    losses: tuple[float, ...]
    reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The runs of a recipe ``source``, with their results in ``folder``. A run may take ``limit`` seconds."""

    source: str
    folder: Path
    limit: float
    warmup: int

    def known(self, recipe: Recipe, number: int) -> Result | None:
        """Return the saved result of run ``number`` of ``recipe``, or None. A damaged file counts as none."""
        stored = read_sealed(self._output(recipe, number).with_suffix(".json"))
        try:
            return Result(**{**stored, "losses": tuple(stored["losses"])})
        except (TypeError, KeyError):
            return None

    def run(self, recipe: Recipe, number: int) -> Result:
        """Run ``recipe`` and save the result. HostError if the folder cannot be written."""
        output = self._output(recipe, number)
        began = time.monotonic()
        try:
            shutil.rmtree(output, ignore_errors=True)  # left by an interrupted run
            output.parent.mkdir(parents=True, exist_ok=True)
            reported, code = self._train(recipe, output)
            result = _read(output, reported, self.warmup, time.monotonic() - began)
            for large in ("cache", "checkpoint"):
                shutil.rmtree(output / large, ignore_errors=True)
            if any(text in result.reason for text in (failure.DISK_FULL.text, "the disk is full")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Do not save a failure for lack of a requirement, which may be installed at the next start.
            if code != HostError.exit_code:
                write_sealed(output.with_suffix(".json"), asdict(result))
        except OSError as error:
            raise HostError(
                f"cannot write to {self.folder}: {error.strerror}",
                hint="make room there, and run the same command again: finished runs are kept",
            ) from error
        return result

    def _output(self, recipe: Recipe, number: int) -> Path:
        return self.folder / f"{recipe.digest[:16]}-{number}"

    def _train(self, recipe: Recipe, output: Path) -> tuple[str, int]:
        """Train once. Returns the reason for a failure as the command reports it, or "", and the exit code."""
        words = [self.source, *recipe.choices.words(), *recipe.overrides, "--output", str(output), "--json"]
        words += ["--compile-cache", str(self.folder / "compiled")]
        command = [sys.executable, "-m", "primus.cli.main", "train", *words]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=self.limit)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"it took longer than {self.limit:g} s", process.returncode
        finally:
            if process.poll() is None:
                _end(process)
        lines = [line for line in errors.splitlines() if line.strip()]
        reported = lines[0].removeprefix("primus train: ") if lines else f"exit code {process.returncode}"
        return reported if process.returncode else "", process.returncode


class Search:
    """The runs of a search so far.

    ``rows`` are the results by candidate, ``finals`` the rates of the final runs of the start and the winner. There are
    ``pairs`` of them. ``say`` prints progress.
    """

    def __init__(self, points: Sequence[Point], trials: Trials, *, pairs: int, say: Callable[[str], None]) -> None:
        self.rows: list[tuple[Point, Result]] = []
        self.finals: tuple[list[float], list[float]] = [], []
        self._start, self._trials, self._pairs = points[0], trials, pairs
        self._say = say
        self._most = sum(not point.out for point in points) + 2 * pairs
        self._runs = 0

    def measure(self, point: Point) -> float | None:
        """Return the rate of a point; None if it failed, or has another loss than the start."""
        result = self._run(point, 0)
        if not result.reason and point is not self._start and point.recipe:
            tolerance = point.recipe.find("validation.accumulation_tolerance", 0.01)
            reason = different(result.losses, self.rows[0][1].losses, tolerance)
            result = replace(result, reason=reason)
        self.rows.append((point, result))
        return None if result.reason else result.tokens_per_second

    def pairs(self, winner: Point) -> tuple[float, float] | None:
        """Run the start and ``winner`` in turns; return gain and spread. Raises CheckFailed if a run fails."""
        for number in range(1, self._pairs + 1):
            for point, rates in zip((self._start, winner), self.finals, strict=True):
                result = self._run(point, number)
                if result.reason or result.tokens_per_second is None:
                    raise CheckFailed(
                        f"{point.title} ran once and then failed: {result.reason}",
                        hint=f"the log is in {self._trials.folder}; delete that folder to search again",
                    )
                rates.append(result.tokens_per_second)
        return gain(*self.finals)

    def _run(self, point: Point, number: int) -> Result:
        if point.recipe is None:
            raise InputError(point.out)
        result = self._trials.known(point.recipe, number)
        suffix = " (kept from before)" if result else ""
        if result is None:
            self._say(f"run {self._runs + 1} of at most {self._most}: {point.title}")
            result = self._trials.run(point.recipe, number)
        self._runs += 1
        rate = f"{result.tokens_per_second:,.0f} tokens/s/rank" if result.tokens_per_second else result.reason
        self._say(f"  {point.title}: {rate}{suffix}")
        return result


def _end(process: subprocess.Popen[str]) -> None:
    """End a run and its ranks. The first signal lets the run end its ranks, which are in sessions of their own."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        process.communicate(timeout=_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _read(output: Path, reported: str, warmup: int, seconds: float) -> Result:
    try:
        ended = read_result(output)
        steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, InputError):
        ended, steps = RunResult(exit_code=1), []
    reason = reported if reported.startswith("it took longer") else ended.cause
    if not reason and not ended.passed:
        failed = (f"{verdict.name}: {verdict.reason}" for verdict in ended.verdicts if not verdict.passed)
        reason = next(failed, reported or "no result")
    rates = [float(step["tokens_per_second"]) for step in steps[warmup:] if step.get("tokens_per_second")]
    if not reason and not rates:
        reason = f"no step was left to measure after {warmup} of warm-up"
    return Result(
        tokens_per_second=statistics.median(rates) if rates and not reason else None,
        memory_gib=max((step["memory_gib"] for step in steps if step.get("memory_gib") is not None), default=None),
        losses=tuple(step["loss"] for step in steps if step.get("loss") is not None),
        reason=reason,
        seconds=round(seconds, 1),
    )
