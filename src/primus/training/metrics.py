"""Figures of a run: one JSON line per step, and medians after the warm-up. docs/metrics.md has the formulas."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from primus.gpus.table import UnknownPeak
from primus.training.flops import Flops
from primus.training.logs import Series, Step
from primus.training.utilization import Mfu, Work, mfu_of


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Aggregates of one run. Every rate is that of one rank, which is one GPU if there are any.

    ``tokens_per_second`` is the median after ``warmup_steps`` steps, and ``spread`` the (p90 − p10) ÷ median of the
    same steps; ``images_per_second`` is the median of a model that makes images. ``tflops_causal`` and
    ``tflops_non_causal`` are that median times the FLOPs of one token or image, in 10¹² per second. ``mfu`` is None
    if ``no_mfu`` gives a reason. ``memory_gib`` is the peak (on a CPU: resident memory). ``joules_per_step`` is the
    mean after warm-up. ``slow_rank`` names the rank that the others wait for, in a sentence. None: no steps, not
    finite, or not reported.
    """

    first_loss: float | None
    last_loss: float | None
    tokens_per_second: float | None
    spread: float | None
    memory_gib: float | None
    warmup_steps: int
    steps: int
    images_per_second: float | None = None
    tflops_causal: float | None = None
    tflops_non_causal: float | None = None
    mfu: Mfu | None = None
    no_mfu: str | None = None
    joules_per_step: float | None = None
    slow_rank: str | None = None


def as_json_lines(series: Series, done: Work | None = None) -> str:
    """Return one line per step: the fields of :class:`Step`, and TFLOP/s in both conventions. NaN becomes null."""
    lines = []
    for step in series.steps:
        values = {key: plain(value) for key, value in asdict(step).items()}
        tflops = _tflops(done, _rate(step, done))
        values["tflops_causal"] = tflops.causal if tflops else None
        values["tflops_non_causal"] = tflops.non_causal if tflops else None
        lines.append(json.dumps(values) + "\n")
    return "".join(lines)


def summarize(series: Series, warmup_steps: int, done: Work | None = None, slow_rank: str | None = None) -> Summary:
    """Aggregate ``series``. If it is not longer than the warm-up, its last step is used.

    Without ``done``, the work of the run, there is no TFLOP/s and no MFU.
    """
    steps = series.steps
    measured = steps[warmup_steps:] or steps[-1:]
    tokens = [step.tokens_per_second for step in measured]
    images = [step.images_per_second for step in measured if step.images_per_second is not None]
    joules = [step.joules for step in measured if step.joules is not None]
    rates = [rate for step in measured if (rate := _rate(step, done)) is not None]
    tflops = _tflops(done, statistics.median(rates) if rates else None)
    found, why = _mfu(done, tflops)
    return Summary(
        first_loss=plain(steps[0].loss) if steps else None,
        last_loss=plain(steps[-1].loss) if steps else None,
        tokens_per_second=statistics.median(tokens) if tokens else None,
        spread=_spread(tokens),
        memory_gib=max((step.memory_gib for step in steps), default=None),
        warmup_steps=warmup_steps,
        steps=len(steps),
        images_per_second=statistics.median(images) if images else None,
        tflops_causal=tflops.causal if tflops else None,
        tflops_non_causal=tflops.non_causal if tflops else None,
        mfu=found,
        no_mfu=why,
        joules_per_step=statistics.fmean(joules) if joules else None,
        slow_rank=slow_rank,
    )


def sentence(summary: Summary, unit: str) -> str:
    """Return the figures in one line: ``9,630 tokens/s/GPU, 496/558 TFLOP/s causal/non-causal, MFU …`` or why there
    is none.

    ``unit`` is ``GPU`` or ``rank``.
    """
    parts = [f"{summary.tokens_per_second or 0:,.0f} tokens/s/{unit}"]
    if summary.images_per_second is not None:
        parts.append(f"{summary.images_per_second:,.2f} images/s/{unit}")
    if summary.tflops_causal is not None and summary.tflops_non_causal is not None:
        parts.append(f"{summary.tflops_causal:,.4g}/{summary.tflops_non_causal:,.4g} TFLOP/s causal/non-causal")
    if summary.mfu:
        share = f"{summary.mfu.causal:.1%}/{summary.mfu.non_causal:.1%}".replace("%", " %")
        parts.append(f"MFU {share} of {summary.mfu.peak_tflops:,g} {summary.mfu.dtype.upper()}")
    elif summary.no_mfu:
        parts.append(summary.no_mfu)
    return ", ".join(parts)


def plain(value: float | None) -> float | None:
    """Return ``value`` for JSON: NaN and infinities, which JSON does not have, become None."""
    return value if value is not None and math.isfinite(value) else None


def _spread(values: Sequence[float]) -> float | None:
    ordered = sorted(values)
    if len(ordered) < 2 or not (median := statistics.median(ordered)):
        return None
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return (high - low) / median


def _rate(step: Step, done: Work | None) -> float | None:
    """Return units of work per second: images if the FLOPs are those of an image, else tokens."""
    return step.images_per_second if done and done.per_image else step.tokens_per_second


def _tflops(done: Work | None, rate: float | None) -> Flops | None:
    if done is None or done.flops is None or rate is None:
        return None
    return Flops(causal=done.flops.causal * rate / 1e12, non_causal=done.flops.non_causal * rate / 1e12)


def _mfu(done: Work | None, tflops: Flops | None) -> tuple[Mfu | None, str | None]:
    if done is None or tflops is None:
        return None, "no MFU: the run's FLOP/s are not known"
    try:
        return mfu_of(done, tflops), None
    except UnknownPeak as error:
        return None, error.message
