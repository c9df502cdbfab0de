"""Measuring candidates: each by a short training run in a process of its own, whose result is kept."""

from __future__ import annotations

import errno
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from primus.errors import CheckFailed, HostError, InputError
from primus.files import read_sealed, write_sealed
from primus.recipes.recipe import Recipe
from primus.training import failure, launch
from primus.training.outcome import RunResult, read_result
from primus.tuning.throughput import Point, different, gain

# Begins the lines that the command itself prints of an error.
_SAID = "primus train: "


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


class Search:
    """The runs of a search for a recipe ``source``, with their results in ``folder``; each may take ``limit`` seconds.

    ``rows`` are the results by candidate, ``finals`` the rates of the final runs of the start and the winner. There are
    ``pairs`` of them. ``say`` prints progress.
    """

    def __init__(
        self, points: Sequence[Point], source: str, folder: Path, *, limit: float, warmup: int, pairs: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.rows: list[tuple[Point, Result]] = []
        self.finals: tuple[list[float], list[float]] = [], []
        self._start, self._source, self._folder, self._pairs = points[0], source, folder, pairs
        self._limit, self._warmup, self._say = limit, warmup, say
        self._most = sum(not point.out for point in points) + 2 * pairs
        self._runs = 0

    def measure(self, point: Point) -> float | None:
        """Return the rate of a point; None if it failed, or has another loss than the start."""
        result = self._result(point, 0)
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
                result = self._result(point, number)
                if result.reason or result.tokens_per_second is None:
                    raise CheckFailed(
                        f"{point.title} ran once and then failed: {result.reason}",
                        hint=f"the log is in {self._folder}; delete that folder to search again",
                    )
                rates.append(result.tokens_per_second)
        return gain(*self.finals)

    def _result(self, point: Point, number: int) -> Result:
        if point.recipe is None:
            raise InputError(point.out)
        result = self.known(point.recipe, number)
        suffix = " (kept from before)" if result else ""
        if result is None:
            self._say(f"run {self._runs + 1} of at most {self._most}: {point.title}")
            result = self.run(point.recipe, number)
        self._runs += 1
        rate = f"{result.tokens_per_second:,.0f} tokens/s/rank" if result.tokens_per_second else result.reason
        self._say(f"  {point.title}: {rate}{suffix}")
        return result

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
        try:
            shutil.rmtree(output, ignore_errors=True)  # left by an interrupted run
            output.parent.mkdir(parents=True, exist_ok=True)
            result, code = self._train(recipe, output)
            for large in ("cache", "checkpoint"):
                shutil.rmtree(output / large, ignore_errors=True)
            if any(text in result.reason for text in (failure.DISK_FULL.text, "the disk is full")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Do not save a failure for lack of a requirement, which may be installed at the next start.
            if code != HostError.exit_code:
                write_sealed(output.with_suffix(".json"), asdict(result))
        except OSError as error:
            raise HostError(
                f"cannot write to {self._folder}: {error.strerror}",
                hint="make room there, and run the same command again: finished runs are kept",
            ) from error
        return result

    def _output(self, recipe: Recipe, number: int) -> Path:
        return self._folder / f"{recipe.digest[:16]}-{number}"

    def _train(self, recipe: Recipe, output: Path) -> tuple[Result, int]:
        words = [self._source, *recipe.choices.words(), *recipe.overrides, "--output", str(output), "--json"]
        words += ["--compile-cache", str(self._folder / "compiled")]
        end, lines = time.monotonic() + self._limit, list[str]()
        ended = launch.run(
            [sys.executable, "-m", "primus.cli.main", "train", *words], log=output.with_suffix(".log"),
            environment=os.environ, on_line=lines.append, hopeless=lambda: time.monotonic() > end,
        )  # fmt: skip
        try:
            run = read_result(output)
            steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError, InputError):
            run, steps = RunResult(exit_code=1), []
        rates = [float(step["tokens_per_second"]) for step in steps[self._warmup :] if step.get("tokens_per_second")]
        reason, late = run.cause, ended.seconds > self._limit
        if late:
            reason = f"it took longer than {self._limit:g} s"
        elif not reason and not run.passed:
            failed = (f"{verdict.name}: {verdict.reason}" for verdict in run.verdicts if not verdict.passed)
            errors = (line.removeprefix(_SAID).strip() for line in lines if line.startswith(_SAID))
            code = ended.exit_code
            reason = next(failed, None) or (next(errors, f"exit code {code}") if code else "no result")
        elif not reason and not rates:
            reason = f"no step was left to measure after {self._warmup} of warm-up"
        result = Result(
            tokens_per_second=statistics.median(rates) if rates and not reason else None,
            memory_gib=max((step["memory_gib"] for step in steps if step.get("memory_gib") is not None), default=None),
            losses=tuple(step["loss"] for step in steps if step.get("loss") is not None),
            reason=reason,
            seconds=round(ended.seconds, 1),
        )
        return result, 1 if late else ended.exit_code
