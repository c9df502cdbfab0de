"""Figures of a run: one JSON line per step, and medians after warm-up."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass

from primus.training.logs import Series

__all__ = ["Summary", "as_json_lines", "plain", "summarize"]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Aggregates of one run. ``tokens_per_second`` is the median per rank after ``warmup_steps`` steps;
    ``spread`` is (p90 − p10) ÷ median of the same; ``memory_gib`` is the peak (on a CPU: resident
    memory). None: no step to tell from, or not finite.
    """

    first_loss: float | None
    last_loss: float | None
    tokens_per_second: float | None
    spread: float | None
    memory_gib: float | None
    warmup_steps: int
    steps: int


def as_json_lines(series: Series) -> str:
    """One line per step: step, loss, grad_norm, tokens_per_second (per rank), memory_gib. NaN: null."""
    lines = []
    for step in series.steps:
        values = {key: plain(value) for key, value in asdict(step).items()}
        lines.append(json.dumps(values) + "\n")
    return "".join(lines)


def summarize(series: Series, warmup_steps: int) -> Summary:
    """Aggregate ``series``; when it is no longer than the warm-up, its last step stands for all."""
    steps = series.steps
    measured = [step.tokens_per_second for step in (steps[warmup_steps:] or steps[-1:])]
    median = statistics.median(measured) if measured else None
    ordered = sorted(measured)
    spread = None
    if median and len(ordered) > 1:
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        spread = (high - low) / median
    return Summary(
        first_loss=plain(steps[0].loss) if steps else None,
        last_loss=plain(steps[-1].loss) if steps else None,
        tokens_per_second=median,
        spread=spread,
        memory_gib=max((step.memory_gib for step in steps), default=None),
        warmup_steps=warmup_steps,
        steps=len(steps),
    )


def plain(value: float | None) -> float | None:
    """``value`` as JSON can hold it: NaN and infinities, which are no JSON, become None."""
    return value if value is not None and math.isfinite(value) else None
