from __future__ import annotations

import ast
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from primus.training import checks
from primus.training.logs import Series, Step

NAN, INF = math.nan, math.inf


def series(*losses: float, norms: tuple[float, ...] | None = None, first: int = 1, exact: bool = True) -> Series:
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
PLAIN = {"types": {"Linear": 21, "FSDPLinear": 1}, "converted": {}, "plain": [], "listened": True}


def facts(**changed: Any) -> dict[str, Any]:
    return {"linears": PLAIN | FP32, "float32_matmul_precision": "highest", "world_size": 2} | changed


def test_an_early_stop_is_a_missing_step() -> None:
    assert checks.steps_logged(series(*FALLING), 1, 20).passed
    verdict = checks.steps_logged(series(*FALLING[:12]), 1, 20)
    assert not verdict.passed
    assert verdict.reason == "missing: 13–20"
    assert verdict.measured == "12 of 20"


def test_a_hole_a_surplus_and_a_contradiction_fail() -> None:
    whole = series(*FALLING)
    hole = Series(steps=whole.steps[:4] + whole.steps[5:])
    assert checks.steps_logged(hole, 1, 20).reason == "missing: 5"
    assert checks.steps_logged(whole, 1, 18).reason == "not steps of this run: 19–20"
    twice = Series(steps=whole.steps, problems=("step 3 is logged twice",))
    assert not checks.steps_logged(twice, 1, 20).passed
    assert not checks.steps_logged(Series(), 1, 20).passed


@pytest.mark.parametrize(
    ("losses", "norms"),
    [((5.0, NAN), (0.5, 0.5)), ((5.0, INF), (0.5, 0.5)), ((5.0, 4.0), (0.5, NAN)), ((5.0, 4.0), (0.0, 0.5)), ((), ())],
)
def test_not_finite(losses: tuple[float, ...], norms: tuple[float, ...]) -> None:
    assert not checks.finite(series(*losses, norms=norms)).passed
    assert checks.finite(series(*FALLING)).passed


def test_first_loss_is_near_the_logarithm_of_the_vocabulary() -> None:
    assert checks.loss_plausible(series(7.38), 1024, 0.1).passed
    for wrong in (series(2.0), series(9.0), series(NAN), series(7.0, first=2), Series()):
        assert not checks.loss_plausible(wrong, 1024, 0.1).passed


def test_loss_falls() -> None:
    assert checks.loss_falls(series(*FALLING), 0.15).passed
    for wrong in (series(*([7.0] * 20)), series(*reversed(FALLING)), series(7.0, 1.0), series(*([NAN] * 20))):
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
    assert not checks.grad_norm_steady(series(*[5.0] * 60, norms=norms), math.nextafter(max(ratios), 0)).passed


def test_grad_norm_steady() -> None:
    calm = (0.5, 0.6, 0.7, 0.5, 0.4, 0.5)
    assert checks.grad_norm_steady(series(*FALLING[:6], norms=calm), 10).passed
    for wild in ((0.5, 0.6, 0.7, 0.5, 51.2, 0.5), (0.5, 0.6, 0.7, 0.5, NAN, 0.5)):
        verdict = checks.grad_norm_steady(series(*FALLING[:6], norms=wild), 10)
        assert not verdict.passed
        assert "step 5" in verdict.reason
    assert not checks.grad_norm_steady(series(5.0), 10).passed


def test_precision_is_what_the_linear_layers_saw() -> None:
    assert checks.precision(facts(), "fp32").passed
    assert not checks.precision(facts(), "bf16").passed


@pytest.mark.parametrize("side", ["weight", "input", "output"])
def test_one_linear_in_another_dtype_fails(side: str) -> None:
    mixed = facts()
    mixed["linears"] = mixed["linears"] | {f"{side}_dtypes": {"torch.float32": 21, "torch.bfloat16": 1}}
    verdict = checks.precision(mixed, "fp32")
    assert not verdict.passed
    assert f"1 linear {side}s in torch.bfloat16" in verdict.reason


def test_precision_needs_evidence() -> None:
    assert not checks.precision({}, "fp32").passed
    silent = facts()
    silent["linears"] = silent["linears"] | {f"{side}_dtypes": {} for side in ("weight", "input", "output")}
    assert not checks.precision(silent, "fp32").passed


def test_converted_layers_and_hidden_bf16_products_fail() -> None:
    converted = facts()
    converted["linears"] = converted["linears"] | {"converted": {"Float8Linear": 22}}
    assert "22 Float8Linear" in checks.precision(converted, "fp32").reason
    assert not checks.precision(facts(float32_matmul_precision="medium"), "fp32").passed


def engine(converted: dict[str, int], plain: list[str]) -> dict[str, object]:
    """Facts of a run with Transformer Engine's layers, which are of one class in any precision."""
    dtypes = {f"{side}_dtypes": {"torch.bfloat16": 4} for side in ("weight", "input", "output")}
    linears = PLAIN | {"types": {"TELinear": 4}, "converted": converted, "plain": plain} | dtypes
    return facts(linears=linears, device="cuda", gpu_kernels=["nvjet_qqtst_e4m3"] if converted else [])


def test_layers_of_transformer_engine_count_by_what_they_computed_in() -> None:
    eight, wide = engine({"TELinear": 4}, []), engine({}, ["layers.0.linear_proj"])
    assert checks.precision(eight, "fp8").passed
    assert checks.precision(wide, "bf16").passed
    assert "4 TELinear" in checks.precision(eight, "bf16").reason
    assert "no layer computes in 8 bits" in checks.precision(wide, "fp8").reason
    assert (
        "1 linear layers were left" in checks.precision(engine({"TELinear": 3}, ["layers.0.linear_proj"]), "fp8").reason
    )


def compiled(flops: dict[str, int] | None, **counts: int) -> dict[str, Any]:
    """What a compiled model leaves: no layer was listened to, the profiler's products tell."""
    linears = PLAIN | {"listened": False} | {f"{side}_dtypes": {} for side in ("weight", "input", "output")}
    told = {f"aten::{name.replace('_', ' ')}": count for name, count in counts.items()}
    more = {} if flops is None else {"matmul_flops": {f"aten::{k.replace('_', ' ')}": v for k, v in flops.items()}}
    return facts(linears=linears, matmul_dtypes=told, **more)


def test_a_sliver_of_the_products_may_be_computed_otherwise() -> None:
    """torchtitan adds up the outputs of a token's experts in float32; DeepSeek 16B on one H200 left these counts."""
    sliver = compiled({"mm_BFloat16": 1_000_000, "bmm_float": 200}, mm_BFloat16=1958, bmm_float=208)
    verdict = checks.precision(sliver, "bf16")
    assert verdict.passed
    assert "208 aten::bmm float, 0.02% of all" in verdict.reason
    much = compiled({"mm_BFloat16": 1_000_000, "bmm_float": 20_000}, mm_BFloat16=1958, bmm_float=208)
    assert "bf16 asked, but: 208 aten::bmm float" in checks.precision(much, "bf16").reason
    # An older run left no FLOPs; a few products without a dtype are told, many prove nothing.
    assert not checks.precision(compiled(None, mm_BFloat16=1958, bmm_float=208), "bf16").passed
    assert not checks.precision(compiled({"mm_BFloat16": 1000}, mm_BFloat16=94, grouped=6), "bf16").passed
    assert (
        "4 aten::grouped" in checks.precision(compiled({"mm_BFloat16": 1000}, mm_BFloat16=96, grouped=4), "bf16").reason
    )
    assert not checks.precision(compiled({"mm_float": 1000}, mm_float=98), "bf16").passed


def test_ran_as_asked() -> None:
    assert checks.ran_as_asked(facts(), {"world_size": 2}).passed
    assert "world_size is 2, not 4" in checks.ran_as_asked(facts(), {"world_size": 4}).reason
    assert not checks.ran_as_asked({}, {"seed": 42}).passed


def test_reproducible_to_the_last_bit() -> None:
    base = series(*FALLING)
    assert checks.reproducible(base, series(*FALLING), 0.0).passed
    moved = (*FALLING[:7], math.nextafter(FALLING[7], 9), *FALLING[8:])
    verdict = checks.reproducible(base, series(*moved), 0.0, "do this")
    assert not verdict.passed
    assert verdict.reason == "differs most at step 8; do this"
    rounded = checks.reproducible(series(*FALLING, exact=False), base, 0.0, "do this")
    assert rounded.reason == "20 steps agree, as far as the log's digits go"
    assert checks.reproducible(base, series(*moved), 1e-6).passed


def test_reproducible_fails_on_missing_or_bad_steps() -> None:
    base = series(*FALLING)
    for other in (Series(), series(*FALLING[:19]), series(*FALLING[:19], NAN)):
        assert not checks.reproducible(base, other, 0.1).passed
    assert not checks.reproducible(Series(), Series(), 0.1).passed
    both = series(*FALLING[:19], NAN)
    assert not checks.reproducible(both, both, 0.1).passed


def test_resume() -> None:
    base = series(*FALLING)
    assert checks.resume(base, series(*FALLING[10:], first=11), 11, 0.0).passed
    restarted = series(*FALLING[:10], first=11)
    assert not checks.resume(base, restarted, 11, 0.0).passed
    assert not checks.resume(base, Series(), 11, 0.0).passed


def test_accumulation() -> None:
    base = series(7.0, norms=(0.6748,))
    assert checks.accumulation(base, series(7.0000001, norms=(0.67480001,)), 1e-4).passed
    dropped = series(3.5, norms=(0.41,))
    assert not checks.accumulation(base, dropped, 1e-4).passed
    assert not checks.accumulation(base, series(7.0, norms=(1.3496,)), 1e-4).passed
    assert not checks.accumulation(base, Series(), 1e-4).passed
    assert not checks.accumulation(base, series(NAN), 1e-4).passed


def test_every_check_has_a_row_in_the_documentation() -> None:
    root, named = Path(__file__).parents[3], set()
    for path in (*(root / "src/primus/training").glob("*.py"), *(root / "src/primus/release").glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("Verdict", "of_faults"):
                words = [*call.args[:1], *(given.value for given in call.keywords if given.arg == "name")]
                named |= {word.value for word in words if isinstance(word, ast.Constant)}
    rows = (root / "docs/validation.md").read_text(encoding="utf-8").splitlines()
    listed = {row.split("|")[1].strip() for row in rows if row.startswith("| ")}
    assert {"loss falls", "clock", "reference data"} <= named
    assert sorted(named - listed - {"reference"}) == [], "add rows to the tables in docs/validation.md"
