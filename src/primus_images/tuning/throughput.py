"""The search for a recipe's fastest settings.

It has the candidates, the order of trying them, and the file to write.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

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
    share = start.global_batch // start.data_parallel
    batches = [size for size in range(1, share + 1) if share % size == 0]
    points = []
    for turbo, checkpointing, batch in product(_turbo(start), _checkpointing(start), batches):
        words = [*turbo.words, *checkpointing.words]
        words += _batch_words(start, batch, others=bool(words))
        point = Point(turbo.title, checkpointing.title, batch, tuple(words))
        try:
            point = point._replace(recipe=changed(start, words))
            points.append(_judged(point, available, missing))
        except InputError as error:
            points.append(point._replace(out=error.message))
    return sorted(points, key=lambda point: bool(point.words))


def _batch_words(start: Recipe, batch: int, *, others: bool) -> list[str]:
    words = []
    if others or batch != start.local_batch:
        # Named even where it is the start's: with other settings, another of a recipe's list may
        # fit.
        words.append(f"{start.knows.key('local_batch')}={batch}")
    if batch != start.local_batch:
        # Otherwise the backend would use the new micro batch times the ranks as the global batch.
        words.append(f"{start.knows.key('global_batch')}={start.global_batch}")
    if batch % start.find("validation.accumulation", 1):
        # Turn off checks that add accumulation steps.
        words.append("validation.accumulation=1")
    return words


def _judged(
    point: Point,
    available: float | None,
    missing: Callable[[tuple[str, ...]], Sequence[str]],
) -> Point:
    """Return ``point`` with its predicted memory, and the reason why it cannot run here."""
    recipe = point.recipe
    assert recipe is not None
    # With `auto`, a missing package only turns its optimization off.
    if not isinstance(requested(recipe), str):
        lacking = missing(chosen(recipe))
        if lacking:
            point = point._replace(out=f"{' and '.join(lacking)} not installed")
    if available is not None:
        point = point._replace(peak=predict(recipe).peak)
        if point.peak is not None and point.peak > available:
            point = point._replace(out=f"does not fit: {available / _GIB:,.1f} GiB can be used")
    return point


class _Choice(NamedTuple):
    """One value of a setting: its title, and the words that differ from the start."""

    title: str
    words: tuple[str, ...] = ()


def _turbo(start: Recipe) -> list[_Choice]:
    setting = start.settings.get("turbo")
    title = AUTO
    if setting:
        title = ",".join(chosen(start))
        if isinstance(setting.value, str):
            title = setting.value
    choices = [_Choice(title)]
    asked = setting is not None and setting.origin.startswith("command line")
    if usable(start) and not asked:
        for word in (OFF, AUTO):
            if word != title:
                choices.append(_Choice(word, (f"turbo={word}",)))
    return choices


def _checkpointing(start: Recipe) -> list[_Choice]:
    head = start.backend
    current = "as the recipe"
    others = []
    for row in start.knows.checkpointing:
        title = " ".join(map(str, row.values()))
        if _has(start, row):
            current = title
        else:
            words = [f"{head}.{key}={value}" for key, value in row.items()]
            others.append(_Choice(title, tuple(words)))
    return [_Choice(current), *others]


def _has(start: Recipe, row: Mapping[str, Any]) -> bool:
    """Whether the start has the settings of ``row``; without a setting, it recomputes nothing."""
    keys = {name: f"{start.backend}.{name}" for name in row}
    first = next(iter(row))
    if row[first] == "none" and keys[first] not in start.settings:
        return True
    return all(
        keys[name] in start.settings and start.settings[keys[name]].value == value
        for name, value in row.items()
    )


def search(points: Sequence[Point], measure: Callable[[Point], float | None]) -> Point | None:
    """Return the fastest point, or None if the start, ``points[0]``, has no rate.

    One setting at a time: first the optimizations, then for each checkpointing the largest micro
    batch and smaller ones, as long as that helps; once more if something changed. ``measure``
    returns tokens per second, or None for a point that failed; it is called once for each point.
    """
    rates: dict[tuple[str, ...], float] = {}

    def rate(point: Point) -> float:
        if point.words not in rates:
            rates[point.words] = measure(point) or 0.0
        return rates[point.words]

    best = points[0]
    if not rate(best):
        return None
    tried = [point for point in points if not point.out]
    while True:
        before = best
        best = _best_turbo(best, tried, rate)
        turbo = best.turbo
        for checkpointing in dict.fromkeys(point.checkpointing for point in tried):
            row = [
                point
                for point in tried
                if point.turbo == turbo and point.checkpointing == checkpointing
            ]
            best = _best_batch(best, row, rate)
        if best is before:
            return best


def _best_turbo(best: Point, points: Sequence[Point], rate: Callable[[Point], float]) -> Point:
    start = best
    for point in points:
        if point.checkpointing == start.checkpointing and point.batch == start.batch:
            best = max(best, point, key=rate)
    return best


def _best_batch(best: Point, row: Sequence[Point], rate: Callable[[Point], float]) -> Point:
    """Try the largest micro batch of ``row`` first, and smaller ones as long as they are faster."""
    last = 0.0
    for point in sorted(row, key=lambda point: -point.batch):
        best = max(best, point, key=rate)
        if rate(point) < last:
            break
        last = rate(point)
    return best


def different(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> str:
    """Return how the first ``losses`` differ from ``reference``, or "" if they agree.

    ``tolerance`` is relative.
    """
    if not losses:
        return "it reported no loss"
    pairs = zip(losses[:_COMPARED], reference[:_COMPARED], strict=False)
    for step, (loss, start_loss) in enumerate(pairs, 1):
        if not abs(loss - start_loss) <= tolerance * abs(start_loss):
            return (
                f"the loss of step {step} is {loss:.5f}, at the start {start_loss:.5f}: more than "
                f"{tolerance:.0e} apart"
            )
    return ""


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
    keys = [key for key in _override_keys(winner) if key not in leave]
    use = winner.path.name
    if is_path(source):
        use = os.path.relpath(winner.path, file.absolute().parent)
    when = {choice: winner.settings[choice].value for choice in CHOICES}
    lines = [f"# Written by: {evidence.command}", f"uses: [{json.dumps(use)}]"]
    for name in winner.section("assets"):
        if f"assets.{name}" not in keys:
            lines += _asset_lines(winner, name, file)
    lines.append("cases:")
    lines.append(f"  - when: {json.dumps(when)}")
    lines.append(f"    because: {json.dumps(evidence.because, ensure_ascii=False)}")
    for key in dict.fromkeys(keys):
        lines.append(f"    {key}: {json.dumps(winner.settings[key].value)}")
    return "\n".join(lines) + "\n"


def _override_keys(winner: Recipe) -> Iterator[str]:
    for word in winner.overrides:
        key = word.partition("=")[0]
        if key not in winner.settings:
            key = f"{winner.backend}.{key}"
        yield key


def _asset_lines(winner: Recipe, name: str, file: Path) -> list[str]:
    """Return the line of an asset that ``file`` would look for in another place."""
    asset = winner.asset(name)
    written = winner.get(f"assets.{name}", str)
    if asset is None or beside(file.absolute(), written) == asset:
        return []
    path = os.path.relpath(asset, file.absolute().parent)
    return [f"assets.{name}: {json.dumps(path)}"]


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
        return after / before - 1, max(map(_spread, self.finals))

    def _result(self, point: Point, number: int) -> Result:
        if point.recipe is None:
            raise InputError(point.out)
        result = self.known(point.recipe, number)
        suffix = ""
        if result:
            suffix = " (kept from before)"
        else:
            self._say(f"run {self._runs + 1} of at most {self._most}: {point.title}")
            result = self.run(point.recipe, number)
        self._runs += 1
        rate = result.reason
        if result.tokens_per_second:
            rate = f"{result.tokens_per_second:,.0f} tokens/s/rank"
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
        command = [sys.executable, "-P", "-m", "primus_images.cli.main", "train", self._source]
        command += [*recipe.choices.words(), *recipe.overrides]
        command += ["--output", str(output), "--json"]
        command += ["--compile-cache", str(self._folder / "compiled")]
        end = time.monotonic() + self._effort.limit
        lines = list[str]()
        ended = processes.run(
            command,
            log=output.with_suffix(".log"),
            environment=os.environ,
            watch=processes.Watch(on_line=lines.append, should_end=lambda: time.monotonic() > end),
        )
        series = read_run(output)
        rates = [step.tokens_per_second for step in series.steps[self._effort.warmup :]]
        code = ended.exit_code
        if ended.seconds > self._effort.limit:
            code = 1
            reason = f"it took longer than {self._effort.limit:g} s"
        else:
            reason = _failure(output, code, lines)
        if not reason and not rates:
            reason = f"no step was left to measure after {self._effort.warmup} of warm-up"
        rate = None
        if not reason:
            rate = statistics.median(rates)
        result = Result(
            tokens_per_second=rate,
            memory_gib=max((step.memory_gib for step in series.steps), default=None),
            losses=series.losses,
            reason=reason,
            seconds=round(ended.seconds, 1),
        )
        return result, code


def _failure(output: Path, code: int, lines: Sequence[str]) -> str:
    """Return why the run in ``output`` did not pass; empty if it did."""
    try:
        run = read_result(output)
    except (OSError, InputError):
        run = RunResult(exit_code=1)
    if run.cause or run.passed:
        return run.cause
    for verdict in run.verdicts:
        if not verdict.passed:
            return f"{verdict.name}: {verdict.reason}"
    if not code:
        return "no result"
    for line in lines:
        if line.startswith(_SAID):
            return line.removeprefix(_SAID).strip()
    return f"exit code {code}"


def _spread(rates: Sequence[float]) -> float:
    return (max(rates) - min(rates)) / statistics.median(rates)
