"""Verdicts on a judged run, from the findings of the reference (``proof.json``) and the launcher's clock.

The limits come from the reference itself: how far the run's precision alone moves its results.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from primus.recipes.architecture import size
from primus.recipes.family import family
from primus.recipes.recipe import Recipe
from primus.recipes.rules import rules_of
from primus.recipes.schema import backend_rules
from primus.recipes.weights import config_of
from primus.training.checks import Verdict, of_faults, relative_gap
from primus.training.logs import Series
from primus.yamlfile import spell

# The largest difference in float32 besides the noise: libraries add in another order than the reference, and compute
# norms entirely in float32. Measured: 7e-7, 5e-6, 5e-6.
_LEAST = {"loss": 2e-6, "grad_norm": 5e-5, "gradient": 5e-5}
# How far a run's error may exceed the reference's error in the same precision. Measured: loss 4, norm 1, gradients 3.8.
_NOISE = {"loss": 8.0, "grad_norm": 2.0, "gradient": 6.0}
# The same for the mean of at least this many steps with equal noise. Measured: 1.7.
_MEAN_NOISE = 2.5
_ENOUGH = 4
# Why blocks are not compared one by one: what they pass on is not recorded, or not rounded as the reference does.
_UNSEEN = "not compared: the model is compiled, ranks share sequences, or one rank uses autocast"
# The largest allowed share of a changed constant in what blocks compute besides that of rounding, and how many standard
# deviations it may be. Measured in BF16: 3.6 deviations.
_CHANGED, _DEVIATIONS = 0.08, 7.0
# The deviations in FP8, where one rounded number may move the grid of a whole tensor, and on GPUs for an epsilon, which
# the rounding of their kernels resembles. Measured: 10.0.
_DEVIATIONS_WIDE = 12.0
# The largest share that these may add for FP8's own rounding, because products are rounded or they are not.
_HALF = 0.5
# An update is repeated from the run's own gradient in any precision, and the rounding of float32 is subtracted.
# Measured: 0. Moments in bfloat16 are rounded at every step.
_UPDATE = 1e-5
_UPDATE_NARROW = 5e-4
# The reported norm and the length of the clipped gradients come from the same numbers. Measured: 2e-5.
_CLIPPED = 2e-4
# With weights in bfloat16, the norm of each tensor, the total and the clipped gradients are bfloat16 numbers: three
# roundings of up to 2⁻⁸. Measured: 4.8e-3.
_CLIPPED_NARROW = 3 * 2**-8
# The least share of a matrix's gradients that are bfloat16 numbers, by the number of ranks and micro-batches whose
# gradients are added in float32. Measured: 0.29 to 0.45 for sums of two, 0.15 to 0.18 of four, 0 in float32.
_ROUNDED = {1: 1.0, 2: 0.7, 3: 0.35}
# How many times as large as the noise of one block the errors of its outputs and gradients may be: of a sample's median
# token, of any token, of all tokens at one position but the worst. Measured in BF16: 1.5, 4.0, 1.5. In FP8, a value may
# fall on the other side of a coarse grid; in FP32, gradients of the first tokens are small differences of sums, which
# libraries add in another order. Measured: 2.1, 18.0, 2.7.
_BLOCKS = {"typical": 1.8, "token": 8.0, "position": 2.5}
_BLOCKS_WIDE = {"typical": 3.0, "token": 30.0, "position": 4.0}
# How many times as large they may be in the gradients of a block that balances its experts: if rounding sends one token
# to another expert, the balancing loss changes for its whole sample. Measured: 6.9 for the median token.
_BALANCED = 6.0
# How much longer a block's change of its input, or its logits, may be than they should, besides a multiple of the
# squared noise. Measured: 0.0009, in FP8 0.0058; logits 1e-7.
_LONGER, _LONGER_FP8, _LONGER_LOGITS = 1.5e-3, 1e-2, 2e-4
_LONGER_NOISE = 3.0
# If float32 cannot tell the scores of two experts apart, a token may go to either.
_TIE = 3e-6
_TIED = {"loss": 1e-3, "grad_norm": 2e-2, "gradient": 0.3}
# How far gradients move if every token in doubt goes to another expert, with room for rounding. Those of experts always
# may, others only if an expert's did.
_ALL_IN_DOUBT = 1.1
_EXPERTS = ".experts."
# The largest difference of a backend's count of FLOPs from the recipe's.
_FLOPS = 0.01
# The largest difference of images per second × tokens per image from tokens per second. The log rounds both, images to
# three digits and tokens to whole numbers, which is much of a rate such as 19 on a busy machine.
_IMAGES = 0.01
_ROUNDED_IMAGES, _ROUNDED_TOKENS = 0.0005, 0.5
# Limits of the reported memory relative to the system's count at the end. Measured: 0.88 to 1.01.
_MEMORY = (0.6, 1.05)
# Limits of the reported throughput relative to the launcher's. Measured on a busy machine: 0.86 to 1.01.
_CLOCK = (0.7, 1.15)

# Writing the witness of a larger run would take longer than the run.
_MOST_BYTES = 1 << 30


def unjudged(recipe: Recipe) -> str | None:
    """Return why the reference cannot repeat a run of ``recipe``, in a sentence, or None if it can."""
    if recipe.precision == "mxfp8":
        return "the reference does not round to MX formats"
    if recipe.precision not in recipe.knows.judged:
        return f"the reference does not round to {recipe.precision.upper()} as {recipe.backend} does"
    for key in recipe.section("assets"):
        name = recipe.get(f"assets.{key}", str)
        if name.startswith("hf:"):
            return f"assets.{key} is on the Hugging Face hub, the reference reads local files only"
    tokenizer = recipe.asset("tokenizer")
    if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
        return "the tokenizer has no tokenizer.json, which the reference reads"
    if recipe.mode == "lora" and recipe.find(f"{recipe.backend}.lora.dropout", 0.0) > 0:
        return "dropout is random"
    if recipe.weights is not None and family(recipe.architecture.family).tuned:
        activation = config_of(recipe.weights)[1].get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            return f"hidden_act of the weights is {activation}, and the reference computes SiLU"
    if "eval.patience" in recipe.settings:
        return "eval.patience may end the run early"
    if recipe.section("eval") and recipe.find(f"{recipe.backend}.save_weights", False):
        return "the best weights are exported, and the reference has the last ones"
    rules = backend_rules(recipe.backend)
    for key, value in recipe.section(recipe.backend).items():
        if value != rules[key].default and any(fnmatchcase(key, pattern) for pattern in recipe.knows.unmodelled):
            return f"the reference does not repeat {recipe.backend}.{key}={spell(value)}"
    if why := rules_of(recipe).unjudged(recipe):
        return why
    if 8 * recipe.steps * size(recipe.architecture).total > _MOST_BYTES:
        return "the run is too large to keep the weights of every step"
    return None


def verdicts(evidence: Mapping[str, Any], series: Series) -> list[Verdict]:
    """Judge every step: data, parameters, loss, gradients, learning rate, update. No check passes without evidence."""
    steps: Sequence[Mapping[str, Any]] = evidence.get("steps", ())
    if problem := evidence.get("problem"):
        return [Verdict("reference", False, str(problem))]
    if not steps and "parameters" in evidence and not (parameters := _parameters(evidence["parameters"])).passed:
        return [parameters]
    if not steps or not series.steps:
        return [Verdict("reference", False, "the reference found no step to repeat")]
    return [
        _data(steps),
        _figure("loss", "reference loss", evidence, series, [step.loss for step in series.steps]),
        _figure("grad_norm", "reference gradient norm", evidence, series, [step.grad_norm for step in series.steps]),
        _parameters(evidence["parameters"]),
        of_faults(
            "reference first weights",
            evidence.get("first", _NOTHING),
            "every weight begins as the backend's rule draws it",
        ),
        _moved(evidence["moved"]),
        of_faults(
            "reference saved files", evidence.get("saved", _NOTHING), "checkpoints and files hold what was trained"
        ),
        _gradients(evidence, series),
        _blocks(evidence),
        *([] if evidence["precision"] == "fp32" else [_constants(evidence)]),
        _rates(steps),
        _updates(evidence),
    ]


_NOTHING = ("the reference did not compare this",)


def _data(steps: Sequence[Mapping[str, Any]]) -> Verdict:
    different = [sentence for step in steps for sentence in step["data"]]
    fine, measured = "every rank and step had the recipe's own tokens and labels", f"{len(different)} differences"
    return of_faults("reference data", different, fine, measured=f"{measured} in {len(steps)} steps")


def _parameters(findings: Mapping[str, Any]) -> Verdict:
    wrong = [f"missing: {name}" for name in findings["missing"]]
    wrong += [f"not in the model: {name}" for name in findings["besides"]]
    wrong += findings["shapes"] + findings["first_values"]
    fine = f"{findings['count']:,} parameters, {findings['trained']:,} of them trained"
    return of_faults("reference parameters", wrong, fine)


def _moved(findings: Mapping[str, Any]) -> Verdict:
    wrong = [f"{name} was never updated" for name in findings["still"]]
    wrong += [f"{name} is frozen and changed" for name in findings["frozen_moved"]]
    return of_faults("reference trained weights", wrong, "every trained weight moved, every frozen one stayed")


def _figure(key: str, name: str, evidence: Mapping[str, Any], series: Series, seen: Sequence[float]) -> Verdict:
    repeated = {step["step"]: step for step in evidence["steps"]}
    usual = max((step["noise"][key] for step in evidence["steps"] if step["regular"]), default=0.0)
    gaps = []
    for step, value in zip(series.steps, seen, strict=True):
        expected = repeated.get(step.step, {})
        limit = _limit(key, max(usual, expected.get("noise", {}).get(key, 0.0)), expected)
        gap = relative_gap(value, expected.get(key))
        gaps.append((gap / limit, gap, limit, step.step))
    share, gap, limit, at = max(gaps)
    reason = f"differs most at step {at}" if share > 1 else f"{len(gaps)} steps agree"
    return Verdict(name, share <= 1, reason, measured=f"{gap:.1e}", limit=f"relative gap ≤ {limit:.1e}")


def _gradients(evidence: Mapping[str, Any], series: Series) -> Verdict:
    rows = [step for step in evidence["steps"] if step["own_gradient"]]
    wrong = [f"step {row['step']}: {name} has no gradient" for row in rows for name in row["missing"]]
    wrong += [f"step {row['step']}: ranks that share {name} disagree" for row in rows for name in row["apart"]]
    if len(rows) < len(evidence["steps"]):
        wrong.append(f"the optimizer made {len(rows)} updates in {len(evidence['steps'])} steps")
    usual = usual_gaps(evidence["steps"])
    gaps = [(0.0, 0.0, _LEAST["gradient"], 0, "")]
    for row in rows:
        noise, elsewhere = row.get("noise", {}), _sent_elsewhere(row)
        for kind, (gap, name) in row["gaps"].items():
            own_noise, _ = noise.get("gaps", {}).get(kind, (0.0, ""))
            limit = _limit("gradient", max(usual.get(kind, 0.0), own_noise), row)
            if elsewhere or _EXPERTS in kind:
                limit = max(limit, _ALL_IN_DOUBT * noise.get("doubt", {}).get(kind, 0.0))
            gaps.append((gap / limit, gap, limit, row["step"], name))
    for kind, (gap, limit) in _means(evidence["steps"]).items():
        if gap > limit:
            wrong.append(f"{kind}: the mean gap is {gap:.1e}, and the limit {limit:.1e}")
    share, gap, limit, at, name = max(gaps)
    if share > 1:
        wrong.append(f"{name} differs most, at step {at}")
    wrong += _clipping(rows, evidence, series)
    rounded = _ROUNDED[min(3, 3 if evidence["precision"] == "fp32" else evidence["summands"])]
    # In the end, gradients of bfloat16 weights are bfloat16 numbers, in whatever dtype they were added.
    if not (evidence.get("narrow") or evidence["narrow_sums"]):
        wrong += [f"step {row['step']}: sums are rounded to bfloat16" for row in rows if row["rounded"] > rounded]
    fine, limit_text = "every tensor agrees, as the optimizer got it", f"relative gap ≤ {limit:.1e}"
    return of_faults("reference gradients", wrong, fine, measured=f"{gap:.1e}", limit=limit_text)


def _sent_elsewhere(step: Mapping[str, Any]) -> bool:
    """Whether rounding sent a token in doubt to another expert, which moves all gradients of the step.

    It did if the gradient of an expert moved by more than its noise, and by no more than all such tokens explain.
    """
    noise = step.get("noise", {})
    doubt = noise.get("doubt", {})
    return any(
        _NOISE["gradient"] * noise["gaps"][kind][0] < gap <= _ALL_IN_DOUBT * doubt[kind]
        for kind, (gap, _) in step["gaps"].items()
        if _EXPERTS in kind and kind in doubt
    )


def usual_gaps(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return kind of tensor → the largest noise of its gradient at the steps with known noise."""
    usual: dict[str, float] = {}
    for step in steps:
        for kind, (gap, _) in step["noise"]["gaps"].items() if step["regular"] else ():
            usual[kind] = max(usual.get(kind, 0.0), gap)
    return usual


def _blocks(evidence: Mapping[str, Any]) -> Verdict:
    limits = _BLOCKS if evidence["precision"] == "bf16" else _BLOCKS_WIDE
    longer = _LONGER_FP8 if evidence["precision"] == "fp8" else _LONGER
    wrong: list[str] = []
    worst, compared = 0.0, 0
    for step in evidence["steps"]:
        if isinstance(step["blocks"], str):
            wrong.append(f"step {step['step']}: {step['blocks']}")
            continue
        for row in step["blocks"]:
            compared += "typical" in row
            of_row = {key: (_BALANCED if row["balanced"] else 1) * limit for key, limit in limits.items()}
            allowed = _LONGER_LOGITS if row["name"] == "logits" else longer
            wrong += [f"step {step['step']}: {row['name']}: {sentence}" for sentence in _unlike(row, of_row, allowed)]
            worst = max([worst, *(row.get(key, 0.0) / limit for key, limit in of_row.items())])
    if evidence["unseen"]:
        return of_faults("reference blocks", wrong, _UNSEEN)
    if not compared:
        wrong.append("the reference did not compare this")
    fine, limit = f"{compared} results of blocks agree, token by token", "≤ 1 of what rounding explains"
    return of_faults("reference blocks", wrong, fine, measured=f"{worst:.2f}", limit=limit)


def _unlike(row: Mapping[str, Any], limits: Mapping[str, float], longer: float) -> Iterator[str]:
    if "typical" not in row:
        return
    if not row["typical"] <= limits["typical"]:
        yield f"most tokens differ by {row['typical']:.1f} × rounding"
    if not row["position"] <= limits["position"]:
        yield f"tokens at position {row['position_at']} differ by {row['position']:.1f} × rounding"
    if not row["token"] <= limits["token"]:
        sample, place = row["token_at"]
        yield f"token {place} of sample {sample} differs by {row['token']:.1f} × rounding"
    longer += _LONGER_NOISE * row["noise"] ** 2
    if not row["name"].startswith("gradients") and not abs(row["share"]) <= longer:
        yield f"what it computes is {abs(row['share']):.2%} too {'long' if row['share'] > 0 else 'short'}"


def _constants(evidence: Mapping[str, Any]) -> Verdict:
    constants: Mapping[str, Mapping[str, Any]] = evidence.get("constants", {})
    limits, shares = {}, {}
    for name, row in constants.items():
        share = row["share"] - row["rounding"]
        shares[name] = share if row.get("one_sided") else abs(share)
        close, wide = (max(_CHANGED, count * row["deviation"]) for count in (_DEVIATIONS, _DEVIATIONS_WIDE))
        if row["eight"]:
            limits[name] = max(close, min(wide, _HALF))
        elif evidence["precision"] == "fp8" or (row["biased"] and not evidence["on_cpu"]):
            limits[name] = wide
        else:
            limits[name] = close
    wrong = [
        f"{name}: the blocks show {constants[name]['share']:.2f} of it"
        for name, share in shares.items()
        if not share <= limits[name]
    ]
    decided = [name for name, limit in limits.items() if limit <= 1]
    if evidence["unseen"]:
        return of_faults("reference constants", wrong, _UNSEEN)
    if not constants:
        wrong = ["the reference did not compare this"]
    hidden = ", ".join(name for name in constants if name not in decided)
    fine = f"{len(decided)} changes would show" + (f"; hidden by rounding: {hidden}" if hidden else "")
    measured = f"{max((shares[name] for name in decided), default=0.0):.2f}"
    limit = f"≤ {max((limits[name] for name in decided), default=_CHANGED):.2f} of a change"
    wrong.sort(key=lambda sentence: sentence.partition(":")[0])
    return of_faults("reference constants", wrong, fine, measured=measured, limit=limit)


def _means(steps: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    regular = [step for step in steps if step["regular"] and step["own_gradient"]]
    rows = [step for step in regular if not _sent_elsewhere(step)]
    means = {}
    for kind in rows[0]["gaps"] if len(regular) >= _ENOUGH and len(rows) > 1 else ():
        gap = statistics.fmean(row["gaps"].get(kind, (0.0, ""))[0] for row in rows)
        noises = [row["noise"]["gaps"][kind][0] for row in rows]
        tied = any(row["closest"] < _TIE for row in rows)
        means[kind] = gap, (_TIED if tied else _LEAST)["gradient"] + _mean_noise(noises)
    return means


def _mean_noise(noises: Sequence[float]) -> float:
    total = sum(noises)
    if not total:
        return 0.0
    # 1 for a single noisy step, 1 / sqrt(_ENOUGH) for that many equally noisy ones: how much of an error a mean keeps.
    ratio = math.sqrt(sum(noise**2 for noise in noises)) / total
    least = 1 / math.sqrt(_ENOUGH)
    share = max(0.0, ratio - least) / (1 - least)
    return (_MEAN_NOISE + share * (_NOISE["gradient"] - _MEAN_NOISE)) * total / len(noises)


def _clipping(rows: Sequence[Mapping[str, Any]], evidence: Mapping[str, Any], series: Series) -> list[str]:
    reported, wrong, most = {step.step: step.grad_norm for step in series.steps}, [], evidence["max_norm"]
    allowed = _CLIPPED_NARROW if evidence.get("narrow") else _CLIPPED
    for row in rows:
        norm = reported.get(row["step"], math.nan)
        expected = norm * min(1.0, most / (norm + 1e-6)) if most > 0 else norm
        if not relative_gap(row["used_norm"], expected) <= allowed:
            wrong.append(
                f"step {row['step']}: the optimizer got gradients of length {row['used_norm']:.4g}, not {expected:.4g}"
            )
    return wrong


def _rates(steps: Sequence[Mapping[str, Any]]) -> Verdict:
    wrong = [
        f"step {step['step']}: {', '.join(f'{rate:g}' for rate in step['rates'])}, not {step['rate']:g}"
        for step in steps
        if "rates" in step and any(relative_gap(rate, step["rate"]) > 1e-6 for rate in step["rates"])
    ]
    measured = f"{len(wrong)} of {len(steps)} steps differ"
    return of_faults("reference learning rate", wrong, "every step had the schedule's", measured=measured)


def _updates(evidence: Mapping[str, Any]) -> Verdict:
    worst = max(evidence["steps"], key=lambda step: step["update"]["gap"])
    gap = worst["update"]["gap"]
    limit = _UPDATE_NARROW if evidence.get("narrow") else _UPDATE
    wrong = [f"{worst['update']['name']} differs most, at step {worst['step']}"] if gap > limit else []
    wrong += [
        f"step {step['step']}: {name} is not the optimizer's, rounded"
        for step in evidence["steps"]
        for name in step["stale"]
    ]
    wrong += [f"step {step['step']}: {sentence}" for step in evidence["steps"] for sentence in step["biases"]]
    fine, measured = "every weight is where clipping, AdamW and the schedule put it", f"{gap:.1e} of the update"
    return of_faults("reference update", wrong, fine, measured=measured, limit=f"≤ {limit:.1e}")


def _limit(key: str, noise: float, step: Mapping[str, Any]) -> float:
    least = _TIED[key] if step.get("closest", 1.0) < _TIE else _LEAST[key]
    return least + _NOISE[key] * noise


def figures(
    facts: Mapping[str, Any], evidence: Mapping[str, Any], series: Series, recipe: Recipe, peak_gib: float | None
) -> Verdict:
    """Judge the other reported figures: parameters, FLOPs per token or image, memory.

    ``peak_gib`` is the memory of the largest rank as the system counted it, in GiB; None if it was not measured. Runs
    on a GPU report the GPU's memory, which the system does not count.
    Ranks that share layers or experts report only their own parts; their parameter counts are not compared.
    """
    wrong, parameters = [], evidence.get("parameters", {})
    shared = any(recipe.degree(kind) > 1 for kind in ("tp", "pp", "ep"))
    for key, count in (("parameters", parameters.get("count")), ("trainable_parameters", parameters.get("trained"))):
        if not shared and facts.get(key) != count:
            wrong.append(f"{key}: {facts.get(key)}, not {count}")
    flops = parameters.get("flops", math.nan)
    if relative_gap(facts.get("flops_per_unit", math.nan), flops) > _FLOPS:
        wrong.append(f"FLOPs of a token or image: {facts.get('flops_per_unit', math.nan):.4g}, not {flops:.4g}")
    # Even in the narrowest precision, and without gradients and moments.
    least = 2 * (parameters.get("count") or 0) / recipe.world_size / 2**30
    wrong += [
        f"step {step.step}: {step.memory_gib:g} GiB of memory, and the weights alone take {least:.2g}"
        for step in series.steps
        if step.memory_gib < max(least, 0.005)
    ]
    most = max((step.memory_gib for step in series.steps), default=0.0)
    if (
        peak_gib is not None
        and facts.get("device") == "cpu"
        and not _MEMORY[0] * peak_gib <= most <= _MEMORY[1] * peak_gib
    ):
        wrong.append(f"{most:g} GiB of memory, and the largest rank had {peak_gib:.3g}")
    wrong += [
        f"step {step.step}: {step.images_per_second:g} images/s, and {step.tokens_per_second:g} tokens/s"
        for step in series.steps
        if step.images_per_second is not None
        and abs(step.images_per_second * recipe.seq_len - step.tokens_per_second)
        > _IMAGES * step.tokens_per_second + _ROUNDED_IMAGES * recipe.seq_len + _ROUNDED_TOKENS
    ]
    return of_faults("reported figures", wrong, "parameters, FLOPs per unit and memory are the recipe's")


def clock(series: Series, arrivals: Mapping[int, float], busy: Mapping[int, float], tokens: int) -> Verdict:
    """Judge the reported tokens per second against the launcher's clock.

    ``arrivals``: step → when its line reached the launcher, in seconds. ``busy``: step → seconds that the run spent
    on evidence after it. ``tokens``: tokens of one rank in a step, from the recipe.
    """
    ratios = [
        (arrivals[step.step] - arrivals[step.step - 1] - busy.get(step.step - 1, 0.0)) * step.tokens_per_second / tokens
        for step in series.steps
        if step.step in arrivals and step.step - 1 in arrivals and step.tokens_per_second > 0
    ]
    least, most = _CLOCK
    limit = f"×{least:g} – ×{most:g}"
    if len(ratios) < 3:
        return Verdict("clock", True, "fewer than 4 steps: too few to time", limit=limit)
    ratio = statistics.median(ratios)
    reason = "tokens per second, as the run reports them, times the seconds between its lines ÷ the tokens of a step"
    return Verdict("clock", least <= ratio <= most, reason, measured=f"×{ratio:.2f}", limit=limit)
