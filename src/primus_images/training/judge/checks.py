"""Checks of a run: pure functions that return a verdict with the measured value and the limit.

No check passes without evidence: a run without steps or facts fails all checks that need them.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from primus_images.training.run.logs import Series
from primus_images.yamlfile import read_values

LIMITS: Mapping[str, Any] = read_values(Path(__file__).with_name("limits.yaml")).data
_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}
_PROFILED = {"fp32": "float", "bf16": "BFloat16"}


@dataclass(frozen=True)
class Verdict:
    """The result of one check. ``measured`` and ``limit`` are short texts with units.

    A ``skipped`` check has not passed: its evidence is missing, as a job failed or did not run.
    """

    name: str
    passed: bool
    reason: str
    _: KW_ONLY
    measured: str = ""
    limit: str = ""
    skipped: bool = False


@dataclass(frozen=True)
class Steps:
    """The steps from ``first`` to ``last``."""

    first: int = 1
    last: float = math.inf


EVERY_STEP = Steps()


def of_faults(
    name: str, faults: Sequence[str], fine: str, *, measured: str = "", limit: str = "0"
) -> Verdict:
    """Return a verdict that passes, with the reason ``fine``, if there are no ``faults``."""
    reason = fine
    if faults:
        reason = faults[0]
    if len(faults) > 1:
        reason += f" (and {len(faults) - 1} more)"
    measured = measured or f"{len(faults)} differences"
    return Verdict(name, not faults, reason, measured=measured, limit=limit)


def relative_gap(value: float, other: float | None) -> float:
    """Return the difference divided by the larger value.

    It is infinite if a value is missing or not finite.
    """
    if value == other:
        return 0.0
    if other is None or not (math.isfinite(value) and math.isfinite(other)):
        return math.inf
    largest = max(abs(value), abs(other))
    return abs(value - other) / largest


def skipped(verdict: Verdict, why: str) -> Verdict:
    """Return ``verdict`` as skipped because of ``why``, unless it passed."""
    if verdict.passed:
        return verdict
    return replace(verdict, reason=f"skipped: {why}", measured="", skipped=True)


def exit_code(code: int, cause: str = "") -> Verdict:
    """Check the launcher's exit code; a negative one is a signal.

    ``cause`` is the reason that the job reported.
    """
    reason = f"the job ended with exit code {code}"
    if code < 0:
        reason = f"killed by signal {-code}"
    if code == 0:
        reason = "all ranks ended with 0"
    elif cause:
        reason = cause
    return Verdict("exit code", code == 0, reason, measured=str(code), limit="0")


def steps_logged(series: Series, first: int, last: int) -> Verdict:
    """Check that the log contains exactly the steps ``first`` … ``last``, each with one value."""
    logged = {step.step for step in series.steps}
    expected = set(range(first, last + 1))
    complaints = list(series.problems)
    missing = sorted(expected - logged)
    if missing:
        complaints.append(f"missing: {_ranges(missing)}")
    extra = sorted(logged - expected)
    if extra:
        complaints.append(f"not steps of this run: {_ranges(extra)}")
    reason = "; ".join(complaints) or "every step is in the log once"
    present = logged & expected
    measured = f"{len(present)} of {len(expected)}"
    limit = f"{first}–{last}"
    return Verdict("steps logged", not complaints, reason, measured=measured, limit=limit)


def finite(series: Series) -> Verdict:
    """Check that loss and gradient norm are finite at every step, and the norm positive."""
    bad = []
    for step in series.steps:
        if not math.isfinite(step.loss) or not 0 < step.grad_norm < math.inf:
            figures = f"loss {step.loss:g}, gradient norm {step.grad_norm:g}"
            bad.append(f"step {step.step}: {figures}")
    if not series.steps:
        bad.append("no step was logged")
    fine = "loss and gradient norm are finite at every step"
    measured = f"{len(bad)} bad of {len(series.steps)} steps"
    return of_faults("finite", bad, fine, measured=measured, limit="0 bad")


def loss_plausible(series: Series, vocabulary: int, tolerance: float) -> Verdict:
    """Check that the first loss is near ln(vocabulary), as random weights have it.

    It may be above by σ²/2 of random logits.
    """
    expected = math.log(vocabulary)
    spread = LIMITS["spread"]
    limit = f"{expected:.3f} ± {tolerance:.0%}, + {spread:g} for random logits"
    step = series.at(1)
    if step is None:
        return Verdict("first loss", False, "step 1 was not logged", limit=limit)
    least = (1 - tolerance) * expected
    most = (1 + tolerance) * expected + spread
    passed = least <= step.loss <= most
    reason = f"ln({vocabulary}) = {expected:.3f}"
    if not passed:
        reason += "; data or labels are wrong"
    return Verdict("first loss", passed, reason, measured=f"{step.loss:.5f}", limit=limit)


def loss_falls(series: Series, drop: float, *, repeated: bool = False) -> Verdict:
    """Check that the mean loss of the last fifth is by ``drop`` below that of the first fifth.

    If the reference ``repeated`` every step, it may fall by less: with some seeds, a healthy run's
    jumps at the end.
    """
    limit = f"−{drop:.0%}"
    losses = series.losses
    if len(losses) < 5:
        reason = "needs at least 5 steps"
        return Verdict("loss falls", False, reason, measured=f"{len(losses)}", limit=limit)
    fifth = len(losses) // 5
    start = statistics.fmean(losses[:fifth])
    end = statistics.fmean(losses[-fifth:])
    fell = math.nan
    if start:
        fell = 1 - end / start
    reason = f"mean of the first fifth {start:.4f}, of the last {end:.4f}"
    if repeated and 0 < fell < drop:
        reason += "; the reference has the same losses"
    measured = f"{-fell:+.1%}".replace("-", "−")
    passed = fell >= drop or (repeated and fell > 0)
    return Verdict("loss falls", passed, reason, measured=measured, limit=limit)


def grad_norm_steady(series: Series, jump: float, *, repeated: bool = False) -> Verdict:
    """Check that no gradient norm exceeds ``jump`` times the median of those before it.

    Wrong scaling causes such jumps. With some seeds, a healthy run jumps as well, so a jump passes
    if the reference ``repeated`` every norm.
    """
    name = "gradient norm steady"
    limit = f"×{jump:g}"
    norms = [step.grad_norm for step in series.steps]
    if len(norms) <= 3:
        return Verdict(name, False, "needs at least 4 steps", limit=limit)
    ratios = []
    for place in range(3, len(norms)):
        median = statistics.median(norms[:place])
        ratios.append(_ratio(norms[place], median))
    worst = max(ratios)
    place = 3 + ratios.index(worst)
    at = series.steps[place].step
    reason = f"largest against the running median at step {at}"
    if worst > jump and repeated:
        reason += "; the reference has the same norm"
    passed = repeated or worst <= jump
    return Verdict(name, passed, reason, measured=f"×{worst:.2f}", limit=limit)


def _ratio(value: float, median: float) -> float:
    if not median:
        return math.inf
    ratio = value / median
    if math.isnan(ratio):
        return math.inf
    return ratio


def precision(facts: Mapping[str, Any], expected: str) -> Verdict:
    """Check that linear layers computed in the requested precision in the first step."""
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
    dtypes = linears["weight_dtypes"] or facts.get("matmul_dtypes") or ["nothing"]
    measured = ", ".join(dtypes).replace("torch.", "")
    reason = f"{expected} asked, but: {'; '.join(complaints)}"
    return Verdict("precision", False, reason, measured=measured, limit=limit)


def _plain_products(
    facts: Mapping[str, Any], linears: Mapping[str, Any], precision: str
) -> tuple[list[str], str]:
    """Return what of the products is not in ``precision``, and a sentence on what was seen."""
    complaints = []
    for side in ("weight", "input", "output"):
        for dtype, count in linears[f"{side}_dtypes"].items():
            if dtype != _DTYPES[precision]:
                complaints.append(f"{count} linear {side}s in {dtype}")
    complaints += [f"{count} {kind}" for kind, count in linears["converted"].items()]
    if linears["listened"]:
        calls = sum(linears["weight_dtypes"].values())
        evidence = f"{calls} linear calls, weights, inputs and outputs"
    else:
        calls, others, evidence = _profiled_products(facts, precision)
        complaints += others
    if not calls:
        complaints.append("no linear layer was called")
    setting = facts.get("float32_matmul_precision")
    if precision == "fp32" and setting != "highest":
        complaints.append(f"float32 matmul precision is {setting!r}")
    return complaints, evidence


def _profiled_products(facts: Mapping[str, Any], precision: str) -> tuple[int, list[str], str]:
    """Return the number of products in ``precision`` that the profiler saw, too many others, and a
    sentence.
    """
    products: dict[str, int] = dict(facts.get("matmul_dtypes", {}))
    asked = _PROFILED[precision]
    others = {}
    calls = 0
    for name, count in products.items():
        if name.endswith(asked):
            calls += count
        else:
            others[name] = count
    evidence = f"{calls} matrix products that the profiler saw"
    if not others or precision != "bf16":
        return calls, [], evidence
    share = _share(facts.get("matmul_flops", {}), others, products)
    counts = [f"{count} {name}" for name, count in others.items()]
    listed = ", ".join(counts)
    evidence += f", and in other precisions or unknown {listed}, {share:.2%} of all"
    if share > LIMITS["otherwise"]:
        return calls, counts, evidence
    return calls, [], evidence


def _share(flops: Mapping[str, int], some: Mapping[str, int], products: Mapping[str, int]) -> float:
    untold = 0
    for name, count in products.items():
        if name not in flops:
            untold += count
    every = sum(products.values())
    if untold > LIMITS["untold"] * every:
        return 1.0
    of_some = sum(flops.get(name, 0) for name in some)
    return of_some / sum(flops.values())


def _eight_bit_products(
    facts: Mapping[str, Any], linears: Mapping[str, Any]
) -> tuple[list[str], str]:
    complaints = []
    unconverted = [name for name in linears["plain"] if _must_convert(name)]
    if unconverted:
        some = ", ".join(unconverted[:3])
        complaints.append(f"{len(unconverted)} linear layers were left as they are: {some} …")
    converted = sum(linears["converted"].values())
    if not converted:
        complaints.append("no layer computes in 8 bits")
    evidence = f"{converted} layers converted"
    dtypes = facts.get("matmul_dtypes", {})
    products = 0
    for name, count in dtypes.items():
        if "Float8" in name:
            products += count
    if products:
        evidence += f", {products} products of 8-bit factors"
    elif facts.get("device") == "cpu":
        evidence += ", emulated on the CPU"
    elif not any(map(_is_eight_bit_kernel, facts.get("gpu_kernels", ()))):
        complaints.append("the profiler saw no product of 8-bit factors")
    return complaints, evidence


def _must_convert(layer: str) -> bool:
    _, _, kind = layer.rpartition(".")
    # Adapters are small products, which the finetune backend keeps in the wider type.
    return kind not in LIMITS["wide"] and ".lora_" not in layer


def _is_eight_bit_kernel(name: str) -> bool:
    lower = name.lower()
    return "e4m3" in lower or "fp8" in lower


def ran_as_asked(facts: Mapping[str, Any], expected: Mapping[str, Any]) -> Verdict:
    """Check that the run's facts have the values of ``expected``."""
    wrong = []
    for key, value in expected.items():
        if facts.get(key) != value:
            actual = facts.get(key, "unknown")
            wrong.append(f"{key} is {actual!r}, not {value!r}")
    reason = "the run saw what the recipe asks: " + ", ".join(expected)
    if wrong:
        reason = "; ".join(wrong)
    right = len(expected) - len(wrong)
    measured = f"{right} of {len(expected)}"
    return Verdict("configuration", not wrong, reason, measured=measured, limit="all")


def same_steps(
    name: str, base: Series, other: Series, tolerance: float, steps: Steps = EVERY_STEP
) -> Verdict:
    """Check that two runs have the same loss and gradient norm at each of ``steps``.

    Evaluations after these steps must be the same, too.
    """
    limit = f"relative gap ≤ {tolerance:g}"
    if tolerance == 0:
        limit = "equal to the last bit"
    missing = []
    compared = 0
    worst = 0.0
    at = steps.first
    for step in base.steps:
        if not steps.first <= step.step <= steps.last:
            continue
        compared += 1
        twin = other.at(step.step)
        if twin is None:
            missing.append(step.step)
            continue
        of_loss = relative_gap(step.loss, twin.loss)
        of_norm = relative_gap(step.grad_norm, twin.grad_norm)
        of_evaluation = _gap_of_evaluations(step.eval_loss, twin.eval_loss)
        gap = max(of_loss, of_norm, of_evaluation)
        if gap >= worst:
            worst = gap
            at = step.step
    if not compared:
        return Verdict(name, False, "the base run has no steps to compare with", limit=limit)
    faults = []
    if missing:
        faults.append(f"not logged in the second run: {_ranges(missing)}")
    if worst > tolerance:
        faults.append(f"differs most at step {at}")
    reason = f"{compared} steps agree"
    if not (base.exact and other.exact):
        reason += ", as far as the log's digits go"
    if faults:
        reason = "; ".join(faults)
    measured = f"largest relative gap {worst:.2g}"
    return Verdict(name, not faults, reason, measured=measured, limit=limit)


def _gap_of_evaluations(value: float | None, other: float | None) -> float:
    if value is None and other is None:
        return 0.0
    if value is None:
        return math.inf
    return relative_gap(value, other)


def same_loss(
    precisions: tuple[str, str], base: Series, other: Series, tolerance: float
) -> Verdict:
    """Check that two precisions agree in the mean loss of the last fifth.

    Both have the same data and seed.
    """
    usual, narrow = precisions
    name = f"loss in {narrow}"
    limit = f"relative gap ≤ {tolerance:g}"
    if len(base.losses) < 5 or len(other.losses) < 5:
        return Verdict(name, False, "needs at least 5 steps of both", limit=limit)
    first = _last_fifth(base.losses)
    second = _last_fifth(other.losses)
    gap = relative_gap(first, second)
    reason = f"{first:.4f} in {usual}, {second:.4f} in {narrow}"
    passed = gap <= tolerance
    return Verdict(name, passed, reason, measured=f"{gap:.2g}", limit=limit)


def _last_fifth(losses: Sequence[float]) -> float:
    fifth = len(losses) // 5
    return statistics.fmean(losses[-fifth:])


def throughput(
    measured: float | None, reference: float, tolerance: float, unit: str = "tokens"
) -> Verdict:
    """Check tokens, or images, per second and GPU against the recipe's reference for this GPU."""
    least = reference * (1 - tolerance)
    limit = f"≥ {_rate(least)}"
    if measured is None:
        return Verdict("throughput", False, "no step was measured", limit=limit)
    ratio = measured / reference
    reason = f"{ratio:.2f} × the reference of {_rate(reference)} {unit}/s/GPU"
    passed = measured >= least
    return Verdict("throughput", passed, reason, measured=_rate(measured), limit=limit)


def _rate(value: float) -> str:
    if value < 100:
        return f"{value:.2f}"
    return f"{value:,.0f}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending ``numbers`` as text, such as "1, 3–5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = []
    for run in runs:
        first = run[0]
        last = run[-1]
        if first == last:
            words.append(str(first))
        else:
            words.append(f"{first}–{last}")
    return ", ".join(words)
