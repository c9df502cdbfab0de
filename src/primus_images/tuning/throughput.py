"""The search for a recipe's fastest settings: the candidates, the order of trying them, and the
file to write.

The tokens of an optimizer step never change: a candidate with a smaller micro batch accumulates
more of them. Each is measured by a short training run in a process of its own, whose result is
kept.
"""

import errno
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from primus_images.errors import CheckFailed, HostError, InputError
from primus_images.files import read_sealed, write_sealed
from primus_images.recipes.load import beside, is_path
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import changed
from primus_images.recipes.rules import predict
from primus_images.recipes.setting import CHOICES
from primus_images.training.run import failure, processes
from primus_images.training.run.logs import read_run
from primus_images.training.run.outcome import RunResult, read_result
from primus_images.turbo.optimizations import AUTO, OFF, chosen, requested, usable

_GIB = 2**30
# Steps whose losses are compared. In later steps, rounding differences have grown.
_COMPARED = 3


class Point(NamedTuple):
    """One candidate.

    ``words`` are the settings that differ from the start. ``peak`` is the predicted memory of one
    rank in bytes, None on a CPU. ``out`` is the reason why it is not tried, or empty. ``recipe`` is
    None if it cannot be resolved.
    """

    turbo: str
    checkpointing: str
    batch: int
    words: tuple[str, ...] = ()
    recipe: Recipe | None = None
    peak: float | None = None
    out: str = ""

    @property
    def title(self) -> str:
        """Its settings in one line."""
        return f"batch {self.batch}, checkpointing {self.checkpointing}, turbo {self.turbo}"


def candidates(
    start: Recipe,
    available: float | None,
    missing: Callable[[tuple[str, ...]], Sequence[str]],
) -> list[Point]:
    """Every combination of optimizations, checkpointing and micro batch; the first is ``start``.

    ``available`` are the bytes of a rank that may be used, None on a CPU. ``missing`` returns the
    packages that optimizations need and this machine lacks.
    """
    knows = start.knows
    share = start.global_batch // start.data_parallel
    batches = [size for size in range(1, share + 1) if share % size == 0]
    points = []
    for (turbo, of_turbo), (checkpointing, of_checkpointing), batch in product(
        _turbo(start), _checkpointing(start), batches
    ):
        words = [*of_turbo, *of_checkpointing]
        if words or batch != start.local_batch:
            # Named even where it is the start's: with other settings, another of a recipe's list
            # may fit.
            words.append(f"{knows.key('local_batch')}={batch}")
        if batch != start.local_batch:
            # Otherwise the backend would use the new micro batch times the ranks as the global
            # batch.
            words.append(f"{knows.key('global_batch')}={start.global_batch}")
        if batch % start.find("validation.accumulation", 1):
            # Turn off checks that add accumulation steps.
            words.append("validation.accumulation=1")
        peak: float | None = None
        out = ""
        recipe = None
        try:
            recipe = changed(start, words)
            # With `auto`, a missing package only turns its optimization off.
            if not isinstance(requested(recipe), str) and (lacking := missing(chosen(recipe))):
                out = f"{' and '.join(lacking)} not installed"
            if available is not None and (peak := predict(recipe).peak) > available:
                out = f"does not fit: {available / _GIB:,.1f} GiB can be used"
        except InputError as error:
            out = error.message
        points.append(Point(turbo, checkpointing, batch, tuple(words), recipe, peak, out))
    return sorted(points, key=lambda point: bool(point.words))


def _turbo(start: Recipe) -> list[tuple[str, tuple[str, ...]]]:
    names = chosen(start)
    setting = start.settings.get("turbo")
    if setting and isinstance(setting.value, str):
        title = setting.value
    elif setting:
        title = ",".join(names)
    else:
        title = AUTO
    searched = usable(start) and not (setting and setting.origin.startswith("command line"))
    others = [word for word in (OFF, AUTO) if searched and word != title]
    return [(title, ()), *((word, (f"turbo={word}",)) for word in others)]


def _checkpointing(start: Recipe) -> list[tuple[str, tuple[str, ...]]]:
    head = start.backend
    rows = start.knows.checkpointing
    current = "as the recipe"
    others = []
    for row in rows:
        key = next(iter(row))
        title = " ".join(map(str, row.values()))
        values = {
            name: start.settings[f"{head}.{name}"].value
            for name in row
            if f"{head}.{name}" in start.settings
        }
        if values == row or (row[key] == "none" and f"{head}.{key}" not in start.settings):
            current = title
        else:
            others.append((title, tuple(f"{head}.{key}={value}" for key, value in row.items())))
    return [(current, ()), *others]


def search(points: Sequence[Point], measure: Callable[[Point], float | None]) -> Point | None:
    """Return the fastest point, or None if the start, ``points[0]``, has no rate.

    One setting at a time: first the optimizations, then for each checkpointing the largest micro
    batch and smaller ones, as long as that helps; once more if something changed. ``measure``
    returns tokens per second, or None for a point that failed; it is called once for each point.
    """
    rates: dict[tuple[str, ...], float | None] = {}

    def rate(point: Point) -> float:
        if point.words not in rates:
            rates[point.words] = measure(point)
        return rates[point.words] or 0.0

    best = points[0]
    if not rate(best):
        return None
    usable = [point for point in points if not point.out]
    while True:
        before = best
        for point in usable:
            if (point.checkpointing, point.batch) == (before.checkpointing, before.batch):
                best = max(best, point, key=rate)
        turbo = best.turbo
        for checkpointing in dict.fromkeys(point.checkpointing for point in usable):
            last = 0.0
            row = [
                point
                for point in usable
                if (point.turbo, point.checkpointing) == (turbo, checkpointing)
            ]
            for point in sorted(row, key=lambda point: -point.batch):
                best = max(best, point, key=rate)
                if rate(point) < last:
                    break
                last = rate(point)
        if best is before:
            return best


def different(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> str:
    """Return how ``losses`` of the first steps differ from ``wanted`` by more than ``tolerance``
    (relative), or "".
    """
    for step, (here, there) in enumerate(
        zip(losses[:_COMPARED], reference[:_COMPARED], strict=False), 1
    ):
        if not abs(here - there) <= tolerance * abs(there):
            return (
                f"the loss of step {step} is {here:.5f}, at the start {there:.5f}: more than "
                f"{tolerance:.0e} apart"
            )
    if losses:
        return ""
    return "it reported no loss"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Where the settings of a recipe come from: the ``command``, and what it measured."""

    command: str
    because: str


def overlay(
    source: str, winner: Recipe, leave: Sequence[str], evidence: Evidence, file: Path
) -> str:
    """Return the text of a recipe ``file`` that sets the values that were found.

    It uses the recipe of ``winner``. ``leave`` are keys that only the measurement set. The user's
    key=value arguments become part of the file.
    """
    keys = []
    for word in winner.overrides:
        key = word.partition("=")[0]
        if key not in winner.settings:
            key = f"{winner.backend}.{key}"
        if key not in leave:
            keys.append(key)
    below = file.absolute().parent
    if is_path(source):
        use = os.path.relpath(winner.path, below)
    else:
        use = winner.path.name
    when = {choice: winner.settings[choice].value for choice in CHOICES}
    lines = [f"# Written by: {evidence.command}", f"uses: [{json.dumps(use)}]"]
    for name in winner.section("assets"):
        asset = winner.asset(name)
        written = winner.get(f"assets.{name}", str)
        if (
            asset is not None
            and f"assets.{name}" not in keys
            and beside(file.absolute(), written) != asset
        ):
            lines.append(f"assets.{name}: {json.dumps(os.path.relpath(asset, below))}")
    lines += [
        "cases:",
        f"  - when: {json.dumps(when)}",
        f"    because: {json.dumps(evidence.because, ensure_ascii=False)}",
    ]
    lines += [f"    {key}: {json.dumps(winner.settings[key].value)}" for key in dict.fromkeys(keys)]
    return "\n".join(lines) + "\n"


# Begins the lines that the command itself prints of an error.
_SAID = "primus train: "


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one run. ``reason`` is why it does not count, or empty; ``seconds`` is its wall
    time.

    ``tokens_per_second`` is the median of a rank after the warm-up, ``memory_gib`` the peak,
    ``losses`` those of all steps.
    """

    tokens_per_second: float | None
    memory_gib: float | None
    losses: tuple[float, ...]
    reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What a search may take: ``limit`` seconds a run, and ``pairs`` of final runs.

    The first ``warmup`` steps of a run do not count.
    """

    limit: float
    warmup: int
    pairs: int


class Search:
    """The runs of a search for a recipe ``source``, with their results in ``folder``.

    ``rows`` are the results by candidate, ``finals`` the rates of the final runs of the start and
    the winner. ``say`` prints progress.
    """

    def __init__(
        self,
        points: Sequence[Point],
        source: str,
        folder: Path,
        effort: Effort,
        say: Callable[[str], None],
    ) -> None:
        self.rows: list[tuple[Point, Result]] = []
        self.finals: tuple[list[float], list[float]] = [], []
        self._start = points[0]
        self._source = source
        self._folder = folder
        self._effort = effort
        self._say = say
        self._most = sum(not point.out for point in points) + 2 * effort.pairs
        self._runs = 0

    def measure(self, point: Point) -> float | None:
        """Return the rate of a point; None if it failed, or has another loss than the start."""
        result = self._result(point, 0)
        if not result.reason and point is not self._start and point.recipe:
            tolerance = point.recipe.find("validation.accumulation_tolerance", 0.01)
            reason = different(result.losses, self.rows[0][1].losses, tolerance)
            result = replace(result, reason=reason)
        self.rows.append((point, result))
        if result.reason:
            return None
        return result.tokens_per_second

    def pairs(self, winner: Point) -> tuple[float, float]:
        """Run the start and ``winner`` in turns. Raises CheckFailed if a run fails.

        Returns the winner's gain in tokens/s (0.1: 10 % faster), and the spread, the larger (max −
        min) ÷ median.
        """
        for number in range(1, self._effort.pairs + 1):
            for point, rates in zip((self._start, winner), self.finals, strict=True):
                result = self._result(point, number)
                if result.reason or result.tokens_per_second is None:
                    raise CheckFailed(
                        f"{point.title} ran once and then failed: {result.reason}",
                        hint=f"the log is in {self._folder}; delete that folder to search again",
                    )
                rates.append(result.tokens_per_second)
        before, after = map(statistics.median, self.finals)
        return after / before - 1, max(
            (max(rates) - min(rates)) / statistics.median(rates) for rates in self.finals
        )

    def _result(self, point: Point, number: int) -> Result:
        if point.recipe is None:
            raise InputError(point.out)
        result = self.known(point.recipe, number)
        suffix = ""
        if result:
            suffix = " (kept from before)"
        if result is None:
            self._say(f"run {self._runs + 1} of at most {self._most}: {point.title}")
            result = self.run(point.recipe, number)
        self._runs += 1
        if result.tokens_per_second:
            rate = f"{result.tokens_per_second:,.0f} tokens/s/rank"
        else:
            rate = result.reason
        self._say(f"  {point.title}: {rate}{suffix}")
        return result

    def known(self, recipe: Recipe, number: int) -> Result | None:
        """Return the saved result of run ``number`` of ``recipe``, or None. A damaged file counts
        as none.
        """
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
            # Do not save a failure for lack of a requirement, which may be installed at the next
            # start.
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
        words = [
            self._source,
            *recipe.choices.words(),
            *recipe.overrides,
            "--output",
            str(output),
            "--json",
        ]
        words += ["--compile-cache", str(self._folder / "compiled")]
        end = time.monotonic() + self._effort.limit
        lines = list[str]()
        ended = processes.run(
            [sys.executable, "-m", "primus_images.cli.main", "train", *words],
            log=output.with_suffix(".log"),
            environment=os.environ,
            watch=processes.Watch(on_line=lines.append, hopeless=lambda: time.monotonic() > end),
        )
        try:
            run = read_result(output)
        except (OSError, InputError):
            run = RunResult(exit_code=1)
        series = read_run(output)
        rates = [step.tokens_per_second for step in series.steps[self._effort.warmup :]]
        reason = run.cause
        late = ended.seconds > self._effort.limit
        if late:
            reason = f"it took longer than {self._effort.limit:g} s"
        elif not reason and not run.passed:
            failed = (
                f"{verdict.name}: {verdict.reason}"
                for verdict in run.verdicts
                if not verdict.passed
            )
            errors = (line.removeprefix(_SAID).strip() for line in lines if line.startswith(_SAID))
            code = ended.exit_code
            reason = next(failed, None) or (
                next(errors, f"exit code {code}") if code else "no result"
            )
        elif not reason and not rates:
            reason = f"no step was left to measure after {self._effort.warmup} of warm-up"
        result = Result(
            tokens_per_second=statistics.median(rates) if rates and not reason else None,
            memory_gib=max((step.memory_gib for step in series.steps), default=None),
            losses=series.losses,
            reason=reason,
            seconds=round(ended.seconds, 1),
        )
        return result, 1 if late else ended.exit_code
