"""The search for a recipe's fastest settings: the candidates, the order of trying them, and the file to write.

This module runs nothing; :mod:`primus.tuning.trial` measures. The tokens of an optimizer step never change: a candidate
with a smaller micro batch accumulates more of them.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from primus.errors import InputError
from primus.recipes.load import beside, is_path
from primus.recipes.recipe import Recipe
from primus.recipes.resolve import resolve
from primus.recipes.rules import predict
from primus.recipes.setting import CHOICES
from primus.turbo.optimizations import AUTO, OFF, chosen, requested, usable

_GIB = 2**30
# Steps whose losses are compared. In later steps, rounding differences have grown.
_COMPARED = 3


class Point(NamedTuple):
    """One candidate.

    ``words`` are the settings that differ from the start. ``peak`` is the predicted memory of one rank in bytes,
    None on a CPU. ``out`` is the reason why it is not tried, or empty. ``recipe`` is None if it cannot be resolved.
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
    source: str, start: Recipe, available: float | None, missing: Callable[[tuple[str, ...]], Sequence[str]]
) -> list[Point]:
    """Every combination of optimizations, checkpointing and micro batch; the first is ``start``, a recipe ``source``.

    ``available`` are the bytes of a rank that may be used, None on a CPU. ``missing`` returns the packages that
    optimizations need and this machine lacks.
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
            # Named even where it is the start's: with other settings, another of a recipe's list may fit.
            words.append(f"{knows.key('local_batch')}={batch}")
        if batch != start.local_batch:
            # Otherwise the backend would use the new micro batch times the ranks as the global batch.
            words.append(f"{knows.key('global_batch')}={start.global_batch}")
        if batch % start.find("validation.accumulation", 1):
            # Turn off checks that add accumulation steps.
            words.append("validation.accumulation=1")
        peak: float | None = None
        out, recipe = "", None
        try:
            recipe = resolve(source, start.overrides, start.choices, words)
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
    names, setting = chosen(start), start.settings.get("turbo")
    title = setting.value if setting and isinstance(setting.value, str) else ",".join(names) if setting else AUTO
    searched = usable(start) and not (setting and setting.origin.startswith("command line"))
    others = [word for word in (OFF, AUTO) if searched and word != title]
    return [(title, ()), *((word, (f"turbo={word}",)) for word in others)]


def _checkpointing(start: Recipe) -> list[tuple[str, tuple[str, ...]]]:
    head, rows = start.backend, start.knows.checkpointing
    current = "as the recipe"
    others = []
    for row in rows:
        key, title = next(iter(row)), " ".join(map(str, row.values()))
        values = {name: start.settings[f"{head}.{name}"].value for name in row if f"{head}.{name}" in start.settings}
        if values == row or (row[key] == "none" and f"{head}.{key}" not in start.settings):
            current = title
        else:
            others.append((title, tuple(f"{head}.{key}={value}" for key, value in row.items())))
    return [(current, ()), *others]


def search(points: Sequence[Point], measure: Callable[[Point], float | None]) -> Point | None:
    """Return the fastest point, or None if the start, ``points[0]``, has no rate.

    One setting at a time: first the optimizations, then for each checkpointing the largest micro batch and smaller
    ones, as long as that helps; once more if something changed. ``measure`` returns tokens per second, or None for a
    point that failed; it is called once for each point.
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
            row = [point for point in usable if (point.turbo, point.checkpointing) == (turbo, checkpointing)]
            for point in sorted(row, key=lambda point: -point.batch):
                best = max(best, point, key=rate)
                if rate(point) < last:
                    break
                last = rate(point)
        if best is before:
            return best


def different(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> str:
    """Return how ``losses`` of the first steps differ from ``wanted`` by more than ``tolerance`` (relative), or ""."""
    for step, (here, there) in enumerate(zip(losses[:_COMPARED], reference[:_COMPARED], strict=False), 1):
        if not abs(here - there) <= tolerance * abs(there):
            return f"the loss of step {step} is {here:.5f}, at the start {there:.5f}: more than {tolerance:.0e} apart"
    return "" if losses else "it reported no loss"


def gain(start: Sequence[float], winner: Sequence[float]) -> tuple[float, float]:
    """Return the winner's gain in tokens/s (0.1: 10 % faster) and the spread, the larger (max − min) ÷ median."""
    spread = max((max(rates) - min(rates)) / statistics.median(rates) for rates in (start, winner))
    return statistics.median(winner) / statistics.median(start) - 1, spread


def overlay(source: str, winner: Recipe, leave: Sequence[str], because: str, command: str, file: Path) -> str:
    """Return the text of a recipe ``file`` that uses the recipe of ``winner`` and sets the values that were found.

    ``leave`` are keys that only the measurement set. The user's key=value arguments become part of the file.
    """
    keys = []
    for word in winner.overrides:
        key = word.partition("=")[0]
        key = key if key in winner.settings else f"{winner.backend}.{key}"
        if key not in leave:
            keys.append(key)
    below = file.absolute().parent
    use = os.path.relpath(winner.path, below) if is_path(source) else winner.path.name
    when = {choice: winner.settings[choice].value for choice in CHOICES}
    lines = [f"# Written by: {command}", f"uses: [{json.dumps(use)}]"]
    for name in winner.section("assets"):
        asset = winner.asset(name)
        written = winner.get(f"assets.{name}", str)
        if asset is not None and f"assets.{name}" not in keys and beside(file.absolute(), written) != asset:
            lines.append(f"assets.{name}: {json.dumps(os.path.relpath(asset, below))}")
    lines += ["cases:", f"  - when: {json.dumps(when)}", f"    because: {json.dumps(because, ensure_ascii=False)}"]
    lines += [f"    {key}: {json.dumps(winner.settings[key].value)}" for key in dict.fromkeys(keys)]
    return "\n".join(lines) + "\n"
