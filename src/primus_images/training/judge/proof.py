"""Verdicts on a judged run, from the findings of the reference and the launcher's clock.

The findings are in ``proof.json``. The limits come from the reference itself: how far the run's
precision alone moves its results.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from primus_images.recipes.architecture import size
from primus_images.recipes.mixture import is_mixture
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import rules_of
from primus_images.recipes.schema import backend_rules
from primus_images.recipes.weights import config_of
from primus_images.training.judge.checks import LIMITS, Verdict, of_faults, relative_gap
from primus_images.training.run.logs import Series
from primus_images.yamlfile import spell

# The findings of the reference, and those of one step.
Evidence = Mapping[str, Any]
_Step = Mapping[str, Any]
# Why blocks are not compared one by one: what they pass on is not recorded, or not rounded as the
# reference does.
_UNSEEN = (
    "not compared: the model is compiled or has dropout, ranks share sequences, or one rank uses "
    "autocast"
)
_NOTHING = ("the reference did not compare this",)
_EXPERTS = ".experts."


def unjudged(recipe: Recipe) -> str | None:
    """Return why the reference cannot repeat a run of ``recipe``, None if it can."""
    return next(_obstacles(recipe), None)


def _obstacles(recipe: Recipe) -> Iterator[str]:
    if recipe.precision not in recipe.knows.judged:
        precision = recipe.precision.upper()
        yield f"the reference does not round to {precision} as {recipe.backend} does"
    yield from _obstacles_of_files(recipe)
    yield from _obstacles_of_settings(recipe)
    why = rules_of(recipe).unjudged(recipe)
    if why:
        yield why
    parameters = size(recipe.architecture).total
    kept_bytes = 8 * recipe.steps * parameters
    if kept_bytes > LIMITS["bytes"]:
        yield "the run is too large to keep the weights of every step"


def _obstacles_of_files(recipe: Recipe) -> Iterator[str]:
    for key in recipe.section("assets"):
        if recipe.get(f"assets.{key}", str).startswith("hf:"):
            yield f"assets.{key} is on the Hugging Face hub, the reference reads local files only"
    held_out = recipe.find("eval.corpus", "")
    if held_out.startswith("hf:"):
        yield "eval.corpus is on the Hugging Face hub, the reference reads local files only"
    elif is_mixture(held_out):
        yield "eval.corpus names several corpora, and the reference evaluates on one"
    tokenizer = recipe.asset("tokenizer")
    if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
        yield "the tokenizer has no tokenizer.json, which the reference reads"
    yield from _obstacles_of_weights(recipe)


def _obstacles_of_weights(recipe: Recipe) -> Iterator[str]:
    if recipe.weights is None or recipe.architecture.of_images:
        return
    _, config = config_of(recipe.weights)
    activation = config.get("hidden_act", "silu")
    if not recipe.architecture.has_formula:
        yield f"the reference has no formula of models of type {config['model_type']}"
    if activation not in ("silu", "swish"):
        yield f"hidden_act of the weights is {activation}, and the reference computes SiLU"


def _obstacles_of_settings(recipe: Recipe) -> Iterator[str]:
    if is_mixture(recipe.get("assets.corpus", str)):
        yield "the reference reads one corpus, and no mixture"
    if "data.skip" in recipe.settings:
        yield "data.skip leaves out rows, and the reference reads all"
    backend = recipe.backend
    if recipe.mode == "lora" and recipe.find(f"{backend}.lora.dropout", 0.0):
        for key in ("packing", "training.compile"):
            if recipe.find(f"{backend}.{key}", False):
                yield f"the reference does not repeat dropout with {backend}.{key}"
    rules = backend_rules(backend)
    for key, value in recipe.section(backend).items():
        unmodelled = any(fnmatchcase(key, pattern) for pattern in recipe.knows.unmodelled)
        if unmodelled and value != rules[key].default:
            yield f"the reference does not repeat {backend}.{key}={spell(value)}"


def verdicts(evidence: Evidence, series: Series) -> list[Verdict]:
    """Judge every step: data, parameters, loss, gradients, learning rate, update.

    No check passes without evidence.
    """
    if evidence.get("problem"):
        return [Verdict("reference", False, str(evidence["problem"]))]
    steps: Sequence[_Step] = evidence.get("steps", ())
    if not steps and "parameters" in evidence:
        parameters = _parameters(evidence["parameters"])
        if not parameters.passed:
            return [parameters]
    if not steps or not series.steps:
        return [Verdict("reference", False, "the reference found no step to repeat")]
    of_precision = []
    if evidence["precision"] != "fp32":
        of_precision = [_constants(evidence)]
    return [
        _data(steps),
        _figure("loss", "reference loss", evidence, series),
        _figure("grad_norm", "reference gradient norm", evidence, series),
        _parameters(evidence["parameters"]),
        of_faults(
            "reference first weights",
            evidence.get("first", _NOTHING),
            "every weight begins as the backend's rule draws it",
        ),
        of_faults(
            "reference trained weights",
            evidence.get("moved", _NOTHING),
            "every trained weight moved, every frozen one stayed",
        ),
        of_faults(
            "reference saved files",
            evidence.get("saved", _NOTHING),
            "checkpoints and files hold what was trained",
        ),
        of_faults(
            "reference checkpoints",
            evidence.get("checkpoints", _NOTHING),
            "every checkpoint that was kept holds the weights and moments of its step",
        ),
        *_evaluations(evidence, series),
        *_dropout(evidence),
        _gradients(evidence, series),
        _blocks(evidence),
        *of_precision,
        _rates(steps),
        _updates(evidence),
    ]


def _data(steps: Sequence[_Step]) -> Verdict:
    wrong: list[str] = []
    for step in steps:
        wrong += step["data"]
    fine = "every rank and step had the recipe's own tokens and labels"
    measured = f"{len(wrong)} differences in {len(steps)} steps"
    return of_faults("reference data", wrong, fine, measured=measured)


def _parameters(findings: Mapping[str, Any]) -> Verdict:
    fine = f"{findings['count']:,} parameters, {findings['trained']:,} of them trained"
    return of_faults("reference parameters", findings["missing"] + findings["odd"], fine)


@dataclass(frozen=True, order=True)
class _Gap:
    """A gap as a share of its limit, and where it is. The largest is the worst."""

    share: float
    gap: float
    limit: float
    step: int
    name: str = ""


def _gap(gap: float, limit: float, step: int, name: str = "") -> _Gap:
    return _Gap(gap / limit, gap, limit, step, name)


def _figure(key: str, name: str, evidence: Evidence, series: Series) -> Verdict:
    """Return whether the loss, or the gradient norm, of every step is the reference's."""
    repeated = {}
    noises = []
    for row in evidence["steps"]:
        repeated[row["step"]] = row
        if row["regular"]:
            noises.append(row["noise"][key])
    usual = max(noises, default=0.0)
    gaps = []
    for step in series.steps:
        row = repeated.get(step.step, {})
        noise = row.get("noise", {}).get(key, 0.0)
        limit = _limit(key, max(usual, noise), row)
        difference = relative_gap(getattr(step, key), row.get(key))
        gaps.append(_gap(difference, limit, step.step))
    worst = max(gaps)
    reason = f"{len(gaps)} steps agree"
    if worst.share > 1:
        reason = f"differs most at step {worst.step}"
    limit_text = f"relative gap ≤ {worst.limit:.1e}"
    measured = f"{worst.gap:.1e}"
    return Verdict(name, worst.share <= 1, reason, measured=measured, limit=limit_text)


def _evaluations(evidence: Evidence, series: Series) -> Iterator[Verdict]:
    """Yield whether the run evaluated after the steps that it had to, with the reference's loss.

    Nothing is yielded for a run without evaluations.
    """
    rows: Sequence[_Step] = evidence.get("evaluations", ())
    reported = {}
    for step in series.steps:
        if step.eval_loss is not None:
            reported[step.step] = step.eval_loss
    if not rows and not reported:
        return
    wrong = []
    worst = _Gap(0.0, 0.0, LIMITS["least"]["loss"], 0)
    for row in rows:
        number = row["step"]
        expected = row["loss"]
        loss = reported.pop(number, None)
        if loss is None:
            wrong.append(f"step {number}: no evaluation is reported")
            continue
        limit = _limit("loss", row["noise"], row)
        gap = _gap(relative_gap(loss, expected), limit, number)
        if gap.share > 1:
            wrong.append(f"step {number}: {loss:.5f}, not {expected:.5f}")
        worst = max(worst, gap)
    wrong += [f"step {step}: no evaluation was due" for step in reported]
    fine = f"{len(rows)} evaluations agree, on the held-out text and the weights of their steps"
    measured = f"{worst.gap:.1e}"
    limit_text = f"relative gap ≤ {worst.limit:.1e}"
    yield of_faults("reference evaluation", wrong, fine, measured=measured, limit=limit_text)


def _dropout(evidence: Evidence) -> Iterator[Verdict]:
    findings = evidence.get("dropout")
    if findings is not None:
        fine = "every step, rank and layer dropped other inputs, as many as the recipe says"
        yield of_faults("reference dropout", findings, fine)


def _limit(key: str, noise: float, step: _Step) -> float:
    least = LIMITS["least"][key]
    if step.get("closest", 1.0) < LIMITS["tie"]:
        least = LIMITS["tied"][key]
    return float(least + LIMITS["noise"][key] * noise)


def _gradients(evidence: Evidence, series: Series) -> Verdict:
    steps = evidence["steps"]
    rows = [step for step in steps if step["own_gradient"]]
    wrong = []
    for row in rows:
        for name in row["missing"]:
            wrong.append(f"step {row['step']}: {name} has no gradient")
    for row in rows:
        for name in row["apart"]:
            wrong.append(f"step {row['step']}: ranks that share {name} disagree")
    if len(rows) < len(steps):
        wrong.append(f"the optimizer made {len(rows)} updates in {len(steps)} steps")
    wrong += _wrong_means(steps)
    worst = _worst_gradient(rows, _usual_noise(steps))
    if worst.share > 1:
        wrong.append(f"{worst.name} differs most, at step {worst.step}")
    wrong += _clipping(rows, evidence, series)
    wrong += _rounded_sums(rows, evidence)
    fine = "every tensor agrees, as the optimizer got it"
    measured = f"{worst.gap:.1e}"
    limit = f"relative gap ≤ {worst.limit:.1e}"
    return of_faults("reference gradients", wrong, fine, measured=measured, limit=limit)


def _usual_noise(steps: Sequence[_Step]) -> dict[str, float]:
    usual: dict[str, float] = {}
    for step in steps:
        if not step["regular"]:
            continue
        for kind, (gap, _) in step["noise"]["gaps"].items():
            before = usual.get(kind, 0.0)
            usual[kind] = max(before, gap)
    return usual


def _worst_gradient(rows: Sequence[_Step], usual: Mapping[str, float]) -> _Gap:
    worst = _Gap(0.0, 0.0, LIMITS["least"]["gradient"], 0)
    for row in rows:
        noise = row.get("noise", {})
        noisy_gaps = noise.get("gaps", {})
        doubts = noise.get("doubt", {})
        elsewhere = _sent_elsewhere(row)
        for kind, (gap, name) in row["gaps"].items():
            of_steps = usual.get(kind, 0.0)
            of_row = _gap_of(kind, noisy_gaps)
            limit = _limit("gradient", max(of_steps, of_row), row)
            if elsewhere or _EXPERTS in kind:
                doubt = doubts.get(kind, 0.0)
                limit = max(limit, LIMITS["all_in_doubt"] * doubt)
            gap_of_tensor = _gap(gap, limit, row["step"], name)
            worst = max(worst, gap_of_tensor)
    return worst


def _rounded_sums(rows: Sequence[_Step], evidence: Evidence) -> Iterator[str]:
    # In the end, gradients of bfloat16 weights are bfloat16 numbers, in whatever dtype they were
    # added.
    if evidence.get("narrow") or evidence["narrow_sums"]:
        return
    summands = 3
    if evidence["precision"] != "fp32":
        summands = min(3, evidence["summands"])
    most = LIMITS["rounded"][summands - 1]
    for row in rows:
        if row["rounded"] > most:
            yield f"step {row['step']}: sums are rounded to bfloat16"


def _sent_elsewhere(step: _Step) -> bool:
    """Return whether rounding sent a token in doubt to another expert.

    That moves all gradients of the step. It did if the gradient of an expert moved by more than its
    noise, and by no more than all such tokens explain.
    """
    noise = step.get("noise", {})
    doubt = noise.get("doubt", {})
    for kind, (gap, _) in step["gaps"].items():
        if _EXPERTS in kind and kind in doubt:
            usual = _gap_of(kind, noise["gaps"])
            least = LIMITS["noise"]["gradient"] * usual
            most = LIMITS["all_in_doubt"] * doubt[kind]
            if least < gap <= most:
                return True
    return False


def _blocks(evidence: Evidence) -> Verdict:
    precision = evidence["precision"]
    wrong: list[str] = []
    worst = 0.0
    compared = 0
    for step in evidence["steps"]:
        rows = step["blocks"]
        if isinstance(rows, str):
            wrong.append(f"step {step['step']}: {rows}")
            continue
        for row in rows:
            if "typical" not in row:
                continue
            compared += 1
            limits = LIMITS["blocks"][precision]
            if row["balanced"]:
                factor = LIMITS["balanced"]
                limits = {key: factor * limit for key, limit in limits.items()}
            place = f"step {step['step']}: {row['name']}"
            for sentence in _unlike(row, limits, precision):
                wrong.append(f"{place}: {sentence}")
            for key, limit in limits.items():
                share = row[key] / limit
                worst = max(worst, share)
    if evidence["unseen"]:
        return of_faults("reference blocks", wrong, _UNSEEN)
    if not compared:
        wrong += _NOTHING
    fine = f"{compared} results of blocks agree, token by token"
    limit = "≤ 1 of what rounding explains"
    return of_faults("reference blocks", wrong, fine, measured=f"{worst:.2f}", limit=limit)


def _unlike(row: _Step, limits: Mapping[str, float], precision: str) -> Iterator[str]:
    typical = row["typical"]
    if not typical <= limits["typical"]:
        yield f"most tokens differ by {typical:.1f} × rounding"
    position = row["position"]
    if not position <= limits["position"]:
        yield f"tokens at position {row['position_at']} differ by {position:.1f} × rounding"
    token = row["token"]
    if not token <= limits["token"]:
        sample, place = row["token_at"]
        yield f"token {place} of sample {sample} differs by {token:.1f} × rounding"
    if row["name"].startswith("gradients"):
        return
    longer = LIMITS["longer"][precision]
    if row["name"] == "logits":
        longer = LIMITS["longer"]["logits"]
    share = row["share"]
    limit = longer + LIMITS["longer_noise"] * row["noise"] ** 2
    if not abs(share) <= limit:
        direction = "short"
        if share > 0:
            direction = "long"
        yield f"what it computes is {abs(share):.2%} too {direction}"


def _constants(evidence: Evidence) -> Verdict:
    name = "reference constants"
    wrong = []
    hidden = []
    shares = [0.0]
    limits = []
    constants: Mapping[str, _Step] = evidence.get("constants", {})
    for constant, row in constants.items():
        share = row["share"] - row["rounding"]
        if not row.get("one_sided"):
            share = abs(share)
        limit = _limit_of_constant(row, evidence)
        if not share <= limit:
            wrong.append(f"{constant}: the blocks show {row['share']:.2f} of it")
        if limit <= 1:
            shares.append(share)
            limits.append(limit)
        else:
            hidden.append(constant)
    wrong.sort()
    if evidence["unseen"]:
        return of_faults(name, wrong, _UNSEEN)
    if not constants:
        wrong += _NOTHING
    fine = f"{len(limits)} changes would show"
    if hidden:
        fine += f"; hidden by rounding: {', '.join(hidden)}"
    largest = max(limits, default=LIMITS["changed"])
    limit_text = f"≤ {largest:.2f} of a change"
    return of_faults(name, wrong, fine, measured=f"{max(shares):.2f}", limit=limit_text)


def _limit_of_constant(row: Mapping[str, Any], evidence: Evidence) -> float:
    least = LIMITS["changed"]
    deviation = row["deviation"]
    close = max(least, LIMITS["deviations"] * deviation)
    wide = max(least, LIMITS["deviations_wide"] * deviation)
    if row["eight"]:
        half = min(wide, LIMITS["half"])
        return float(max(close, half))
    biased = row["biased"] and not evidence["on_cpu"]
    if biased or evidence["precision"] == "fp8":
        return float(wide)
    return float(close)


def _wrong_means(steps: Sequence[_Step]) -> Iterator[str]:
    """Yield the kinds of tensors whose gradients are too far from the reference's on average."""
    regular = [step for step in steps if step["regular"] and step["own_gradient"]]
    rows = [step for step in regular if not _sent_elsewhere(step)]
    if len(regular) < LIMITS["enough_steps"] or len(rows) < 2:
        return
    least = LIMITS["least"]["gradient"]
    if any(row["closest"] < LIMITS["tie"] for row in rows):
        least = LIMITS["tied"]["gradient"]
    for kind in rows[0]["gaps"]:
        gaps = []
        noises = []
        for row in rows:
            gaps.append(_gap_of(kind, row["gaps"]))
            noises.append(_gap_of(kind, row["noise"]["gaps"]))
        mean = statistics.fmean(gaps)
        limit = least + _mean_noise(noises)
        if mean > limit:
            yield f"{kind}: the mean gap is {mean:.1e}, and the limit {limit:.1e}"


def _gap_of(kind: str, gaps: Mapping[str, tuple[float, str]]) -> float:
    """Return the largest gap of a kind of tensors, which stands with the tensor's name."""
    gap, _ = gaps.get(kind, (0.0, ""))
    return gap


def _mean_noise(noises: Sequence[float]) -> float:
    total = sum(noises)
    if not total:
        return 0.0
    # 1 for a single noisy step, 1 / sqrt(enough) for that many equally noisy ones: how much of an
    # error a mean keeps.
    ratio = math.hypot(*noises) / total
    least = 1 / math.sqrt(LIMITS["enough_steps"])
    share = max(0.0, ratio - least) / (1 - least)
    of_many = LIMITS["mean_noise"]
    of_one = LIMITS["noise"]["gradient"]
    factor = of_many + share * (of_one - of_many)
    return float(factor * total / len(noises))


def _clipping(rows: Sequence[_Step], evidence: Evidence, series: Series) -> Iterator[str]:
    reported = {step.step: step.grad_norm for step in series.steps}
    most = evidence["max_norm"]
    allowed = LIMITS["clipped"]
    if evidence.get("narrow"):
        allowed = LIMITS["clipped_narrow"]
    for row in rows:
        used = row["used_norm"]
        norm = reported.get(row["step"], math.nan)
        if most > 0:
            norm *= min(1.0, most / (norm + 1e-6))
        if not relative_gap(used, norm) <= allowed:
            lengths = f"{used:.4g}, not {norm:.4g}"
            yield f"step {row['step']}: the optimizer got gradients of length {lengths}"


def _rates(steps: Sequence[_Step]) -> Verdict:
    wrong = []
    for step in steps:
        rates = step.get("rates", ())
        expected = step["rate"]
        if any(relative_gap(rate, expected) > LIMITS["rate"] for rate in rates):
            listed = ", ".join(f"{rate:g}" for rate in rates)
            wrong.append(f"step {step['step']}: {listed}, not {expected:g}")
    fine = "every step had the schedule's"
    measured = f"{len(wrong)} of {len(steps)} steps differ"
    return of_faults("reference learning rate", wrong, fine, measured=measured)


def _updates(evidence: Evidence) -> Verdict:
    steps = evidence["steps"]
    worst = max(steps, key=lambda step: step["update"]["gap"])
    update = worst["update"]
    gap = update["gap"]
    limit = LIMITS["update"]
    if evidence.get("narrow"):
        limit = LIMITS["update_narrow"]
    wrong = []
    if gap > limit:
        wrong.append(f"{update['name']} differs most, at step {worst['step']}")
    for step in steps:
        place = f"step {step['step']}"
        for name in step["stale"]:
            wrong.append(f"{place}: {name} is not the optimizer's, rounded")
        for sentence in step["biases"]:
            wrong.append(f"{place}: {sentence}")
    fine = "every weight is where clipping, AdamW and the schedule put it"
    measured = f"{gap:.1e} of the update"
    return of_faults("reference update", wrong, fine, measured=measured, limit=f"≤ {limit:.1e}")


def figures(
    facts: Mapping[str, Any],
    evidence: Evidence,
    series: Series,
    recipe: Recipe,
    peak_gib: float | None,
) -> Verdict:
    """Judge the other reported figures: parameters, tokens, FLOPs per token or image, memory.

    ``peak_gib`` is the memory of the largest rank as the system counted it, in GiB; None if it was
    not measured. Runs on a GPU report the GPU's memory, which the system does not count. Ranks that
    share layers or experts report only their own parts; their parameter counts are not compared.
    """
    parameters = evidence.get("parameters", {})
    wrong: list[str] = []
    if not any(recipe.degree(kind) > 1 for kind in ("tp", "pp", "ep")):
        wrong += _wrong_parameters(facts, parameters)
    flops = parameters.get("flops", math.nan)
    reported = facts.get("flops_per_unit", math.nan)
    if relative_gap(reported, flops) > LIMITS["flops"]:
        wrong.append(f"FLOPs of a token or image: {reported:.4g}, not {flops:.4g}")
    count = parameters.get("count") or 0
    # Even in the narrowest precision, and without gradients and moments.
    least = 2 * count / recipe.world_size / 2**30
    counted = None
    if facts.get("device") == "cpu":
        counted = peak_gib
    wrong += _wrong_memory(series, least, counted)
    wrong += _wrong_tokens(series, evidence.get("tokens", math.nan))
    wrong += _wrong_rates(series, reported, recipe)
    fine = "parameters, tokens, FLOPs per unit, FLOP/s and memory are the recipe's"
    return of_faults("reported figures", wrong, fine)


def _wrong_parameters(facts: Mapping[str, Any], parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield the numbers of parameters in the facts that are not the reference's."""
    for key, of_reference in (("parameters", "count"), ("trainable_parameters", "trained")):
        reported = facts.get(key)
        number = parameters.get(of_reference)
        if reported != number:
            yield f"{key}: {reported}, not {number}"


def _wrong_memory(series: Series, least: float, counted: float | None) -> Iterator[str]:
    """Yield memory below ``least``, and the most of all if it is not near what was ``counted``."""
    most = 0.0
    for step in series.steps:
        most = max(most, step.memory_gib)
        if step.memory_gib < max(least, 0.005):
            memory = f"{step.memory_gib:g} GiB of memory"
            yield f"step {step.step}: {memory}, and the weights alone take {least:.2g}"
    if counted is None:
        return
    low, high = LIMITS["memory"]
    if not low * counted <= most <= high * counted:
        yield f"{most:g} GiB of memory, and the largest rank had {counted:.3g}"


def _wrong_tokens(series: Series, tokens: float) -> Iterator[str]:
    """Yield steps whose rate counts other than the ``tokens`` of one rank."""
    for step in series.steps:
        if step.tokens is not None and step.tokens != tokens:
            yield f"step {step.step}: the rate counts {step.tokens:g} tokens, not {tokens:g}"


def _wrong_rates(series: Series, flops: float, recipe: Recipe) -> Iterator[str]:
    """Yield FLOP/s in the log that are not the logged tokens per second times ``flops``."""
    unit = 1
    if recipe.architecture.of_images:
        unit = recipe.seq_len
    for step in series.steps:
        if step.tflops is None:
            continue
        rate = step.tokens_per_second
        tflops = rate / unit * flops / 1e12
        # Half a unit of the last digit of either figure.
        of_log = 0.51 / 10**step.tflops_decimals
        rounded = of_log + 0.5 * tflops / max(rate, 1)
        allowed = rounded + LIMITS["logged_flops"] * tflops
        if not abs(step.tflops - tflops) <= allowed:
            yield f"step {step.step}: {step.tflops:g} TFLOP/s in the log, not {tflops:.4g}"


def clock(
    series: Series,
    arrivals: Mapping[int, float],
    busy: Mapping[int, float],
    own: Mapping[int, float],
    tokens: float,
) -> Verdict:
    """Judge the reported tokens per second against two clocks: the launcher's and the witness's.

    ``arrivals``: step → when its line reached the launcher, in seconds. ``busy``: step → seconds
    that the run spent on evidence after it. ``own``: step → the seconds between two records of
    evidence, on the slowest rank. ``tokens``: tokens of one rank in a step, counted by the
    reference. The first step is left out, because its clocks start at different places.
    """
    steps = []
    for step in series.steps[1:]:
        if step.step in own and step.tokens_per_second > 0:
            steps.append(step)
    least, most = LIMITS["own_clock"]
    limit = f"×{least:g} – ×{most:g}"
    if not steps:
        return Verdict("clock", False, "needs at least 2 steps to time one", limit=limit)
    # Of all steps together: printing a line counts for the step after it, or for its own.
    reported = sum(tokens / step.tokens_per_second for step in steps)
    measured = sum(own[step.step] for step in steps)
    ratio = measured / reported
    # The log rounds tokens per second, of which images have few on a CPU.
    rounding = 0.0
    for step in steps:
        rounding += 0.5 * tokens / step.tokens_per_second**2
    slack = LIMITS["own_clock_slack"] + rounding
    shortest = least * reported - slack
    longest = most * reported + slack
    if not shortest <= measured <= longest:
        reason = (
            "tokens per second, as the run reports them, times the seconds of a step ÷ its tokens"
        )
        return Verdict("clock", False, reason, measured=f"×{ratio:.3f}", limit=limit)
    ratios = []
    for step in series.steps:
        number = step.step
        before = number - 1
        if number in arrivals and before in arrivals and step.tokens_per_second > 0:
            between = arrivals[number] - arrivals[before]
            seconds = between - busy.get(before, 0.0)
            ratios.append(seconds * step.tokens_per_second / tokens)
    if len(ratios) < 3:
        fine = f"{len(steps)} steps took as long as the run reports"
        return Verdict("clock", True, fine, measured=f"×{ratio:.3f}", limit=limit)
    least, most = LIMITS["clock"]
    limit = f"×{least:g} – ×{most:g}, and ×{ratio:.3f} of the run's own clock"
    ratio = statistics.median(ratios)
    reason = (
        "tokens per second, as the run reports them, times the seconds between its lines ÷ "
        "the tokens of a step"
    )
    passed = least <= ratio <= most
    return Verdict("clock", passed, reason, measured=f"×{ratio:.3f}", limit=limit)
