"""Reading a training log as a series of steps, and the time at which each arrives. Contradictions
are problems.
"""

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from primus_images.files import text_if_readable
from primus_images.refusals import refusal

METRICS = "metrics.jsonl"
# Holds the entries of several steps.
_NEWEST_BYTES = 4096
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# torchtitan's format, which our own loop also uses. Loss and norm can be any word, so that NaN is
# read, too.
_STEP = re.compile(
    r"(?<!validate )step:\s*(\d+)\s+loss:\s*(\S+)\s+grad_norm:\s*(\S+)\s+"
    r"memory:\s*(-?[\d.]+)\s*GiB\((-?[\d.]+)%\)\s+tps:\s*([\d,]+)\s+tflops:\s*([\d,.]+|N/A)\s+mfu:\s*([\d.]+%|N/A)"
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step. Rates are those of the slowest rank, ``memory_gib`` that of the rank with
    the most.

    ``joules`` is the energy per GPU, the mean of this node. ``eval_loss`` is that of an evaluation
    after the step.
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_second: float
    memory_gib: float
    joules: float | None = None
    eval_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """Steps in ascending order, each once, and the problems of their log. ``exact``: nothing is
    rounded as in it.
    """

    steps: tuple[Step, ...] = ()
    problems: tuple[str, ...] = ()
    exact: bool = False

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every step, in order."""
        return tuple(step.loss for step in self.steps)

    def at(self, number: int) -> Step | None:
        """Return step ``number``, or None if it was not logged."""
        return next((step for step in self.steps if step.step == number), None)


def step_in(line: str) -> Step | None:
    """Return the step that a log line reports, or None. A word that is not a number counts as NaN."""
    match = _STEP.search(_COLOUR.sub("", line))
    if not match:
        return None
    return Step(
        step=int(match[1]),
        loss=_number(match[2]),
        grad_norm=_number(match[3]),
        memory_gib=max(0.0, float(match[4])),
        tokens_per_second=float(match[6].replace(",", "")),
    )


def read_run(folder: Path, newest: str | None = None) -> Series:
    """Return the steps in the log of a run, with exact values, joules and evaluations where the run
    left them.

    With ``newest``, only those of these lines, which have just been logged.
    """
    if newest is None:
        last = None
    else:
        last = _NEWEST_BYTES
    exact = _by_step(folder / "exact.jsonl", last, "loss", "grad_norm")
    series = with_exact(
        read_steps(text_if_readable(folder / "log.txt") if newest is None else newest), exact
    )
    joules = _by_step(folder / METRICS, last, "joules")
    losses = _by_step(folder / "eval.jsonl", last, "eval_loss")
    none = (None,)
    steps = [
        replace(
            step, joules=joules.get(step.step, none)[0], eval_loss=losses.get(step.step, none)[0]
        )
        for step in series.steps
    ]
    return replace(series, steps=tuple(steps))


def read_steps(text: str) -> Series:
    """Read a run's log, to which every rank prints every step; lines that disagree are a problem."""
    merged: dict[int, Step] = {}
    problems: list[str] = []
    for line in text.splitlines():
        step = step_in(line)
        if step is None or (earlier := merged.setdefault(step.step, step)) is step:
            continue
        if not (_same(earlier.loss, step.loss) and _same(earlier.grad_norm, step.grad_norm)):
            problems.append(refusal("logged_twice", earlier=earlier, step=step).message)
        merged[step.step] = replace(
            earlier,
            tokens_per_second=min(earlier.tokens_per_second, step.tokens_per_second),
            memory_gib=max(earlier.memory_gib, step.memory_gib),
        )
    return Series(
        steps=tuple(merged[number] for number in sorted(merged)), problems=tuple(problems)
    )


def _by_step(file: Path, last: int | None, *keys: str) -> dict[int, tuple[float, ...]]:
    values: dict[int, tuple[float, ...]] = {}
    for line in text_if_readable(file, last).splitlines():
        # The last line of a run that was killed may be incomplete, and so is the first of the last
        # bytes.
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            values[int(entry["step"])] = tuple(float(entry[key]) for key in keys)
    return values


def with_exact(series: Series, exact: Mapping[int, tuple[float, ...]]) -> Series:
    """Replace the log's rounded values by the exact ones. A pair that differs by more than rounding
    is a problem.
    """
    steps = []
    problems = list(series.problems)
    for step in series.steps:
        if step.step not in exact:
            steps.append(step)
            continue
        loss, norm = exact[step.step]
        # The log has five decimals of the loss and four of the gradient norm.
        if not (_same(step.loss, loss, 1.1e-5) and _same(step.grad_norm, norm, 1.1e-4)):
            problems.append(refusal("other_in_log", step=step, loss=loss, norm=norm).message)
        steps.append(replace(step, loss=loss, grad_norm=norm))
    complete = bool(steps) and all(step.step in exact for step in steps)
    return Series(steps=tuple(steps), problems=tuple(problems), exact=complete)


def _number(word: str) -> float:
    try:
        return float(word.replace(",", ""))
    except ValueError:
        return math.nan


def _same(value: float, other: float, within: float = 0.0) -> bool:
    return (
        value == other or abs(value - other) <= within or (math.isnan(value) and math.isnan(other))
    )


Meter = Callable[[], float | None]


class Clock:
    """Records in ``arrivals`` when the first line of each step arrives, in seconds of a monotonic
    clock.

    ``meter`` reads the joules per GPU since a fixed time. When the next step begins, or at
    :meth:`close`, ``on_step`` gets all lines of a step, since every rank prints one, and the joules
    that were used since the step before.
    """

    def __init__(self, meter: Meter | None, on_step: Callable[[str, float | None], None]) -> None:
        self.arrivals: dict[int, float] = {}
        self._meter = meter
        self._on_step = on_step
        self._joules: float | None = None
        self._used: float | None = None
        self._lines = ""

    def line(self, text: str) -> None:
        """Handle a line of the job's log."""
        step = step_in(text)
        if step is None or step.step in self.arrivals:
            self._lines += text if step and step.step == next(reversed(self.arrivals)) else ""
            return
        self.close()
        self._lines = text
        self.arrivals[step.step] = time.monotonic()
        now = None
        if self._meter:
            now = self._meter()
        before = self._joules
        self._joules = now
        if now is not None and before is not None and now > before:
            self._used = round(now - before, 3)
        else:
            self._used = None

    def close(self) -> None:
        """Handle the end of the newest step."""
        if self._lines:
            self._on_step(self._lines, self._used)
