"""Checks of a run. Each is a pure function that returns a verdict with the measured value and the
limit.

No check passes without evidence: a run without steps or facts fails all checks that need them.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from primus_images.training.run.logs import Series
from primus_images.yamlfile import read_values

LIMITS: Mapping[str, Any] = read_values(Path(__file__).with_name("limits.yaml")).data


@dataclass(frozen=True)
class Verdict:
    """The result of one check. ``measured`` and ``limit`` are short texts with units.

    A ``skipped`` check has not passed: its evidence is missing, because a job failed or did not
    run.
    """

    name: str
    passed: bool
    reason: str
    _: KW_ONLY
    measured: str = ""
    limit: str = ""
    skipped: bool = False


def of_faults(
    name: str, wrong: Sequence[str], fine: str, *, measured: str = "", limit: str = "0"
) -> Verdict:
    """Return a verdict that passes, with the reason ``fine``, if there are no faults in ``wrong``."""
    more = ""
    if len(wrong) > 1:
        more = f" (and {len(wrong) - 1} more)"
    if wrong:
        reason = wrong[0] + more
    else:
        reason = fine
    return Verdict(
        name, not wrong, reason, measured=measured or f"{len(wrong)} differences", limit=limit
    )


def relative_gap(value: float, other: float | None) -> float:
    """Return the difference divided by the larger value; infinite if a value is missing or not
    finite.
    """
    if value == other:
        return 0.0
    if other is None or not (math.isfinite(value) and math.isfinite(other)):
        return math.inf
    return abs(value - other) / max(abs(value), abs(other))


def skipped(verdict: Verdict, why: str) -> Verdict:
    """Return ``verdict`` as skipped because of ``why``, unless it passed."""
    if verdict.passed:
        return verdict
    return replace(verdict, reason=f"skipped: {why}", measured="", skipped=True)


def exit_code(code: int, cause: str = "") -> Verdict:
    """Check the launcher's exit code; a negative one is a signal. ``cause`` is the reason that the
    job reported.
    """
    reason = cause or (
        f"killed by signal {-code}" if code < 0 else f"the job ended with exit code {code}"
    )
    return Verdict(
        "exit code",
        code == 0,
        reason if code else "all ranks ended with 0",
        measured=str(code),
        limit="0",
    )


def steps_logged(series: Series, first: int, last: int) -> Verdict:
    """Check that the log contains exactly the steps ``first`` … ``last``, and no step with two
    different values.
    """
    seen = {step.step for step in series.steps}
    expected = set(range(first, last + 1))
    complaints = list(series.problems)
    missing = sorted(expected - seen)
    if missing:
        complaints.append(f"missing: {_ranges(missing)}")
    extra = sorted(seen - expected)
    if extra:
        complaints.append(f"not steps of this run: {_ranges(extra)}")
    reason = "; ".join(complaints) or "every step is in the log once"
    measured = f"{len(seen & expected)} of {len(expected)}"
    return Verdict(
        "steps logged", not complaints, reason, measured=measured, limit=f"{first}–{last}"
    )


def finite(series: Series) -> Verdict:
    """Check that loss and gradient norm are finite at every step, and that the gradient norm is
    positive.
    """
    bad = [
        f"step {step.step}: loss {step.loss:g}, gradient norm {step.grad_norm:g}"
        for step in series.steps
        if not (math.isfinite(step.loss) and math.isfinite(step.grad_norm) and step.grad_norm > 0)
    ]
    if not series.steps:
        bad = ["no step was logged"]
    measured = f"{len(bad)} bad of {len(series.steps)} steps"
    return of_faults(
        "finite",
        bad,
        "loss and gradient norm are finite at every step",
        measured=measured,
        limit="0 bad",
    )


def loss_plausible(series: Series, vocabulary: int, tolerance: float) -> Verdict:
    """Check that the first loss is near ln(vocabulary), that of random weights, or above by σ²/2 of
    random logits.
    """
    expected = math.log(vocabulary)
    limit = f"{expected:.3f} ± {tolerance:.0%}, + {LIMITS['spread']:g} for random logits"
    step = series.at(1)
    if step is None:
        return Verdict("first loss", False, "step 1 was not logged", limit=limit)
    passed = (
        (1 - tolerance) * expected <= step.loss <= (1 + tolerance) * expected + LIMITS["spread"]
    )
    reason = f"ln({vocabulary}) = {expected:.3f}" + ("" if passed else "; data or labels are wrong")
    return Verdict("first loss", passed, reason, measured=f"{step.loss:.5f}", limit=limit)


def loss_falls(series: Series, drop: float, *, repeated: bool = False) -> Verdict:
    """Check that the mean loss of the last fifth is at least the fraction ``drop`` below that of
    the first fifth.

    If the reference ``repeated`` every step, it may fall by less: with some seeds, a healthy run's
    jumps at the end.
    """
    limit = f"−{drop:.0%}"
    losses = series.losses
    if len(losses) < 5:
        return Verdict(
            "loss falls", False, "needs at least 5 steps", measured=f"{len(losses)}", limit=limit
        )
    fifth = len(losses) // 5
    start = statistics.fmean(losses[:fifth])
    end = statistics.fmean(losses[-fifth:])
    if start:
        fell = 1 - end / start
    else:
        fell = math.nan
    reason = f"mean of the first fifth {start:.4f}, of the last {end:.4f}"
    if repeated and 0 < fell < drop:
        reason += "; the reference has the same losses"
    measured = f"{-fell:+.1%}".replace("-", "−")
    return Verdict(
        "loss falls",
        fell >= drop or (repeated and fell > 0),
        reason,
        measured=measured,
        limit=limit,
    )


def grad_norm_steady(series: Series, jump: float, *, repeated: bool = False) -> Verdict:
    """Check that no gradient norm exceeds ``jump`` times the median of those before it, as wrong
    scaling causes.

    With some seeds, a healthy run jumps as well, so a jump passes if the reference ``repeated``
    every norm.
    """
    name = "gradient norm steady"
    limit = f"×{jump:g}"
    norms = [step.grad_norm for step in series.steps]
    if len(norms) <= 3:
        return Verdict(name, False, "needs at least 4 steps", limit=limit)
    ratios = [
        (_ratio(norms[n], statistics.median(norms[:n])), series.steps[n].step)
        for n in range(3, len(norms))
    ]
    worst, at = max(ratios, key=lambda ratio: ratio[0])
    reason = f"largest against the running median at step {at}"
    if worst > jump and repeated:
        reason += "; the reference has the same norm"
    return Verdict(name, repeated or worst <= jump, reason, measured=f"×{worst:.2f}", limit=limit)


def _ratio(value: float, median: float) -> float:
    if median:
        ratio = value / median
    else:
        ratio = math.inf
    if math.isnan(ratio):
        return math.inf
    return ratio


_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}
_PROFILED = {"fp32": ("float",), "bf16": ("BFloat16",)}


def precision(facts: Mapping[str, Any], expected: str) -> Verdict:
    """Check that the linear layers computed their products in the requested precision in the first
    step.
    """
    linears = facts.get("linears")
    limit = _DTYPES.get(expected, expected).replace("torch.", "")
    if not linears:
        return Verdict("precision", False, "the run left no facts on its dtypes", limit=limit)
    if expected in _DTYPES:
        complaints, evidence = _plain_products(facts, linears, expected)
    else:
        complaints, evidence = _eight_bit_products(facts, linears)
    if not complaints:
        return Verdict("precision", True, evidence, measured=limit, limit=limit)
    ran = (
        ", ".join(linears["weight_dtypes"])
        or ", ".join(facts.get("matmul_dtypes", {}))
        or "nothing"
    )
    reason = f"{expected} asked, but: {'; '.join(complaints)}"
    return Verdict("precision", False, reason, measured=ran.replace("torch.", ""), limit=limit)


def _plain_products(
    facts: Mapping[str, Any], linears: Mapping[str, Any], precision: str
) -> tuple[list[str], str]:
    expected = _DTYPES[precision]
    calls = sum(linears["weight_dtypes"].values())
    complaints = [
        f"{count} linear {side}s in {dtype}"
        for side in ("weight", "input", "output")
        for dtype, count in linears[f"{side}_dtypes"].items()
        if dtype != expected
    ]
    complaints += [f"{count} {kind}" for kind, count in linears["converted"].items()]
    evidence = f"{calls} linear calls, weights, inputs and outputs"
    if not linears["listened"]:
        products: Mapping[str, int] = facts.get("matmul_dtypes", {})
        other = {
            name: count
            for name, count in products.items()
            if not name.endswith(_PROFILED[precision])
        }
        calls = sum(products.values()) - sum(other.values())
        evidence = f"{calls} matrix products that the profiler saw"
        if other and precision == "bf16":
            share = _share(facts.get("matmul_flops", {}), other, products)
            others = [f"{count} {name}" for name, count in other.items()]
            complaints += others if share > LIMITS["otherwise"] else []
            evidence += (
                f", and in other precisions or unknown {', '.join(others)}, {share:.2%} of all"
            )
    if not calls:
        complaints.append("no linear layer was called")
    if precision == "fp32" and (setting := facts.get("float32_matmul_precision")) != "highest":
        complaints.append(f"float32 matmul precision is {setting!r}")
    return complaints, evidence


def _share(flops: Mapping[str, int], some: Mapping[str, int], products: Mapping[str, int]) -> float:
    untold = sum(count for name, count in products.items() if name not in flops)
    if untold > LIMITS["untold"] * sum(products.values()):
        return 1.0
    return sum(flops.get(name, 0) for name in some) / sum(flops.values())


def _eight_bit_products(
    facts: Mapping[str, Any], linears: Mapping[str, Any]
) -> tuple[list[str], str]:
    converted = sum(linears["converted"].values())
    # Adapters are small products, which the finetune backend keeps in the wider type.
    narrow = [name for name in linears["plain"] if name.rpartition(".")[2] not in LIMITS["wide"]]
    unconverted = [name for name in narrow if ".lora_" not in name]
    complaints = []
    if unconverted:
        complaints.append(
            f"{len(unconverted)} linear layers were left as they are: "
            f"{', '.join(unconverted[:3])} …"
        )
    if not converted:
        complaints.append("no layer computes in 8 bits")
    scaled = {
        name: count for name, count in facts.get("matmul_dtypes", {}).items() if "Float8" in name
    }
    kernels = [
        name
        for name in facts.get("gpu_kernels", ())
        if "e4m3" in name.lower() or "fp8" in name.lower()
    ]
    if facts.get("device") != "cpu" and not scaled and not kernels:
        complaints.append("the profiler saw no product of 8-bit factors")
    evidence = f"{converted} layers converted"
    if scaled:
        evidence += f", {sum(scaled.values())} products of 8-bit factors"
    elif facts.get("device") == "cpu":
        evidence += ", emulated on the CPU"
    return complaints, evidence


def ran_as_asked(facts: Mapping[str, Any], expected: Mapping[str, Any]) -> Verdict:
    """Check that the run's facts have the values of ``expected``."""
    others = {key: value for key, value in expected.items() if facts.get(key) != value}
    wrong = [
        f"{key} is {facts.get(key, 'unknown')!r}, not {value!r}" for key, value in others.items()
    ]
    reason = "; ".join(wrong) or "the run saw what the recipe asks: " + ", ".join(expected)
    measured = f"{len(expected) - len(wrong)} of {len(expected)}"
    return Verdict("configuration", not wrong, reason, measured=measured, limit="all")


def same_steps(
    name: str,
    base: Series,
    other: Series,
    tolerance: float,
    *,
    first: int = 1,
    last: float = math.inf,
    advice: str = "",
) -> Verdict:
    """Check that two runs have the same loss and gradient norm at every step from ``first`` to
    ``last``.
    """
    if tolerance == 0:
        limit = "equal to the last bit"
    else:
        limit = f"relative gap ≤ {tolerance:g}"
    compared = [step for step in base.steps if first <= step.step <= last]
    if not compared:
        return Verdict(name, False, "the base run has no steps to compare with", limit=limit)
    twins = [(step, other.at(step.step)) for step in compared]
    missing = [step.step for step, twin in twins if twin is None]
    pairs = [(step, twin) for step, twin in twins if twin]
    gaps = [
        (max(relative_gap(a.loss, b.loss), relative_gap(a.grad_norm, b.grad_norm)), a.step)
        for a, b in pairs
    ]
    worst, at = max(gaps, default=(0.0, first))
    if missing:
        faults = [f"not logged in the second run: {_ranges(missing)}"]
    else:
        faults = []
    if worst > tolerance:
        faults.append(f"differs most at step {at}")
    fine = f"{len(compared)} steps agree"
    if not (base.exact and other.exact):
        fine += ", as far as the log's digits go"
    if faults:
        reason = "; ".join([*faults, advice] if advice else faults)
    else:
        reason = fine
    return Verdict(
        name, not faults, reason, measured=f"largest relative gap {worst:.2g}", limit=limit
    )


def same_loss(
    precisions: tuple[str, str], base: Series, other: Series, tolerance: float
) -> Verdict:
    """Check that two precisions with the same data and seed agree in the mean loss of the last
    fifth.
    """
    name = f"loss in {precisions[1]}"
    limit = f"relative gap ≤ {tolerance:g}"
    if len(base.losses) < 5 or len(other.losses) < 5:
        return Verdict(name, False, "needs at least 5 steps of both", limit=limit)
    means = [
        statistics.fmean(series.losses[-(len(series.losses) // 5) :]) for series in (base, other)
    ]
    gap = relative_gap(*means)
    reason = f"{means[0]:.4f} in {precisions[0]}, {means[1]:.4f} in {precisions[1]}"
    return Verdict(name, gap <= tolerance, reason, measured=f"{gap:.2g}", limit=limit)


def throughput(measured: float | None, reference: float, tolerance: float) -> Verdict:
    """Check tokens per second and GPU against the recipe's reference for this GPU."""
    least = reference * (1 - tolerance)
    limit = f"≥ {least:,.0f}"
    if measured is None:
        return Verdict("throughput", False, "no step was measured", limit=limit)
    reason = f"{measured / reference:.2f} × the reference of {reference:,.0f} tokens/s/GPU"
    return Verdict(
        "throughput", measured >= least, reason, measured=f"{measured:,.0f}", limit=limit
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending ``numbers`` as text, such as "1, 3–5"."""
    runs = [
        [n for _, n in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
