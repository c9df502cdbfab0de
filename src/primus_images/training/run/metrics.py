"""Figures of a run: its FLOPs, and medians after the warm-up. docs/metrics.md has the formulas.

The span of attention is the sequence length in the non-causal convention (torchtitan), and in the
causal convention (Megatron-LM) the number of tokens that a token sees. Recomputation in the
backward pass never counts.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast, get_args

from primus_images.gpus.table import Dtype, UnknownPeak, peak_for_mfu
from primus_images.recipes.architecture import Architecture, size
from primus_images.recipes.recipe import Recipe
from primus_images.training.run.logs import Series


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one token (for a diffusion model: of one image) in both conventions."""

    causal: float
    non_causal: float

    def tera(self, rate: float) -> dict[str, float]:
        """Return ``tflops_causal`` and ``tflops_non_causal``, in TFLOP/s, at ``rate`` tokens (or
        images) per second.
        """
        return {
            f"tflops_{convention}": flops * rate / 1e12 for convention, flops in vars(self).items()
        }


def of_recipe_unit(model: Architecture, seq_len: int, *, adapters: int | None = None) -> Flops:
    """Return the FLOPs of training on one token of a sequence of ``seq_len`` (for FLUX: on one
    image).

    ``adapters`` is the number of weights that LoRA trains; the others then take 4 operations each
    instead of 6.
    """
    if model.of_images:
        dit = model.dit
        hidden = model.hidden_size
        layers = dit.double_layers + dit.single_layers
        tokens = dit.image_tokens + dit.text_tokens
        flops = 6.0 * 12 * hidden**2 * layers * tokens + 12.0 * layers * hidden * tokens**2
        return Flops(causal=flops, non_causal=flops)
    count = size(model)
    products = count.active - count.embedding
    if adapters is None:
        linear = 6 * products
    else:
        linear = 4 * products + 6 * adapters
    width = 6 * model.heads * (model.query_size + model.value_size)
    windows = [
        min(model.window, seq_len) if model.has_window(layer) else seq_len
        for layer in range(model.layers)
    ]
    seen = sum(window - window**2 / (2 * seq_len) for window in windows)
    return Flops(causal=linear + width * seen, non_causal=linear + width * sum(windows))


@dataclass(frozen=True, kw_only=True)
class Mfu:
    """Model FLOP/s utilization (0.5 is half) in both conventions, relative to ``peak_tflops``,
    dense, in ``dtype``.
    """

    causal: float
    non_causal: float
    peak_tflops: float
    dtype: str
    gpu: str
    source: str


def of_run(recipe: Recipe, facts: Mapping[str, Any]) -> Flops | None:
    """Return the FLOPs of one token, or image, of a run; None if they are not known."""
    trained = None
    if recipe.mode == "lora":
        trained = facts.get("trainable_parameters")
    if not recipe.architecture.has_formula or (recipe.mode == "lora" and trained is None):
        return None
    return of_recipe_unit(recipe.architecture, recipe.seq_len, adapters=trained)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Aggregates of one run, described in docs/metrics.md. Every rate is that of one rank, which is
    one GPU if any.

    Rates are medians, and ``joules_per_step`` the mean, after ``warmup_steps`` steps; ``spread`` is
    (p90 − p10) ÷ median. ``memory_gib`` is the peak (on a CPU: resident memory). ``no_mfu`` is the
    reason if ``mfu`` is None. The evaluation is the best one, after ``eval_step``. None: no steps,
    not finite, or not reported.
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
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    eval_step: int | None = None


def perplexity(loss: float) -> float:
    """Return e to the power of a mean loss per token."""
    return math.exp(min(loss, 700.0))


def rows(series: Series, recipe: Recipe, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of each :class:`Step`, and its TFLOP/s in both conventions, for JSON."""
    lines = []
    flops = of_run(recipe, facts)
    for step in series.steps:
        rate = step.tokens_per_second / (recipe.seq_len if recipe.architecture.of_images else 1)
        line = asdict(step) | (
            flops.tera(rate) if flops else {"tflops_causal": None, "tflops_non_causal": None}
        )
        line["images_per_second"] = rate if recipe.architecture.of_images else None
        lines.append({key: plain(value) for key, value in line.items()})
    return lines


def summarize(series: Series, recipe: Recipe, facts: Mapping[str, Any]) -> Summary:
    """Aggregate the steps of a run."""
    summary = of_rows(rows(series, recipe, facts), recipe.get("validation.warmup_steps", int))
    try:
        return replace(summary, mfu=_mfu(recipe, facts, summary), no_mfu=None)
    except UnknownPeak as error:
        return replace(summary, no_mfu=error.message)


def _mfu(recipe: Recipe, facts: Mapping[str, Any], summary: Summary) -> Mfu:
    gpu = facts.get("gpu")
    units = facts.get("gpu_units")
    if summary.tflops_causal is None or summary.tflops_non_causal is None:
        raise UnknownPeak("no MFU: the run's FLOP/s are not known")
    if facts.get("device") == "cpu":
        raise UnknownPeak("no MFU: the run was on a CPU")
    if gpu is None:
        raise UnknownPeak("no MFU: the run did not report its GPU")
    if recipe.precision not in get_args(Dtype):
        raise UnknownPeak(f"no MFU: the table of GPUs holds no {recipe.precision.upper()} peak")
    generation, peak, source = peak_for_mfu(gpu, cast("Dtype", recipe.precision))
    if units != generation.compute_units:
        raise UnknownPeak(
            f"no MFU: {units} of the {generation.compute_units} compute units of {generation.title}"
        )
    return Mfu(
        causal=summary.tflops_causal / peak,
        non_causal=summary.tflops_non_causal / peak,
        peak_tflops=peak,
        dtype=recipe.precision,
        gpu=generation.title,
        source=source,
    )


def of_rows(lines: Sequence[Mapping[str, Any]], warmup_steps: int) -> Summary:
    """Aggregate :func:`rows`, of a run that may go on. If there are no more than its warm-up has,
    the last is used.
    """
    measured = lines[warmup_steps:] or lines[-1:]

    def values(key: str, of: Sequence[Mapping[str, Any]] = measured) -> list[float]:
        return [line[key] for line in of if line.get(key) is not None]

    def median(key: str) -> float | None:
        if each := values(key):
            return statistics.median(each)
        return None

    joules = values("joules")
    least, best = min(
        ((line["eval_loss"], line["step"]) for line in lines if line.get("eval_loss") is not None),
        default=(None, None),
    )
    return Summary(
        tokens_per_second=median("tokens_per_second"),
        images_per_second=median("images_per_second"),
        tflops_causal=median("tflops_causal"),
        tflops_non_causal=median("tflops_non_causal"),
        first_loss=lines[0]["loss"] if lines else None,
        last_loss=lines[-1]["loss"] if lines else None,
        spread=_spread(values("tokens_per_second")),
        memory_gib=max(values("memory_gib", lines), default=None),
        warmup_steps=warmup_steps,
        steps=len(lines),
        no_mfu="no MFU: the run has not ended",
        joules_per_step=statistics.fmean(joules) if joules else None,
        eval_loss=least,
        eval_perplexity=None if least is None else perplexity(least),
        eval_step=best,
    )


def sentence(summary: Summary, unit: str) -> str:
    """Return the figures in one line: ``9,630 tokens/s/GPU, … MFU …`` or why there is none.
    ``unit``: GPU or rank.
    """
    parts = [f"{summary.tokens_per_second or 0:,.0f} tokens/s/{unit}"]
    if summary.eval_loss is not None:
        best = f"evaluation loss {summary.eval_loss:.4f} (perplexity {summary.eval_perplexity:.4g})"
        parts.insert(0, f"{best} after step {summary.eval_step}")
    if summary.images_per_second is not None:
        parts.append(f"{summary.images_per_second:,.2f} images/s/{unit}")
    if summary.tflops_causal is not None and summary.tflops_non_causal is not None:
        parts.append(
            f"{summary.tflops_causal:,.4g}/{summary.tflops_non_causal:,.4g} TFLOP/s "
            "causal/non-causal"
        )
    if summary.mfu:
        share = f"{summary.mfu.causal:.1%}/{summary.mfu.non_causal:.1%}".replace("%", " %")
        parts.append(f"MFU {share} of {summary.mfu.peak_tflops:,g} {summary.mfu.dtype.upper()}")
    elif summary.no_mfu:
        parts.append(summary.no_mfu)
    return ", ".join(parts)


def plain(value: float | None) -> float | None:
    """Return ``value`` for JSON: NaN and infinities, which JSON does not have, become None."""
    if value is not None and math.isfinite(value):
        return value
    return None


def _spread(values: Sequence[float]) -> float | None:
    ordered = sorted(values)
    if len(ordered) < 2 or not (median := statistics.median(ordered)):
        return None
    low = ordered[len(ordered) // 10]
    high = ordered[-1 - len(ordered) // 10]
    return (high - low) / median
