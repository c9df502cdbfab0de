import ast
import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primus_images.training.judge import checks
from primus_images.training.judge.checks import Steps
from primus_images.training.run.logs import Series, Step

NAN, INF = math.nan, math.inf


def series(
    *losses: float, norms: tuple[float, ...] | None = None, first: int = 1, exact: bool = True
) -> Series:
    norms = norms or (0.5,) * len(losses)
    return Series(
        steps=tuple(
            Step(step=first + n, loss=loss, grad_norm=norm, tokens_per_second=100.0, memory_gib=0.5)
            for n, (loss, norm) in enumerate(zip(losses, norms, strict=True))
        ),
        exact=exact,
    )


FALLING = tuple(7.0 - 0.2 * n for n in range(20))
FP32 = {f"{side}_dtypes": {"torch.float32": 22} for side in ("weight", "input", "output")}
PLAIN = {"converted": {}, "plain": [], "listened": True}


def facts(**changed: Any) -> dict[str, Any]:
    return {
        "linears": PLAIN | FP32,
        "float32_matmul_precision": "highest",
        "world_size": 2,
    } | changed


@pytest.mark.parametrize(
    ("steps", "last", "reason", "measured"),
    [
        (range(1, 21), 20, "every step is in the log once", "20 of 20"),
        (range(1, 13), 20, "missing: 13–20", "12 of 20"),
        ([*range(1, 5), *range(6, 21)], 20, "missing: 5", "19 of 20"),
        (range(1, 21), 18, "not steps of this run: 19–20", "18 of 18"),
        ((), 3, "missing: 1–3", "0 of 3"),
    ],
)
def test_every_step_is_logged_once(
    steps: Sequence[int], last: int, reason: str, measured: str
) -> None:
    logged = Series(steps=tuple(replace(series(7.0).steps[0], step=step) for step in steps))
    verdict = checks.steps_logged(logged, 1, last)
    assert (verdict.passed, verdict.reason, verdict.measured) == (
        reason.startswith("every"),
        reason,
        measured,
    )
    assert not checks.steps_logged(
        replace(logged, problems=("step 3 is logged twice",)), 1, last
    ).passed


@pytest.mark.parametrize(
    ("losses", "norms"),
    [
        ((5.0, NAN), (0.5, 0.5)),
        ((5.0, INF), (0.5, 0.5)),
        ((5.0, 4.0), (0.5, NAN)),
        ((5.0, 4.0), (0.0, 0.5)),
        ((), ()),
    ],
)
def test_not_finite(losses: tuple[float, ...], norms: tuple[float, ...]) -> None:
    assert not checks.finite(series(*losses, norms=norms)).passed
    assert checks.finite(series(*FALLING)).passed


def test_first_loss_is_near_the_logarithm_of_the_vocabulary() -> None:
    assert checks.loss_plausible(series(7.38), 1024, 0.1).passed
    for wrong in (series(2.0), series(9.0), series(NAN), series(7.0, first=2), Series()):
        assert not checks.loss_plausible(wrong, 1024, 0.1).passed


@pytest.mark.parametrize(
    ("share", "passed"), [(0.899, False), (0.901, True), (1.099, True), (1.101, False)]
)
def test_the_first_loss_may_be_above_by_the_spread_of_random_logits(
    share: float, passed: bool
) -> None:
    expected = math.log(1024)
    loss = share * expected
    if share > 1:
        loss += checks.LIMITS["spread"]
    assert checks.loss_plausible(series(loss), 1024, 0.1).passed is passed


def test_a_loss_that_falls_by_just_the_limit_passes() -> None:
    halved = series(8.0, 7.0, 6.0, 5.0, 4.0)
    assert checks.loss_falls(halved, 0.5).passed
    assert not checks.loss_falls(halved, 0.51).passed
    assert not checks.loss_falls(series(8.0, 6.0, 5.0, 4.0), 0.5).passed, "too few steps"


def test_a_norm_of_just_the_limit_is_steady() -> None:
    jump = series(*([7.0] * 4), norms=(1.0, 1.0, 1.0, 3.0))
    assert checks.grad_norm_steady(jump, 3.0).passed
    assert not checks.grad_norm_steady(jump, 2.9).passed
    assert checks.grad_norm_steady(jump, 2.9, repeated=True).passed
    few = series(*([7.0] * 3), norms=(1.0, 1.0, 1.0))
    assert not checks.grad_norm_steady(few, 3.0, repeated=True).passed


def test_two_precisions_agree_in_the_end_up_to_the_tolerance() -> None:
    base = series(9.0, 8.0, 7.0, 6.0, 4.0)
    other = series(1.0, 1.0, 1.0, 1.0, 5.0)
    assert checks.same_loss(("fp32", "bf16"), base, other, 0.2).passed
    assert not checks.same_loss(("fp32", "bf16"), base, other, 0.19).passed
    few = series(9.0, 8.0, 7.0, 4.0)
    assert not checks.same_loss(("fp32", "bf16"), few, few, 0.2).passed


def test_loss_falls() -> None:
    assert checks.loss_falls(series(*FALLING), 0.15).passed
    for wrong in (
        series(*([7.0] * 20)),
        series(*reversed(FALLING)),
        series(7.0, 1.0),
        series(*([NAN] * 20)),
    ):
        assert not checks.loss_falls(wrong, 0.15).passed
        assert not checks.loss_falls(wrong, 0.15, repeated=True).passed
    assert not checks.loss_falls(series(*FALLING), 0.99).passed
    verdict = checks.loss_falls(series(*FALLING), 0.99, repeated=True)
    assert verdict.passed
    assert "the reference has the same losses" in verdict.reason


def test_the_running_median_is_that_of_all_norms_before() -> None:
    draw = random.Random(0)
    norms = tuple(draw.lognormvariate(0, 1) for _ in range(60))
    ratios = [norms[at] / statistics.median(norms[:at]) for at in range(3, 60)]
    verdict = checks.grad_norm_steady(series(*[5.0] * 60, norms=norms), max(ratios))
    assert verdict.passed
    assert f"at step {ratios.index(max(ratios)) + 4}" in verdict.reason
    assert not checks.grad_norm_steady(
        series(*[5.0] * 60, norms=norms), math.nextafter(max(ratios), 0)
    ).passed
    assert not checks.grad_norm_steady(series(5.0), 10).passed
    nan = checks.grad_norm_steady(series(*FALLING[:6], norms=(0.5, 0.6, 0.7, 0.5, NAN, 0.5)), 10)
    assert not nan.passed
    assert "step 5" in nan.reason


SIDES = ("weight", "input", "output")


@pytest.mark.parametrize(
    ("linears", "more", "reason"),
    [
        ({}, {}, ""),
        *(
            (
                {f"{side}_dtypes": {"torch.float32": 21, "torch.bfloat16": 1}},
                {},
                f"1 linear {side}s in torch.bfloat16",
            )
            for side in SIDES
        ),
        ({f"{side}_dtypes": {} for side in SIDES}, {}, "no linear layer was called"),
        ({"converted": {"Float8Linear": 22}}, {}, "22 Float8Linear"),
        ({}, {"float32_matmul_precision": "medium"}, "float32 matmul precision is 'medium'"),
    ],
)
def test_precision_is_what_the_linear_layers_saw(
    linears: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    verdict = checks.precision(facts(linears=PLAIN | FP32 | linears, **more), "fp32")
    assert verdict.passed is not bool(reason)
    assert reason in verdict.reason
    assert not checks.precision(facts(), "bf16").passed
    assert not checks.precision({}, "fp32").passed


def engine(converted: dict[str, int], plain: list[str]) -> dict[str, object]:
    """Facts of a run with Transformer Engine's layers, which are of one class in any precision."""
    dtypes = {f"{side}_dtypes": {"torch.bfloat16": 4} for side in ("weight", "input", "output")}
    linears = PLAIN | {"converted": converted, "plain": plain} | dtypes
    return facts(
        linears=linears, device="cuda", gpu_kernels=["nvjet_qqtst_e4m3"] if converted else []
    )


def test_layers_of_transformer_engine_count_by_what_they_computed_in() -> None:
    eight, wide = engine({"TELinear": 4}, []), engine({}, ["layers.0.linear_proj"])
    assert checks.precision(eight, "fp8").passed
    assert checks.precision(wide, "bf16").passed
    assert "4 TELinear" in checks.precision(eight, "bf16").reason
    assert "no layer computes in 8 bits" in checks.precision(wide, "fp8").reason
    assert (
        "1 linear layers were left"
        in checks.precision(engine({"TELinear": 3}, ["layers.0.linear_proj"]), "fp8").reason
    )


def compiled(flops: dict[str, int] | None, **counts: int) -> dict[str, Any]:
    """What a compiled model leaves: no layer was listened to, the profiler's products tell."""
    linears = (
        PLAIN
        | {"listened": False}
        | {f"{side}_dtypes": {} for side in ("weight", "input", "output")}
    )
    told = {f"aten::{name.replace('_', ' ')}": count for name, count in counts.items()}
    more = (
        {}
        if flops is None
        else {"matmul_flops": {f"aten::{k.replace('_', ' ')}": v for k, v in flops.items()}}
    )
    return facts(linears=linears, matmul_dtypes=told, **more)


def test_a_sliver_of_the_products_may_be_computed_otherwise() -> None:
    """torchtitan adds up the outputs of a token's experts in float32; DeepSeek 16B on one H200 left
    these counts.
    """
    sliver = compiled({"mm_BFloat16": 1_000_000, "bmm_float": 200}, mm_BFloat16=1958, bmm_float=208)
    verdict = checks.precision(sliver, "bf16")
    assert verdict.passed
    assert "208 aten::bmm float, 0.02% of all" in verdict.reason
    much = compiled(
        {"mm_BFloat16": 1_000_000, "bmm_float": 20_000}, mm_BFloat16=1958, bmm_float=208
    )
    assert "bf16 asked, but: 208 aten::bmm float" in checks.precision(much, "bf16").reason
    # An older run left no FLOPs; a few products without a dtype are told, many prove nothing.
    assert not checks.precision(compiled(None, mm_BFloat16=1958, bmm_float=208), "bf16").passed
    assert not checks.precision(
        compiled({"mm_BFloat16": 1000}, mm_BFloat16=94, grouped=6), "bf16"
    ).passed
    assert (
        "4 aten::grouped"
        in checks.precision(
            compiled({"mm_BFloat16": 1000}, mm_BFloat16=96, grouped=4), "bf16"
        ).reason
    )
    assert not checks.precision(compiled({"mm_float": 1000}, mm_float=98), "bf16").passed


def test_ran_as_asked() -> None:
    assert checks.ran_as_asked(facts(), {"world_size": 2}).passed
    assert "world_size is 2, not 4" in checks.ran_as_asked(facts(), {"world_size": 4}).reason
    assert not checks.ran_as_asked({}, {"seed": 42}).passed


@pytest.mark.parametrize(
    ("value", "other", "gap"),
    [
        (1.0, 2.0, 0.5),
        (-2.0, 1.0, 1.5),
        (0.0, 0.0, 0.0),
        (1.0, None, math.inf),
        (NAN, NAN, math.inf),
    ],
)
def test_a_gap_is_relative_to_the_larger_value(
    value: float, other: float | None, gap: float
) -> None:
    assert checks.relative_gap(value, other) == gap


def test_the_same_steps_to_the_last_bit() -> None:
    base = series(*FALLING)
    assert checks.same_steps("x", base, series(*FALLING), 0.0).passed
    moved = (*FALLING[:7], math.nextafter(FALLING[7], 9), *FALLING[8:])
    verdict = checks.same_steps("x", base, series(*moved), 0.0)
    assert (verdict.passed, verdict.reason) == (False, "differs most at step 8")
    rounded = checks.same_steps("x", series(*FALLING, exact=False), base, 0.0)
    assert rounded.reason == "20 steps agree, as far as the log's digits go"
    assert checks.same_steps("x", base, series(*moved), 1e-6).passed


@pytest.mark.parametrize(
    ("base", "other", "first"),
    [
        (FALLING, (), 1),
        (FALLING, FALLING[:19], 1),
        (FALLING, (*FALLING[:19], NAN), 1),
        ((), (), 1),
        ((*FALLING[:19], NAN), (*FALLING[:19], NAN), 1),
        (FALLING, FALLING[10:], 11),
    ],
)
def test_steps_that_are_missing_or_bad_are_not_the_same(
    base: tuple[float, ...], other: tuple[float, ...], first: int
) -> None:
    assert not checks.same_steps("x", series(*base), series(*other), 0.1, Steps(first)).passed


def test_a_resumed_run_is_compared_from_its_first_step() -> None:
    resumed = series(*FALLING[10:], first=11)
    assert checks.same_steps("resume", series(*FALLING), resumed, 0.0, Steps(11)).passed
    assert (
        checks.same_steps("resume", series(*FALLING), resumed, 0.0).reason
        == "not logged in the second run: 1–10"
    )


@pytest.mark.parametrize(
    ("value", "other", "passed"), [(3.0, 3.0, True), (3.0, 3.001, False), (3.0, None, False)]
)
def test_evaluations_of_the_same_steps_are_the_same(
    value: float, other: float | None, passed: bool
) -> None:
    first, second = (
        replace(run, steps=(*run.steps[:-1], replace(run.steps[-1], eval_loss=loss)))
        for run, loss in ((series(*FALLING), value), (series(*FALLING), other))
    )
    for pair in ((first, second), (second, first)):
        verdict = checks.same_steps("resume", *pair, 0.0)
        assert verdict.passed is passed
        assert passed or verdict.reason == "differs most at step 20"


def test_one_step_of_a_divided_batch() -> None:
    base = series(7.0, 6.0, norms=(0.6748, 0.5))
    assert checks.same_steps(
        "x", base, series(7.0000001, 5.0, norms=(0.67480001, 0.5)), 1e-4, Steps(last=1)
    ).passed
    for other in (series(3.5, norms=(0.41,)), series(7.0, norms=(1.3496,)), Series(), series(NAN)):
        assert not checks.same_steps("x", base, other, 1e-4, Steps(last=1)).passed


def test_every_check_has_a_row_in_the_documentation() -> None:
    root, named = Path(__file__).parents[3], set()
    for path in (
        *(root / "src/primus_images/training").rglob("*.py"),
        *(root / "src/primus_images/release").glob("*.py"),
    ):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in (
                "Verdict",
                "of_faults",
            ):
                words = [
                    *call.args[:1],
                    *(given.value for given in call.keywords if given.arg == "name"),
                ]
                named |= {word.value for word in words if isinstance(word, ast.Constant)}
    rows = (root / "docs/validation.md").read_text(encoding="utf-8").splitlines()
    listed = {row.split("|")[1].strip() for row in rows if row.startswith("| ")}
    assert {"loss falls", "clock", "reference data"} <= named
    # Those of the reference without a row of their own share one, which names each.
    (shared,) = [row for row in rows if row.startswith("| reference … |")]
    parts = re.split(r", | or ", shared.rpartition("in its ")[2].strip(" |"))
    listed |= {"reference", *(f"reference {part}" for part in parts)}
    missing = named - listed
    assert missing == set(), "add rows to the tables in docs/validation.md"


@pytest.mark.parametrize(
    ("code", "cause", "passed", "reason"),
    [
        (0, "", True, "all ranks ended with 0"),
        (0, "noise", True, "all ranks ended with 0"),
        (1, "", False, "the job ended with exit code 1"),
        (-9, "", False, "killed by signal 9"),
        (1, "out of memory", False, "out of memory"),
        (-6, "a rank hung", False, "a rank hung"),
    ],
)
def test_the_exit_code_tells_its_cause(code: int, cause: str, passed: bool, reason: str) -> None:
    verdict = checks.exit_code(code, cause)
    assert (verdict.passed, verdict.reason) == (passed, reason)
    assert (verdict.measured, verdict.limit) == (str(code), "0")


@pytest.mark.parametrize(
    ("measured", "passed"), [(900.0, True), (899.9, False), (2000.0, True), (None, False)]
)
def test_throughput_is_that_of_the_reference_within_its_tolerance(
    measured: float | None, passed: bool
) -> None:
    verdict = checks.throughput(measured, 1000, 0.1)
    assert (verdict.passed, verdict.limit) == (passed, "≥ 900")
    if measured is None:
        assert verdict.reason == "no step was measured"
    else:
        assert f"{measured / 1000:.2f} × the reference of 1,000 tokens/s/GPU" in verdict.reason
    assert "of 4.51 images/s/GPU" in checks.throughput(4.5, 4.51, 0.1, "images").reason


def test_a_check_that_passed_is_not_skipped() -> None:
    failed = checks.exit_code(1)
    skipped = checks.skipped(failed, "it did not start")
    assert (skipped.skipped, skipped.passed, skipped.measured) == (True, False, "")
    assert skipped.reason == "skipped: it did not start"
    assert checks.skipped(checks.exit_code(0), "why") == checks.exit_code(0)
