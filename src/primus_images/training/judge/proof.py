"""Verdicts on a judged run, from the findings of the reference (``proof.json``) and the launcher's
clock.

The limits come from the reference itself: how far the run's precision alone moves its results.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from primus_images.recipes.architecture import size
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.rules import rules_of
from primus_images.recipes.schema import backend_rules
from primus_images.recipes.weights import config_of
from primus_images.training.judge.checks import LIMITS, Verdict, of_faults, relative_gap
from primus_images.training.run.logs import Series
from primus_images.yamlfile import spell

# Why blocks are not compared one by one: what they pass on is not recorded, or not rounded as the
# reference does.
_UNSEEN = "not compared: the model is compiled, ranks share sequences, or one rank uses autocast"
_NOTHING = ("the reference did not compare this",)
_EXPERTS = ".experts."


def unjudged(recipe: Recipe) -> str | None:
    """Return why the reference cannot repeat a run of ``recipe``, in a sentence, or None if it can."""
    if recipe.precision not in recipe.knows.judged:
        return (
            f"the reference does not round to {recipe.precision.upper()} as {recipe.backend} does"
        )
    for key in recipe.section("assets"):
        name = recipe.get(f"assets.{key}", str)
        if name.startswith("hf:"):
            return f"assets.{key} is on the Hugging Face hub, the reference reads local files only"
    tokenizer = recipe.asset("tokenizer")
    if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
        return "the tokenizer has no tokenizer.json, which the reference reads"
    if recipe.weights is not None and not recipe.architecture.of_images:
        config = config_of(recipe.weights)[1]
        activation = config.get("hidden_act", "silu")
        if not recipe.architecture.has_formula:
            return f"the reference has no formula of models of type {config['model_type']}"
        if activation not in ("silu", "swish"):
            return f"hidden_act of the weights is {activation}, and the reference computes SiLU"
    if "eval.patience" in recipe.settings:
        return "eval.patience may end the run early"
    if recipe.section("eval") and recipe.find(f"{recipe.backend}.save_weights", False):
        return "the best weights are exported, and the reference has the last ones"
    rules = backend_rules(recipe.backend)
    for key, value in recipe.section(recipe.backend).items():
        if value != rules[key].default and any(
            fnmatchcase(key, pattern) for pattern in recipe.knows.unmodelled
        ):
            return f"the reference does not repeat {recipe.backend}.{key}={spell(value)}"
    why = rules_of(recipe).unjudged(recipe)
    if why:
        return why
    if 8 * recipe.steps * size(recipe.architecture).total > LIMITS["bytes"]:
        return "the run is too large to keep the weights of every step"
    return None


def verdicts(evidence: Mapping[str, Any], series: Series) -> list[Verdict]:
    """Judge every step: data, parameters, loss, gradients, learning rate, update. No check passes
    without evidence.
    """
    steps: Sequence[Mapping[str, Any]] = evidence.get("steps", ())
    problem = evidence.get("problem")
    if problem:
        return [Verdict("reference", False, str(problem))]
    if (
        not steps
        and "parameters" in evidence
        and not (parameters := _parameters(evidence["parameters"])).passed
    ):
        return [parameters]
    if not steps or not series.steps:
        return [Verdict("reference", False, "the reference found no step to repeat")]
    first, moved, saved = (evidence.get(key, _NOTHING) for key in ("first", "moved", "saved"))
    wrong = [sentence for step in steps for sentence in step["data"]]
    return [
        of_faults(
            "reference data",
            wrong,
            "every rank and step had the recipe's own tokens and labels",
            measured=f"{len(wrong)} differences in {len(steps)} steps",
        ),
        _figure("loss", "reference loss", evidence, series),
        _figure("grad_norm", "reference gradient norm", evidence, series),
        _parameters(evidence["parameters"]),
        of_faults(
            "reference first weights", first, "every weight begins as the backend's rule draws it"
        ),
        of_faults(
            "reference trained weights",
            moved,
            "every trained weight moved, every frozen one stayed",
        ),
        of_faults("reference saved files", saved, "checkpoints and files hold what was trained"),
        _gradients(evidence, series),
        _blocks(evidence),
        *([] if evidence["precision"] == "fp32" else [_constants(evidence)]),
        _rates(steps),
        _updates(evidence),
    ]


def _parameters(findings: Mapping[str, Any]) -> Verdict:
    fine = f"{findings['count']:,} parameters, {findings['trained']:,} of them trained"
    return of_faults("reference parameters", findings["missing"] + findings["odd"], fine)


def _figure(key: str, name: str, evidence: Mapping[str, Any], series: Series) -> Verdict:
    repeated = {step["step"]: step for step in evidence["steps"]}
    usual = max((step["noise"][key] for step in evidence["steps"] if step["regular"]), default=0.0)
    gaps = []
    for step in series.steps:
        expected = repeated.get(step.step, {})
        limit = _limit(key, max(usual, expected.get("noise", {}).get(key, 0.0)), expected)
        gap = relative_gap(getattr(step, key), expected.get(key))
        gaps.append((gap / limit, gap, limit, step.step))
    share, gap, limit, at = max(gaps)
    if share > 1:
        reason = f"differs most at step {at}"
    else:
        reason = f"{len(gaps)} steps agree"
    return Verdict(
        name, share <= 1, reason, measured=f"{gap:.1e}", limit=f"relative gap ≤ {limit:.1e}"
    )


def _limit(key: str, noise: float, step: Mapping[str, Any]) -> float:
    return float(
        LIMITS["tied" if step.get("closest", 1.0) < LIMITS["tie"] else "least"][key]
        + LIMITS["noise"][key] * noise
    )


def _gradients(evidence: Mapping[str, Any], series: Series) -> Verdict:
    rows = [step for step in evidence["steps"] if step["own_gradient"]]
    wrong = [
        f"step {row['step']}: {name} has no gradient" for row in rows for name in row["missing"]
    ]
    wrong += [
        f"step {row['step']}: ranks that share {name} disagree"
        for row in rows
        for name in row["apart"]
    ]
    if len(rows) < len(evidence["steps"]):
        wrong.append(f"the optimizer made {len(rows)} updates in {len(evidence['steps'])} steps")
    usual: dict[str, float] = {}
    for step in evidence["steps"]:
        for kind, (gap, _) in step["noise"]["gaps"].items() if step["regular"] else ():
            usual[kind] = max(usual.get(kind, 0.0), gap)
    gaps = [(0.0, 0.0, LIMITS["least"]["gradient"], 0, "")]
    for row in rows:
        noise = row.get("noise", {})
        elsewhere = _sent_elsewhere(row)
        for kind, (gap, name) in row["gaps"].items():
            row_noise, _ = noise.get("gaps", {}).get(kind, (0.0, ""))
            limit = _limit("gradient", max(usual.get(kind, 0.0), row_noise), row)
            if elsewhere or _EXPERTS in kind:
                limit = max(limit, LIMITS["all_in_doubt"] * noise.get("doubt", {}).get(kind, 0.0))
            gaps.append((gap / limit, gap, limit, row["step"], name))
    for kind, (gap, limit) in _means(evidence["steps"]).items():
        if gap > limit:
            wrong.append(f"{kind}: the mean gap is {gap:.1e}, and the limit {limit:.1e}")
    share, gap, limit, at, name = max(gaps)
    if share > 1:
        wrong.append(f"{name} differs most, at step {at}")
    wrong += _clipping(rows, evidence, series)
    if evidence["precision"] == "fp32":
        summands = 3
    else:
        summands = min(3, evidence["summands"])
    # In the end, gradients of bfloat16 weights are bfloat16 numbers, in whatever dtype they were
    # added.
    if not (evidence.get("narrow") or evidence["narrow_sums"]):
        most = LIMITS["rounded"][summands - 1]
        wrong += [
            f"step {row['step']}: sums are rounded to bfloat16"
            for row in rows
            if row["rounded"] > most
        ]
    fine = "every tensor agrees, as the optimizer got it"
    limit_text = f"relative gap ≤ {limit:.1e}"
    return of_faults("reference gradients", wrong, fine, measured=f"{gap:.1e}", limit=limit_text)


def _sent_elsewhere(step: Mapping[str, Any]) -> bool:
    """Return whether rounding sent a token in doubt to another expert, which moves all gradients of
    the step.

    It did if the gradient of an expert moved by more than its noise, and by no more than all such
    tokens explain.
    """
    noise = step.get("noise", {})
    doubt = noise.get("doubt", {})
    return any(
        LIMITS["noise"]["gradient"] * noise["gaps"][kind][0]
        < gap
        <= LIMITS["all_in_doubt"] * doubt[kind]
        for kind, (gap, _) in step["gaps"].items()
        if _EXPERTS in kind and kind in doubt
    )


def _blocks(evidence: Mapping[str, Any]) -> Verdict:
    precision = evidence["precision"]
    wrong: list[str] = []
    worst = 0.0
    compared = 0
    for step in evidence["steps"]:
        if isinstance(step["blocks"], str):
            wrong.append(f"step {step['step']}: {step['blocks']}")
            continue
        for row in (row for row in step["blocks"] if "typical" in row):
            compared += 1
            factor = 1
            if row["balanced"]:
                factor = LIMITS["balanced"]
            of_row = {key: factor * limit for key, limit in LIMITS["blocks"][precision].items()}
            longer = LIMITS["longer"]["logits" if row["name"] == "logits" else precision]
            wrong += [
                f"step {step['step']}: {row['name']}: {sentence}"
                for sentence in _unlike(row, of_row, longer)
            ]
            worst = max([worst, *(row[key] / limit for key, limit in of_row.items())])
    if evidence["unseen"]:
        return of_faults("reference blocks", wrong, _UNSEEN)
    if not compared:
        wrong += _NOTHING
    fine = f"{compared} results of blocks agree, token by token"
    limit = "≤ 1 of what rounding explains"
    return of_faults("reference blocks", wrong, fine, measured=f"{worst:.2f}", limit=limit)


def _unlike(row: Mapping[str, Any], limits: Mapping[str, float], longer: float) -> Iterator[str]:
    if not row["typical"] <= limits["typical"]:
        yield f"most tokens differ by {row['typical']:.1f} × rounding"
    if not row["position"] <= limits["position"]:
        yield f"tokens at position {row['position_at']} differ by {row['position']:.1f} × rounding"
    if not row["token"] <= limits["token"]:
        sample, place = row["token_at"]
        yield f"token {place} of sample {sample} differs by {row['token']:.1f} × rounding"
    longer += LIMITS["longer_noise"] * row["noise"] ** 2
    if not row["name"].startswith("gradients") and not abs(row["share"]) <= longer:
        yield (
            f"what it computes is {abs(row['share']):.2%} too "
            f"{'long' if row['share'] > 0 else 'short'}"
        )


def _constants(evidence: Mapping[str, Any]) -> Verdict:
    constants: Mapping[str, Mapping[str, Any]] = evidence.get("constants", {})
    shares = {}
    limits = {}
    for name, row in constants.items():
        share = row["share"] - row["rounding"]
        shares[name] = share if row.get("one_sided") else abs(share)
        limits[name] = _limit_of_constant(row, evidence)
    wrong = sorted(
        f"{name}: the blocks show {constants[name]['share']:.2f} of it"
        for name, share in shares.items()
        if not share <= limits[name]
    )
    if evidence["unseen"]:
        return of_faults("reference constants", wrong, _UNSEEN)
    if not constants:
        wrong += _NOTHING
    decided = [name for name, limit in limits.items() if limit <= 1]
    hidden = ", ".join(name for name in constants if name not in decided)
    fine = f"{len(decided)} changes would show" + (
        f"; hidden by rounding: {hidden}" if hidden else ""
    )
    measured = f"{max((shares[name] for name in decided), default=0.0):.2f}"
    limit = (
        f"≤ {max((limits[name] for name in decided), default=LIMITS['changed']):.2f} of a change"
    )
    return of_faults("reference constants", wrong, fine, measured=measured, limit=limit)


def _limit_of_constant(row: Mapping[str, Any], evidence: Mapping[str, Any]) -> float:
    close, wide = (
        max(LIMITS["changed"], LIMITS[key] * row["deviation"])
        for key in ("deviations", "deviations_wide")
    )
    if row["eight"]:
        return float(max(close, min(wide, LIMITS["half"])))
    rough = evidence["precision"] == "fp8" or (row["biased"] and not evidence["on_cpu"])
    return float(wide if rough else close)


def _means(steps: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    regular = [step for step in steps if step["regular"] and step["own_gradient"]]
    rows = [step for step in regular if not _sent_elsewhere(step)]
    if len(regular) < LIMITS["enough_steps"] or len(rows) < 2:
        return {}
    least = LIMITS["tied" if any(row["closest"] < LIMITS["tie"] for row in rows) else "least"][
        "gradient"
    ]
    means = {}
    for kind in rows[0]["gaps"]:
        gap = statistics.fmean(row["gaps"].get(kind, (0.0, ""))[0] for row in rows)
        means[kind] = gap, least + _mean_noise([row["noise"]["gaps"][kind][0] for row in rows])
    return means


def _mean_noise(noises: Sequence[float]) -> float:
    total = sum(noises)
    if not total:
        return 0.0
    # 1 for a single noisy step, 1 / sqrt(enough) for that many equally noisy ones: how much of an
    # error a mean keeps.
    ratio = math.hypot(*noises) / total
    least = 1 / math.sqrt(LIMITS["enough_steps"])
    share = max(0.0, ratio - least) / (1 - least)
    factor = LIMITS["mean_noise"] + share * (LIMITS["noise"]["gradient"] - LIMITS["mean_noise"])
    return float(factor * total / len(noises))


def _clipping(
    rows: Sequence[Mapping[str, Any]], evidence: Mapping[str, Any], series: Series
) -> Iterator[str]:
    reported = {step.step: step.grad_norm for step in series.steps}
    most = evidence["max_norm"]
    allowed = LIMITS["clipped_narrow" if evidence.get("narrow") else "clipped"]
    for row in rows:
        norm = reported.get(row["step"], math.nan)
        if most > 0:
            expected = norm * min(1.0, most / (norm + 1e-6))
        else:
            expected = norm
        if not relative_gap(row["used_norm"], expected) <= allowed:
            lengths = f"{row['used_norm']:.4g}, not {expected:.4g}"
            yield f"step {row['step']}: the optimizer got gradients of length {lengths}"


def _rates(steps: Sequence[Mapping[str, Any]]) -> Verdict:
    wrong = [
        f"step {step['step']}: {', '.join(f'{rate:g}' for rate in step['rates'])}, not "
        f"{step['rate']:g}"
        for step in steps
        if any(relative_gap(rate, step["rate"]) > LIMITS["rate"] for rate in step.get("rates", ()))
    ]
    measured = f"{len(wrong)} of {len(steps)} steps differ"
    return of_faults(
        "reference learning rate", wrong, "every step had the schedule's", measured=measured
    )


def _updates(evidence: Mapping[str, Any]) -> Verdict:
    steps = evidence["steps"]
    worst = max(steps, key=lambda step: step["update"]["gap"])
    gap = worst["update"]["gap"]
    limit = LIMITS["update_narrow" if evidence.get("narrow") else "update"]
    if gap > limit:
        wrong = [f"{worst['update']['name']} differs most, at step {worst['step']}"]
    else:
        wrong = []
    for step in steps:
        wrong += [
            f"step {step['step']}: {name} is not the optimizer's, rounded" for name in step["stale"]
        ]
        wrong += [f"step {step['step']}: {sentence}" for sentence in step["biases"]]
    fine = "every weight is where clipping, AdamW and the schedule put it"
    measured = f"{gap:.1e} of the update"
    return of_faults("reference update", wrong, fine, measured=measured, limit=f"≤ {limit:.1e}")


def figures(
    facts: Mapping[str, Any],
    evidence: Mapping[str, Any],
    series: Series,
    recipe: Recipe,
    peak_gib: float | None,
) -> Verdict:
    """Judge the other reported figures: parameters, FLOPs per token or image, memory.

    ``peak_gib`` is the memory of the largest rank as the system counted it, in GiB; None if it was
    not measured. Runs on a GPU report the GPU's memory, which the system does not count. Ranks that
    share layers or experts report only their own parts; their parameter counts are not compared.
    """
    wrong = []
    parameters = evidence.get("parameters", {})
    shared = any(recipe.degree(kind) > 1 for kind in ("tp", "pp", "ep"))
    for key, count in (
        ("parameters", parameters.get("count")),
        ("trainable_parameters", parameters.get("trained")),
    ):
        if not shared and facts.get(key) != count:
            wrong.append(f"{key}: {facts.get(key)}, not {count}")
    flops = parameters.get("flops", math.nan)
    reported = facts.get("flops_per_unit", math.nan)
    if relative_gap(reported, flops) > LIMITS["flops"]:
        wrong.append(f"FLOPs of a token or image: {reported:.4g}, not {flops:.4g}")
    # Even in the narrowest precision, and without gradients and moments.
    least = 2 * (parameters.get("count") or 0) / recipe.world_size / 2**30
    wrong += [
        f"step {step.step}: {step.memory_gib:g} GiB of memory, and the weights alone take "
        f"{least:.2g}"
        for step in series.steps
        if step.memory_gib < max(least, 0.005)
    ]
    most, (low, high) = (
        max((step.memory_gib for step in series.steps), default=0.0),
        LIMITS["memory"],
    )
    if (
        peak_gib is not None
        and facts.get("device") == "cpu"
        and not low * peak_gib <= most <= high * peak_gib
    ):
        wrong.append(f"{most:g} GiB of memory, and the largest rank had {peak_gib:.3g}")
    return of_faults(
        "reported figures", wrong, "parameters, FLOPs per unit and memory are the recipe's"
    )


def clock(
    series: Series, arrivals: Mapping[int, float], busy: Mapping[int, float], tokens: int
) -> Verdict:
    """Judge the reported tokens per second against the launcher's clock.

    ``arrivals``: step → when its line reached the launcher, in seconds. ``busy``: step → seconds
    that the run spent on evidence after it. ``tokens``: tokens of one rank in a step, from the
    recipe.
    """
    ratios = [
        (arrivals[step.step] - arrivals[step.step - 1] - busy.get(step.step - 1, 0.0))
        * step.tokens_per_second
        / tokens
        for step in series.steps
        if step.step in arrivals and step.step - 1 in arrivals and step.tokens_per_second > 0
    ]
    least, most = LIMITS["clock"]
    limit = f"×{least:g} – ×{most:g}"
    if len(ratios) < 3:
        return Verdict("clock", True, "fewer than 4 steps: too few to time", limit=limit)
    ratio = statistics.median(ratios)
    reason = (
        "tokens per second, as the run reports them, times the seconds between its lines ÷ "
        "the tokens of a step"
    )
    return Verdict("clock", least <= ratio <= most, reason, measured=f"×{ratio:.3f}", limit=limit)
