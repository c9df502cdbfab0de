"""Reading a training log as a series of steps, and the time at which each arrives."""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from primus_images.files import text_if_readable

METRICS = "metrics.jsonl"
# What the names of the evaluations of one corpus of a mixture begin with. For MLflow, eval_loss is
# a file, so it cannot be the folder as well.
BY_CORPUS = "eval_loss_of/"
_EVALUATION = re.compile(r"evaluation after step (\d+): loss ([^,\s]+),")
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

    ``eval_loss`` is that of an evaluation after the step, and ``eval_by_corpus`` has those of the
    corpora of a mixture. ``tflops`` are the logged ones, in the
    non-causal convention, with ``tflops_decimals``; None if the run knows none. ``lr`` is the
    learning rate of the step, and ``seconds`` are those from the begin of training to its end.
    ``tokens`` are those of the step on one rank that its rate counts. ``data_hash`` is the
    fingerprint of its samples (:mod:`primus_images.training.run.fingerprint`).
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_second: float
    memory_gib: float
    eval_loss: float | None = None
    eval_by_corpus: Mapping[str, float] = field(default_factory=dict)
    tflops: float | None = None
    tflops_decimals: int = 0
    lr: float | None = None
    seconds: float | None = None
    tokens: float | None = None
    data_hash: str | None = None


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
    """Return the step that a log line reports, or None. A word that is no number counts as NaN."""
    match = _STEP.search(_COLOUR.sub("", line))
    if not match:
        return None
    tflops = None
    if match[7] != "N/A":
        tflops = _number(match[7])
    return Step(
        step=int(match[1]),
        loss=_number(match[2]),
        grad_norm=_number(match[3]),
        memory_gib=max(0.0, float(match[4])),
        tokens_per_second=float(match[6].replace(",", "")),
        tflops=tflops,
        tflops_decimals=len(match[7].partition(".")[2]),
    )


def read_run(folder: Path, newest: str | None = None) -> Series:
    """Return the steps in the log of a run, with exact losses and evaluations where it left them.

    With ``newest``, only those of these lines, which have just been logged.
    """
    last_bytes = None
    text = newest
    if text is None:
        text = text_if_readable(folder / "log.txt")
    else:
        last_bytes = _NEWEST_BYTES
    exact = _entries(folder / "exact.jsonl", last_bytes)
    series = with_exact(read_steps(text), _by_step(exact, "loss", "grad_norm"))
    more = _by_step(exact, "lr", "seconds")
    counted = _by_step(exact, "tokens")
    hashes = _hashes_by_step(exact)
    entries = _entries(folder / "eval.jsonl", last_bytes)
    evaluations = _by_step(entries, "eval_loss")
    corpora = _corpora_by_step(entries)
    problems = list(series.problems)
    for number, word in _EVALUATION.findall(text):
        for loss in evaluations.get(int(number), ()):
            if not _same(_number(word), loss, 1.1e-5):
                problems.append(
                    f"step {number}: the log says evaluation loss {word}, and the run's own figure "
                    f"is {loss}"
                )
    steps = list(series.steps)
    for place, step in enumerate(steps):
        if step.step in evaluations:
            (loss,) = evaluations[step.step]
            of_corpora = corpora.get(step.step, {})
            steps[place] = replace(steps[place], eval_loss=loss, eval_by_corpus=of_corpora)
        if step.step in more:
            lr, seconds = more[step.step]
            steps[place] = replace(steps[place], lr=lr, seconds=seconds)
        if step.step in counted:
            (tokens,) = counted[step.step]
            steps[place] = replace(steps[place], tokens=tokens)
        if step.step in hashes:
            steps[place] = replace(steps[place], data_hash=hashes[step.step])
    return replace(series, steps=tuple(steps), problems=tuple(problems))


def read_steps(text: str) -> Series:
    """Read a run's log, to which every rank prints every step; other values are a problem."""
    merged: dict[int, Step] = {}
    problems: list[str] = []
    for line in text.splitlines():
        step = step_in(line)
        if step is None:
            continue
        earlier = merged.setdefault(step.step, step)
        if not (_same(earlier.loss, step.loss) and _same(earlier.grad_norm, step.grad_norm)):
            problems.append(
                f"step {step.step} is logged twice: loss {earlier.loss} and {step.loss}, gradient "
                f"norm {earlier.grad_norm} and {step.grad_norm}"
            )
        slowest = min(earlier, step, key=lambda one: one.tokens_per_second)
        merged[step.step] = replace(
            earlier,
            tokens_per_second=slowest.tokens_per_second,
            tflops=slowest.tflops,
            tflops_decimals=slowest.tflops_decimals,
            memory_gib=max(earlier.memory_gib, step.memory_gib),
        )
    steps = tuple(merged[number] for number in sorted(merged))
    return Series(steps=steps, problems=tuple(problems))


def _entries(file: Path, last: int | None) -> list[Any]:
    entries = []
    for line in text_if_readable(file, last).splitlines():
        # The last line of a run that was killed may be incomplete, and so is the first of the last
        # bytes.
        with suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def _by_step(entries: Sequence[Any], *keys: str) -> dict[int, tuple[float, ...]]:
    values: dict[int, tuple[float, ...]] = {}
    for entry in entries:
        # A part of a line may be JSON, too, and older runs have fewer keys.
        with suppress(ValueError, KeyError, TypeError):
            values[int(entry["step"])] = tuple(float(entry[key]) for key in keys)
    return values


def _hashes_by_step(entries: Sequence[Any]) -> dict[int, str]:
    values: dict[int, str] = {}
    for entry in entries:
        with suppress(ValueError, KeyError, TypeError):
            values[int(entry["step"])] = str(entry["data_hash"])
    return values


def _corpora_by_step(entries: Sequence[Any]) -> dict[int, dict[str, float]]:
    """Return step → name of a corpus → the loss of the evaluation on it."""
    values: dict[int, dict[str, float]] = {}
    for entry in entries:
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            of_corpora = {}
            for key, word in entry.items():
                if key.startswith(BY_CORPUS):
                    of_corpora[key.removeprefix(BY_CORPUS)] = float(word)
            values[int(entry["step"])] = of_corpora
    return values


def with_exact(series: Series, exact: Mapping[int, tuple[float, ...]]) -> Series:
    """Replace the log's rounded values by the exact ones.

    A pair that differs by more than rounding is a problem.
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
            problems.append(
                f"step {step.step}: the log says loss {step.loss}, gradient norm "
                f"{step.grad_norm}; the run's own figures are {loss}, {norm}"
            )
        steps.append(replace(step, loss=loss, grad_norm=norm))
    complete = bool(steps) and all(step.step in exact for step in steps)
    return Series(steps=tuple(steps), problems=tuple(problems), exact=complete)


def _number(word: str) -> float:
    try:
        return float(word.replace(",", ""))
    except ValueError:
        return math.nan


def _same(value: float, other: float, within: float = 0.0) -> bool:
    if math.isnan(value) and math.isnan(other):
        return True
    return value == other or abs(value - other) <= within


class Clock:
    """Records in ``arrivals`` when each step is first logged, in seconds of a monotonic clock.

    Every rank logs each step. When the next one begins, or at :meth:`close`, ``on_step`` gets all
    lines of a step.
    """

    def __init__(self, on_step: Callable[[str], None]) -> None:
        self.arrivals: dict[int, float] = {}
        self._on_step = on_step
        self._newest = 0
        self._lines = ""

    def line(self, text: str) -> None:
        """Handle a line of the job's log."""
        step = step_in(text)
        if step is None:
            return
        if step.step not in self.arrivals:
            self.arrivals[step.step] = time.monotonic()
            self.close()
            self._newest = step.step
        if step.step == self._newest:
            self._lines += text

    def close(self) -> None:
        """Handle the end of the newest step."""
        if self._lines:
            self._on_step(self._lines)
        self._lines = ""
