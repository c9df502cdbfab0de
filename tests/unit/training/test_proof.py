"""Verdicts from what the reference found: each fault in the evidence fails its own check."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest

from primus_images.recipes.resolve import resolve
from primus_images.recipes.rules import rules_of
from primus_images.recipes.schema import backend_rules, backends
from primus_images.recipes.setting import Choices
from primus_images.training.judge import proof
from primus_images.training.run.logs import Series, Step
from primus_images.yamlfile import spell
from proof_kit import FLOPS, evidence

STEPS = 6
SEEN = {step: (7.0 - step, 1.0) for step in range(1, STEPS + 1)}


def series(rate: float = 100.0) -> Series:
    """The healthy run itself."""
    steps = [
        Step(step=n, loss=7.0 - n, grad_norm=1.0, tokens_per_second=rate, memory_gib=1.0)
        for n in range(1, STEPS + 1)
    ]
    return Series(steps=tuple(steps), exact=True)


def failing(found: dict[str, Any], run: Series | None = None) -> list[str]:
    """The names of the verdicts that did not pass."""
    return [
        verdict.name for verdict in proof.verdicts(found, run or series()) if not verdict.passed
    ]


def test_a_healthy_run_passes() -> None:
    assert failing(evidence(SEEN)) == []


EVALUATED = {"step": 3, "loss": 5.0, "noise": 1e-9, "closest": 1.0}
CHANGES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    (
        "reference data",
        lambda e: e["steps"][2]["data"].append(
            "step 3, rank 0: 10% of the labels are other tokens"
        ),
    ),
    (
        "reference parameters",
        lambda e: e["parameters"]["missing"].append("missing: model.layers.1.mlp.up_proj.weight"),
    ),
    ("reference parameters", lambda e: e["parameters"]["odd"].append("a equals b")),
    ("reference first weights", lambda e: e["first"].append("a begins with a mean of 1, not 0")),
    ("reference saved files", lambda e: e["saved"].append("weights lacks a")),
    ("reference checkpoints", lambda e: e["checkpoints"].append("step-3: a is missing")),
    ("reference dropout", lambda e: e.update(dropout=["a keeps 95% of its inputs, not 90%"])),
    ("reference evaluation", lambda e: e["evaluations"].append(EVALUATED)),
    ("reference trained weights", lambda e: e["moved"].append("a was never updated")),
    ("reference loss", lambda e: e["steps"][4].update(loss=2.0001)),
    ("reference loss", lambda e: e["steps"].pop()),
    ("reference gradient norm", lambda e: e["steps"][0].update(grad_norm=1.001)),
    (
        "reference gradients",
        lambda e: e["steps"][5]["gaps"].update({"b.weight": (1e-3, "b.0.weight")}),
    ),
    ("reference gradients", lambda e: e["steps"][5]["missing"].append("a")),
    ("reference gradients", lambda e: e["steps"][5]["apart"].append("a")),
    ("reference gradients", lambda e: e["steps"][3].update(own_gradient=False)),
    ("reference gradients", lambda e: e["steps"][3].update(used_norm=1.01)),
    ("reference gradients", lambda e: e["steps"][3].update(rounded=1.0)),
    (
        "reference update",
        lambda e: e["steps"][2]["biases"].append("a did not move towards balance"),
    ),
    ("reference learning rate", lambda e: e["steps"][1].update(rates=[0.01, 0.0])),
    ("reference update", lambda e: e["steps"][1]["update"].update(gap=2e-5)),
    ("reference update", lambda e: e["steps"][1]["stale"].append("a")),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_a_difference_fails_the_check_that_it_belongs_to(
    name: str, change: Callable[[dict[str, Any]], Any]
) -> None:
    found = copy.deepcopy(evidence(SEEN))
    change(found)
    assert name in failing(found)


@pytest.mark.parametrize("found", [{}, {"steps": []}, {"problem": "the run left no weights-3.pt"}])
def test_no_evidence_is_no_pass(found: dict[str, Any]) -> None:
    assert failing(found) == ["reference"]
    assert failing(evidence(SEEN), Series()) == ["reference"]


def test_bounds_of_a_rounded_precision_follow_from_its_own_noise_for_each_kind_of_tensor() -> None:
    found = evidence(SEEN) | {"precision": "bf16"}
    for row in found["steps"]:
        row["gaps"] = {"a.weight": (2e-2, "a.1.weight"), "b.weight": (1e-6, "b.1.weight")}
    found["steps"][0]["noise"] = {
        "loss": 1e-4,
        "grad_norm": 1e-3,
        "gaps": {"a.weight": (1e-2, "a.0.weight"), "b.weight": (1e-6, "b.0.weight")},
    }
    assert failing(found) == []
    found["steps"][2]["gaps"]["b.weight"] = (2e-2, "b.1.weight")
    assert failing(found) == ["reference gradients"]


@pytest.mark.parametrize(
    ("noises", "gaps", "passed"),
    [
        ([0.01, 0.01, 0.01, 0.01], [0.024, 0.024, 0.024, 0.024], True),
        ([0.01, 0.01, 0.01, 0.01], [0.027, 0.027, 0.027, 0.027], False),
        # One step has nearly all of the noise, so that nothing averages out.
        ([0.0001, 0.0001, 0.0001, 0.01], [0.0001, 0.0001, 0.0001, 0.055], True),
        ([0.0001, 0.0001, 0.0001, 0.01], [0.0001, 0.0001, 0.0001, 0.065], False),
    ],
)
def test_a_mean_gap_may_be_as_large_as_the_noise_of_its_steps_leaves_it(
    noises: tuple[float, ...], gaps: tuple[float, ...], passed: bool
) -> None:
    found = evidence(SEEN) | {"precision": "bf16"}
    for row, noise, gap in zip(found["steps"], noises, gaps, strict=False):
        row["regular"] = True
        row["gaps"] = {"a.weight": (gap, "a.1.weight")}
        row["noise"] = {
            "loss": 1e-4,
            "grad_norm": 1e-3,
            "gaps": {"a.weight": (noise, "a.0.weight")},
        }
    for row in found["steps"][len(noises) :]:
        row["regular"], row["gaps"] = False, {}
    assert failing(found) == ([] if passed else ["reference gradients"])


@pytest.mark.parametrize(
    ("summands", "share", "passed"),
    [(2, 0.45, True), (2, 1.0, False), (4, 0.18, True), (4, 0.42, False)],
)
def test_sums_in_bfloat16_have_fewer_digits_than_sums_of_bfloat16(
    summands: int, share: float, passed: bool
) -> None:
    found = evidence(SEEN) | {"precision": "bf16", "summands": summands}
    found["steps"][2]["rounded"] = share
    assert (failing(found) == []) is passed
    assert failing(found | {"narrow_sums": True}) == []


EPSILON = "norm epsilon + 0.001"


def _constant(
    share: float, rounding: float = 0.0, deviation: float = 0.01, **more: Any
) -> dict[str, Any]:
    return {
        "share": share,
        "rounding": rounding,
        "deviation": deviation,
        "biased": False,
        "eight": False,
    } | more


@pytest.mark.parametrize(
    ("share", "rounding", "more", "told"),
    [
        (0.1, {"rounding": 0.05}, {}, ""),
        (1.0, {"rounding": 0.02}, {}, "the blocks show 1.00 of it"),
        (math.nan, {"rounding": 0.02}, {}, "the blocks show nan of it"),
        (0.1, {"deviation": 0.001}, {}, "the blocks show 0.10 of it"),
        # What rounding alone may show is no fault, and is no proof either.
        (1.0, {"rounding": 0.1, "deviation": 0.2}, {}, ""),
        # The opposite of some changes is no fault.
        (-0.6, {"one_sided": True}, {}, ""),
        (0.6, {"one_sided": True}, {}, "the blocks show 0.60 of it"),
        # Where the reference shows the same, it is the rounding.
        (0.8, {"rounding": 0.75, "deviation": 0.001}, {}, ""),
        (0.4, {"rounding": -0.4, "deviation": 0.05}, {}, "the blocks show 0.40 of it"),
        # The rounding of GPUs, and the grids of FP8, are not known as well.
        (0.11, {"biased": True}, {}, "the blocks show 0.11 of it"),
        (0.11, {"biased": True}, {"on_cpu": False}, ""),
        (0.11, {}, {"on_cpu": False}, "the blocks show 0.11 of it"),
        (0.13, {}, {"precision": "fp8"}, "the blocks show 0.13 of it"),
        # Half of a change to the rounding to FP8 is a fault, unless it is within seven deviations.
        (0.4, {"deviation": 0.04, "eight": True}, {"precision": "fp8"}, ""),
        (
            0.7,
            {"deviation": 0.09, "eight": True},
            {"precision": "fp8"},
            "the blocks show 0.70 of it",
        ),
    ],
)
def test_a_constant_is_judged_as_closely_as_rounding_allows(
    share: float, rounding: dict[str, Any], more: dict[str, Any], told: str
) -> None:
    found = (
        evidence(SEEN)
        | {"precision": "bf16", "constants": {EPSILON: _constant(share, **rounding)}}
        | more
    )
    verdict = next(
        each for each in proof.verdicts(found, series()) if each.name == "reference constants"
    )
    assert (verdict.reason if not verdict.passed else "") == (told and f"{EPSILON}: {told}")


FINE = {
    "name": "layers.1",
    "balanced": False,
    "certain": 1.0,
    "typical": 1.2,
    "token": 3.0,
    "token_at": [5, 127],
    "position": 2.0,
    "position_at": 127,
    "share": 1e-4,
    "noise": 3e-3,
}


@pytest.mark.parametrize(
    ("precision", "change", "told"),
    [
        ("bf16", {}, ""),
        ("bf16", {"typical": 2.2}, "most tokens differ by 2.2 × rounding"),
        ("fp8", {"typical": 2.6}, ""),
        ("bf16", {"typical": math.nan}, "most tokens differ by nan × rounding"),
        ("bf16", {"balanced": True, "typical": 6.9}, ""),
        ("bf16", {"balanced": True, "typical": 12.0}, "most tokens differ by 12.0 × rounding"),
        ("bf16", {"token": 9.0}, "token 127 of sample 5 differs by 9.0 × rounding"),
        ("fp32", {"token": 9.0}, ""),
        ("fp8", {"token": 40.0}, "token 127 of sample 5 differs by 40.0 × rounding"),
        ("bf16", {"position": 2.8}, "tokens at position 127 differ by 2.8 × rounding"),
        ("fp8", {"position": 2.8}, ""),
        ("bf16", {"share": -0.003}, "what it computes is 0.30% too short"),
        # Rounding this large may do so.
        ("bf16", {"share": -0.003, "noise": 0.05}, ""),
        ("bf16", {"name": "gradients of layers.1", "share": -0.003}, ""),
        ("bf16", {"name": "logits", "share": 0.001}, "what it computes is 0.10% too long"),
    ],
)
def test_a_block_is_judged_token_by_token(
    precision: str, change: dict[str, Any], told: str
) -> None:
    found = evidence(SEEN) | {"precision": precision}
    found["steps"][0]["blocks"] = [FINE | change]
    verdict = next(
        each for each in proof.verdicts(found, series()) if each.name == "reference blocks"
    )
    name = change.get("name", "layers.1")
    assert (verdict.reason if not verdict.passed else "") == (told and f"step 1: {name}: {told}")


def test_blocks_without_evidence_do_not_pass_unless_the_model_is_compiled() -> None:
    found = evidence(SEEN)
    for row in found["steps"]:
        row["blocks"] = []
    assert failing(found) == ["reference blocks"]
    assert failing(found | {"unseen": True}) == []
    found["steps"][0]["blocks"] = "layers.1 ran 0 times for 2 micro-batches"
    assert failing(found) == ["reference blocks"]
    assert failing(evidence(SEEN) | {"precision": "bf16", "constants": {}}) == [
        "reference constants"
    ]


def test_constants_that_rounding_hides_are_named() -> None:
    found = evidence(SEEN) | {
        "precision": "bf16",
        "constants": {EPSILON: _constant(0.0, rounding=0.1, deviation=0.3)},
    }
    verdict = next(
        each for each in proof.verdicts(found, series()) if each.name == "reference constants"
    )
    assert verdict.passed
    assert verdict.reason == f"0 changes would show; hidden by rounding: {EPSILON}"


def test_only_a_step_in_which_a_token_may_go_to_either_expert_has_wider_bounds() -> None:
    found = evidence(SEEN)
    found["steps"][3] |= {"gaps": {"a.weight": (0.05, "a.1.weight")}, "closest": 1e-8}
    assert failing(found) == []
    found["steps"][3]["closest"] = 1e-3
    assert failing(found) == ["reference gradients"]


@pytest.mark.parametrize(("gap", "passed"), [(0.6, True), (0.7, False)])
def test_an_expert_may_differ_by_the_tokens_in_doubt(gap: float, passed: bool) -> None:
    """In a run of DeepSeek-V3 in BF16, one token that went to another expert was the whole gap of
    0.6.
    """
    found = evidence(SEEN)
    found["precision"] = "bf16"
    found["steps"][3]["gaps"] = {
        "mlp.experts.up_proj.weight": (gap, "mlp.experts.4.up_proj.weight")
    }
    found["steps"][3]["noise"] = {
        "loss": 1e-4,
        "grad_norm": 1e-3,
        "gaps": {"mlp.experts.up_proj.weight": (0.06, "mlp.experts.0.up_proj.weight")},
        "doubt": {"mlp.experts.up_proj.weight": 0.6},
    }
    assert failing(found) == ([] if passed else ["reference gradients"])


@pytest.mark.parametrize(
    ("expert", "other", "passed"),
    [(0.3, 0.1, True), (0.3, 0.13, False), (0.1, 0.1, False), (0.7, 0.1, False)],
)
def test_other_tensors_may_only_if_a_token_went_to_another_expert(
    expert: float, other: float, passed: bool
) -> None:
    """In a run of Mixtral in BF16, the gradients of keys moved by 5.9 times the noise, and the mean
    by 2.7 times.
    """
    up, keys = "mlp.experts.up_proj.weight", "self_attn.k_proj.weight"
    found = evidence(SEEN) | {"precision": "bf16"}
    for row in found["steps"]:
        last = row is found["steps"][3]
        row["regular"] = row in found["steps"][:4]
        row["gaps"] = {up: (expert if last else 0.03, up), keys: (other if last else 0.015, keys)}
        row["noise"] = {
            "loss": 1e-4,
            "grad_norm": 1e-3,
            "gaps": {up: (0.03, up), keys: (0.015, keys)},
        }
    found["steps"][3]["noise"]["doubt"] = {up: 0.5, keys: 0.11}
    assert failing(found) == ([] if passed else ["reference gradients"])


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (1.2, False), (0.4, False)])
def test_the_launchers_clock_judges_the_throughput(factor: float, passed: bool) -> None:
    # 200 tokens a step at 100 tokens/s: two seconds between lines, half a second of them for
    # evidence.
    arrivals = {step: 2.5 * step for step in range(1, STEPS + 1)}
    busy = dict.fromkeys(arrivals, 0.5)
    own = dict.fromkeys(arrivals, 2.0 / factor)
    verdict = proof.clock(series(100.0 * factor), arrivals, busy, own, tokens=200)
    assert verdict.passed is passed


def test_the_launchers_clock_leaves_out_what_each_step_spent_on_evidence() -> None:
    # Evidence is written after every second step, and takes as long as the step.
    busy = {step: 2.0 * (step % 2) for step in range(1, STEPS + 1)}
    arrivals = {1: 2.0}
    for step in range(2, STEPS + 1):
        arrivals[step] = arrivals[step - 1] + 2.0 + busy[step - 1]
    own = dict.fromkeys(arrivals, 2.0)
    verdict = proof.clock(series(100.0), arrivals, busy, own, tokens=200)
    assert verdict.passed
    assert verdict.measured == "×1.000"


@pytest.mark.parametrize(
    ("factor", "passed"), [(1.0, True), (1.005, True), (1.03, False), (0.98, False)]
)
def test_the_witnesss_clock_judges_a_smaller_difference(factor: float, passed: bool) -> None:
    own = dict.fromkeys(range(1, STEPS + 1), 2.0)
    arrivals = {step: 2.0 * step for step in own}
    verdict = proof.clock(series(100.0 * factor), arrivals, {}, own, tokens=200)
    assert verdict.passed is passed


def test_two_steps_are_timed_and_one_is_no_evidence() -> None:
    two = Series(steps=series().steps[:2])
    assert proof.clock(two, {}, {}, {1: 9.0, 2: 2.0}, tokens=200).passed
    assert not proof.clock(two, {}, {}, {1: 9.0, 2: 2.2}, tokens=200).passed
    one = Series(steps=series().steps[:1])
    verdict = proof.clock(one, {}, {}, {1: 2.0}, tokens=200)
    assert (verdict.passed, verdict.reason) == (False, "needs at least 2 steps to time one")


def test_few_tokens_per_second_are_rounded_by_much() -> None:
    own = dict.fromkeys(range(1, STEPS + 1), 200 / 18.6)
    assert proof.clock(series(19.0), {}, {}, own, tokens=200).passed
    assert not proof.clock(series(21.0), {}, {}, own, tokens=200).passed


def test_logged_flops_are_those_of_the_logged_tokens() -> None:
    recipe = resolve("llama3.1-8b", (), Choices(gpu="cpu", proxy=True))
    for logged, rate, passed in (
        (300.0, 1e8, True),
        (310.0, 1e8, False),
        (302.0, 1e8, False),
        (300.1, 1e8, False),
        (0.02, 5e3, True),
        (0.03, 5e3, False),
    ):
        steps = tuple(
            replace(step, tokens_per_second=rate, tflops=logged, tflops_decimals=2)
            for step in series().steps
        )
        facts = {**FIGURES, "flops_per_unit": FLOPS}
        verdict = proof.figures(facts, evidence(SEEN), Series(steps=steps), recipe, 1.0)
        assert verdict.passed is passed, (logged, verdict.reason)


FIGURES: dict[str, Any] = {"parameters": 10, "trainable_parameters": 10, "device": "cpu"}


@pytest.mark.parametrize(
    ("change", "memory", "peak", "told"),
    [
        ({}, 1.0, 1.0, ""),
        ({}, 1.0, None, ""),
        ({"parameters": 8}, 1.0, 1.0, "parameters: 8, not 10"),
        ({"trainable_parameters": None}, 1.0, 1.0, "trainable_parameters: None, not 10"),
        (
            {"flops_per_unit": 5630000000000.0},
            1.0,
            1.0,
            "FLOPs of a token or image: 5.63e+12, not 3e+06",
        ),
        ({"flops_per_unit": 1.01 * FLOPS}, 1.0, 1.0, "FLOPs of a token or image: 3.03e+06, not"),
        ({"flops_per_unit": None}, 1.0, 1.0, "FLOPs of a token or image: nan, not"),
        ({}, 0.0, None, "step 1: 0 GiB of memory"),
        ({}, 0.004, None, "step 1: 0.004 GiB of memory"),
        ({}, 1.0, 2.0, "1 GiB of memory, and the largest rank had 2"),
        ({}, 1.0, 0.5, "1 GiB of memory, and the largest rank had 0.5"),
        ({"device": "cuda"}, 1.0, 0.5, ""),
    ],
)
def test_reported_figures_are_those_of_the_recipe(
    change: dict[str, Any], memory: float, peak: float | None, told: str
) -> None:
    recipe = resolve("llama3.1-8b", (), Choices(gpu="cpu", proxy=True))
    facts = {**FIGURES, "flops_per_unit": FLOPS, **change}
    steps = tuple(replace(step, memory_gib=memory) for step in series().steps)
    found = evidence(SEEN)
    verdict = proof.figures(
        {k: v for k, v in facts.items() if v}, found, Series(steps=steps), recipe, peak
    )
    assert verdict.passed == (not told)
    assert verdict.reason.startswith(told)


def test_a_rate_counts_the_tokens_of_the_samples_and_no_more() -> None:
    """A sample has one more token than its labels; a clock cannot see so little."""
    recipe = resolve("llama3.1-8b", (), Choices(gpu="cpu", proxy=True))
    found = evidence(SEEN) | {"tokens": 128.0}
    facts = {**FIGURES, "flops_per_unit": FLOPS}
    for tokens, told in ((128.0, ""), (129.0, "step 1: the rate counts 129 tokens, not 128")):
        steps = tuple(replace(step, memory_gib=1.0, tokens=tokens) for step in series().steps)
        verdict = proof.figures(facts, found, Series(steps=steps), recipe, 1.0)
        assert verdict.passed is not bool(told)
        assert verdict.reason.startswith(told)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("assets.corpus=hf:owner/texts", "assets.corpus is on the Hugging Face hub"),
        ("eval.corpus=hf:owner/texts", "eval.corpus is on the Hugging Face hub"),
    ],
)
def test_a_run_is_not_judged_without_what_the_reference_reads(word: str, told: str) -> None:
    finetune = Choices(gpu="cpu", proxy=True, backend="finetune", mode="full")
    words = [word]
    if not word.startswith("eval.corpus"):
        words.append("eval.fraction=0.1")
    recipe = resolve("llama3.1-8b", words, finetune)
    assert str(proof.unjudged(recipe)).startswith(told)


def test_pipeline_stages_and_fp8_by_rows_of_torchtitan_are_not_judged() -> None:
    piped = resolve("llama3.1-8b", ["pp=2"], Choices(gpu="cpu", proxy=True))
    assert proof.unjudged(piped) == "the run has pipeline stages"
    fp8 = Choices(gpu="cpu", proxy=True, precision="fp8")
    by_rows = resolve("llama3.1-8b", ["quantize.linear.float8.recipe_name=rowwise"], fp8)
    assert proof.unjudged(by_rows) == "the reference rounds to FP8 by tensors, not rowwise"
    assert proof.unjudged(resolve("llama3.1-8b", [], fp8)) is None
    megatron = resolve(
        "llama3.1-8b",
        ["pp=2", "model.layers=2"],
        Choices(backend="megatron", gpu="cpu", proxy=True),
    )
    assert proof.unjudged(megatron) is None


@pytest.mark.parametrize(
    ("recipe", "backend", "word"),
    [
        ("llama3.1-8b", "megatron", "model.rotary_interleaved=true"),
        ("llama3.1-8b", "megatron", "optimizer.decoupled_lr=0.02"),
        ("mixtral-8x7b", "megatron", "model.moe_z_loss_coeff=0.001"),
        ("mixtral-8x7b", "megatron", "model.moe_router_load_balancing_type=global_aux_loss"),
        ("deepseek-16b", "torchtitan", "debug.moe_force_load_balance=true"),
    ],
)
def test_a_run_is_not_judged_by_a_reference_that_computes_something_else(
    recipe: str, backend: str, word: str
) -> None:
    here = Choices(gpu="cpu", proxy=True, backend=backend)
    key, _, value = word.partition("=")
    assert (proof.unjudged(resolve(recipe, [word], here)) or "").endswith(
        (f"{backend}.{key}={value}", f"by {value}")
    )
    assert proof.unjudged(resolve(recipe, [], here)) is None
    usual = backend_rules(backend)[key].default
    assert proof.unjudged(resolve(recipe, [f"{key}={spell(usual)}"], here)) is None


@pytest.mark.parametrize(
    ("words", "judged"),
    [
        ([], True),
        (["ranks=1"], False),
        (["ranks=1", "precision=fp8"], False),
        (["ranks=1", "precision=fp32"], True),
        (["ranks=1", "training.dtype=bfloat16"], True),
        (["compile.enable=true"], False),
    ],
)
def test_blocks_are_judged_if_the_reference_rounds_as_they_do(
    words: list[str], judged: bool
) -> None:
    precision = [] if any("precision" in word for word in words) else ["precision=bf16"]
    recipe = resolve("llama3.1-8b", [*words, *precision], Choices(gpu="cpu", proxy=True))
    assert rules_of(recipe).blocks_judged(recipe) is judged


def test_every_key_that_the_reference_does_not_repeat_exists() -> None:
    for name, one in backends().items():
        for pattern in one.unmodelled:
            assert [key for key in backend_rules(name) if fnmatchcase(key, pattern)], (
                f"{name}: {pattern}"
            )


@pytest.mark.parametrize(
    "words",
    [
        ("replicas=2", "ranks=4", "global_batch=16"),
        ("tp=2", "precision=fp8", "training.dtype=bfloat16"),
        ("tp=2", "precision=fp8", "ranks=4"),
    ],
)
def test_layouts_that_torchtitan_computes_are_not_refused(words: list[str]) -> None:
    resolve("llama3.1-8b", words, Choices(gpu="cpu", proxy=True))


@pytest.mark.parametrize(
    ("words", "mode", "told"),
    [
        (
            ["lora.dropout=0.1", "packing=true"],
            "lora",
            "the reference does not repeat dropout with finetune.packing",
        ),
        (
            ["lora.dropout=0.1", "training.compile=true"],
            "lora",
            "the reference does not repeat dropout with finetune.training.compile",
        ),
        (["lora.dropout=0.1"], "lora", None),
        (["lora.dropout=0.0", "packing=true"], "lora", None),
        (["packing=true"], "full", None),
        (["data.skip=1%"], "full", "data.skip leaves out rows, and the reference reads all"),
    ],
)
def test_settings_that_the_reference_does_not_repeat_are_named(
    words: list[str], mode: str, told: str | None
) -> None:
    finetune = Choices(gpu="cpu", proxy=True, backend="finetune", mode=mode)
    assert proof.unjudged(resolve("llama3.1-8b", words, finetune)) == told
