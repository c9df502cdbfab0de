"""Figures of a run: its FLOPs, and medians after the warm-up. docs/metrics.md has the formulas.

The span of attention is the sequence length in the non-causal convention (torchtitan), and in the
causal convention (Megatron-LM) the number of tokens that a token sees. Recomputation in the
backward pass never counts.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, cast, get_args

from primus_images.gpus.table import Dtype, Generation, UnknownPeak, peak_for_mfu
from primus_images.recipes.architecture import Architecture, size
from primus_images.recipes.recipe import Recipe
from primus_images.training.run.logs import BY_CORPUS, Series


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
    """Return the FLOPs of training on one token of a sequence of ``seq_len`` (for FLUX: one image).

    ``adapters`` is the number of weights that LoRA trains; the others then take 4 operations each
    instead of 6.
    """
    if model.of_images:
        return _of_image(model)
    count = size(model)
    products = count.active - count.embedding
    linear = 6 * products
    if adapters is not None:
        linear = 4 * products + 6 * adapters
    width = 6 * model.heads * (model.query_size + model.value_size)
    span = 0
    seen = 0.0
    for layer in range(model.layers):
        window = seq_len
        if model.has_window(layer):
            window = min(model.window, seq_len)
        span += window
        seen += window - window**2 / (2 * seq_len)
    return Flops(causal=linear + width * seen, non_causal=linear + width * span)


def _of_image(model: Architecture) -> Flops:
    hidden = model.hidden_size
    layers = model.dit.double_layers + model.dit.single_layers
    tokens = model.dit.image_tokens + model.dit.text_tokens
    flops = 6.0 * 12 * hidden**2 * layers * tokens + 12.0 * layers * hidden * tokens**2
    return Flops(causal=flops, non_causal=flops)


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
    if not recipe.architecture.has_formula:
        return None
    if recipe.mode != "lora":
        return of_recipe_unit(recipe.architecture, recipe.seq_len)
    trained = facts.get("trainable_parameters")
    if trained is None:
        return None
    return of_recipe_unit(recipe.architecture, recipe.seq_len, adapters=trained)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Aggregates of one run, described in docs/metrics.md.

    Every rate is that of one rank, which is one GPU if any: a median after ``warmup_steps`` steps;
    ``spread`` is (p90 − p10) ÷ median. ``memory_gib`` is the peak (on a CPU: resident memory).
    ``no_mfu`` is the reason if ``mfu`` is None. The evaluation is the best one, after
    ``eval_step``. None: no steps, not finite, or not reported.
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
    eval_loss: float | None = None
    eval_perplexity: float | None = None
    eval_step: int | None = None


def perplexity(loss: float) -> float:
    """Return e to the power of a mean loss per token."""
    return math.exp(min(loss, 700.0))


def rows(series: Series, recipe: Recipe, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of each :class:`Step`, the tokens that were trained until its end, and its
    TFLOP/s and MFU in both conventions, for JSON.
    """
    lines = []
    flops = of_run(recipe, facts)
    peak = None
    with suppress(UnknownPeak):
        _, peak, _ = _peak(recipe, facts)
    for step in series.steps:
        rate = step.tokens_per_second
        line = asdict(step)
        # The logged FLOP/s are judged, and not used.
        del line["tflops"], line["tflops_decimals"], line["eval_by_corpus"], line["data_hash"]
        for name, loss in step.eval_by_corpus.items():
            line[f"{BY_CORPUS}{name}"] = loss
        line["tokens"] = step.step * recipe.global_batch * recipe.seq_len
        line["images_per_second"] = None
        if recipe.architecture.of_images:
            rate /= recipe.seq_len
            line["images_per_second"] = rate
        for convention in ("causal", "non_causal"):
            line[f"tflops_{convention}"] = None
            line[f"mfu_{convention}"] = None
            if flops:
                tera = flops.tera(rate)[f"tflops_{convention}"]
                line[f"tflops_{convention}"] = tera
                if peak:
                    line[f"mfu_{convention}"] = tera / peak
        lines.append({key: plain(value) for key, value in line.items()})
    return lines


def lines_of(series: Series, recipe: Recipe, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``: the figures of :func:`rows`, and the fingerprint of
    each step's samples.
    """
    lines = rows(series, recipe, facts)
    for line, step in zip(lines, series.steps, strict=True):
        line["data_hash"] = step.data_hash
    return lines


def summarize(series: Series, recipe: Recipe, facts: Mapping[str, Any]) -> Summary:
    """Aggregate the steps of a run."""
    summary = of_rows(rows(series, recipe, facts), recipe.get("validation.warmup_steps", int))
    try:
        return replace(summary, mfu=_mfu(recipe, facts, summary), no_mfu=None)
    except UnknownPeak as error:
        return replace(summary, no_mfu=error.message)


def _mfu(recipe: Recipe, facts: Mapping[str, Any], summary: Summary) -> Mfu:
    if summary.tflops_causal is None or summary.tflops_non_causal is None:
        raise UnknownPeak("no MFU: the run's FLOP/s are not known")
    generation, peak, source = _peak(recipe, facts)
    return Mfu(
        causal=summary.tflops_causal / peak,
        non_causal=summary.tflops_non_causal / peak,
        peak_tflops=peak,
        dtype=recipe.precision,
        gpu=generation.title,
        source=source,
    )


def _peak(recipe: Recipe, facts: Mapping[str, Any]) -> tuple[Generation, float, str]:
    """Return the GPU of a run, its TFLOP/s in the run's precision, and their source.

    Raises UnknownPeak, with the reason, if there is no MFU.
    """
    gpu = facts.get("gpu")
    units = facts.get("gpu_units")
    if facts.get("device") == "cpu":
        raise UnknownPeak("no MFU: the run was on a CPU")
    if gpu is None:
        raise UnknownPeak("no MFU: the run did not report its GPU")
    return peak_of(gpu, units, recipe.precision)


def peak_of(gpu: str, units: int | None, precision: str) -> tuple[Generation, float, str]:
    """Return the GPU that PyTorch calls ``gpu``, its TFLOP/s in ``precision``, and their source.

    ``units`` are its compute units: a part of a GPU has fewer than the whole. Raises UnknownPeak,
    with the reason, if there is no MFU.
    """
    if precision not in get_args(Dtype):
        raise UnknownPeak(f"no MFU: the table of GPUs holds no {precision.upper()} peak")
    generation, peak, source = peak_for_mfu(gpu, cast("Dtype", precision))
    if units != generation.compute_units:
        raise UnknownPeak(
            f"no MFU: {units} of the {generation.compute_units} compute units of {generation.title}"
        )
    return generation, peak, source


def of_rows(lines: Sequence[Mapping[str, Any]], warmup_steps: int) -> Summary:
    """Aggregate :func:`rows`, of a run that may go on.

    If there are no more than its warm-up has, the last is used.
    """
    measured = lines[warmup_steps:] or lines[-1:]
    best: Mapping[str, Any] = {}
    evaluated = [line for line in lines if line.get("eval_loss") is not None]
    if evaluated:
        best = min(evaluated, key=lambda line: line["eval_loss"])
    eval_loss = best.get("eval_loss")
    first: Mapping[str, Any] = {}
    last: Mapping[str, Any] = {}
    if lines:
        first = lines[0]
        last = lines[-1]
    return Summary(
        tokens_per_second=_median(measured, "tokens_per_second"),
        images_per_second=_median(measured, "images_per_second"),
        tflops_causal=_median(measured, "tflops_causal"),
        tflops_non_causal=_median(measured, "tflops_non_causal"),
        first_loss=first.get("loss"),
        last_loss=last.get("loss"),
        spread=_spread(_values(measured, "tokens_per_second")),
        memory_gib=max(_values(lines, "memory_gib"), default=None),
        warmup_steps=warmup_steps,
        steps=len(lines),
        no_mfu="no MFU: the run has not ended",
        eval_loss=eval_loss,
        eval_perplexity=None if eval_loss is None else perplexity(eval_loss),
        eval_step=best.get("step"),
    )


def time_between_steps(series: Series, recipe: Recipe) -> tuple[float, float]:
    """Return the seconds after the first step, and how many of them no step took.

    These are those of evaluations and checkpoints. Both are 0 if the times are not known.
    """
    timed = [step for step in series.steps if step.seconds is not None and step.tokens_per_second]
    if len(timed) < 2:
        return 0.0, 0.0
    whole = (timed[-1].seconds or 0.0) - (timed[0].seconds or 0.0)
    tokens = recipe.global_batch * recipe.seq_len / recipe.world_size
    trained = sum((step.tokens or tokens) / step.tokens_per_second for step in timed[1:])
    return whole, max(0.0, whole - trained)


def _values(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [line[key] for line in lines if line.get(key) is not None]


def _median(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = _values(lines, key)
    if values:
        return statistics.median(values)
    return None


def sentence(summary: Summary, unit: str) -> str:
    """Return the figures in one line: ``9,630 tokens/s/GPU, … MFU …`` or why there is none.

    ``unit``: GPU or rank.
    """
    parts = []
    if summary.eval_loss is not None:
        best = f"evaluation loss {summary.eval_loss:.4f} (perplexity {summary.eval_perplexity:.4g})"
        parts.append(f"{best} after step {summary.eval_step}")
    parts.append(f"{summary.tokens_per_second or 0:,.0f} tokens/s/{unit}")
    if summary.images_per_second is not None:
        parts.append(f"{summary.images_per_second:,.2f} images/s/{unit}")
    if summary.tflops_causal is not None and summary.tflops_non_causal is not None:
        rates = f"{summary.tflops_causal:,.4g}/{summary.tflops_non_causal:,.4g}"
        parts.append(f"{rates} TFLOP/s causal/non-causal")
    if summary.mfu:
        share = f"{summary.mfu.causal * 100:.1f} %/{summary.mfu.non_causal * 100:.1f} %"
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
    if len(ordered) < 2:
        return None
    median = statistics.median(ordered)
    if not median:
        return None
    low = ordered[len(ordered) // 10]
    high = ordered[-1 - len(ordered) // 10]
    return (high - low) / median
