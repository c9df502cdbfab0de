"""Predicted memory as arithmetic: the terms of a sum, what fits, and what settings change."""

import pytest

from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.rules import (
    USABLE,
    fits,
    gpu_bytes,
    holds,
    largest_batch,
    predict,
    rules_of,
)
from primus_images.recipes.rules.loop import (
    Memory,
    embedding,
    ffn_width,
    fused_loss,
    gathered_experts,
    layer_elements,
    width_of,
)
from primus_images.recipes.setting import Choices

TERMS = {
    "weights": 4.0,
    "gradients": 3.0,
    "optimizer": 8.0,
    "unsharded": 2.0,
    "activations": 10.0,
    "loss": 5.0,
}


def recipe_of(name: str = "llama3.1-8b", *words: str, **choices: object) -> Recipe:
    usual = {"gpu": "h200", "backend": "finetune", "nodes": 1}
    return resolve(name, words, Choices(**{**usual, **choices}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "peak", "least"),
    [
        ({}, 32.0, 29.0),
        ({"gradients": 20.0}, 49.0, 34.0),
        ({"reused": 6.0}, 26.0, 29.0),
        ({"standing": True}, 32.0, 32.0),
    ],
)
def test_the_peak_is_a_sum_and_the_least_the_larger_end_of_the_backward_pass(
    changes: dict[str, float], peak: float, least: float
) -> None:
    memory = Memory(**{**TERMS, **changes})  # type: ignore[arg-type]
    assert (memory.peak, memory.least) == (peak, least)
    assert memory.states == memory.weights + memory.gradients + memory.optimizer


def test_reused_memory_is_a_negative_term_and_nothing_is_none() -> None:
    assert Memory(**TERMS).terms == TERMS
    assert Memory(**TERMS, reused=6.0, standing=True).terms == {**TERMS, "reused": -6.0}


@pytest.mark.parametrize(
    ("standing", "available", "starts"),
    [
        (True, 32.0, True),
        (True, 31.9, False),
        (False, 29.0 * USABLE + 1e-9, True),
        (False, 29.0 * USABLE - 0.1, False),
    ],
)
def test_gradients_that_are_always_there_leave_nothing_to_release(
    standing: bool, available: float, starts: bool
) -> None:
    assert fits(Memory(**TERMS, standing=standing), available) is starts


@pytest.mark.parametrize(
    ("dtype", "width"),
    [("float32", 4), ("fp32", 4), ("bfloat16", 2), ("float16", 2), ("bf16", 2)],
)
def test_a_value_has_the_width_of_its_type(dtype: str, width: int) -> None:
    assert width_of(dtype) == width


def test_sizes_of_a_dense_model() -> None:
    model = recipe_of().architecture
    assert embedding(model) == 128256 * 4096
    assert ffn_width(model) == 14336.0
    assert fused_loss(model, 10) == 10 * 128256 * 2
    assert fused_loss(model, 1e9) == fused_loss(model, 1e8)
    # 32 heads of 128: queries, keys, values and the output of attention.
    attention = 2 * 32 * (128 + 128)
    assert layer_elements(model, eight=False) == pytest.approx(
        0.987 * (3 * 4096 + attention + 3 * 14336)
    )
    assert layer_elements(model, eight=True) == pytest.approx(
        0.893 * (2 * 4096 + attention + 2 * 14336)
    )
    assert gathered_experts(recipe_of()) == 0.0


def test_a_cpu_has_no_memory_to_fit_and_a_gpu_that_of_its_table() -> None:
    assert gpu_bytes("cpu") is None
    assert gpu_bytes("mi300x") == pytest.approx(192 * 2**30, rel=0.01)


def test_a_proxy_on_a_cpu_always_starts() -> None:
    assert holds(recipe_of("llama3.1-8b", "proxy=true", gpu="cpu"))


def test_the_recipes_batch_is_predicted_unless_another_is_asked() -> None:
    recipe = recipe_of()
    assert predict(recipe) == predict(recipe, recipe.local_batch)
    assert predict(recipe, recipe.local_batch + 1).peak > predict(recipe).peak
    assert largest_batch(recipe, 0.0) == 0
    assert largest_batch(recipe, predict(recipe, 3).peak) == 3
    assert largest_batch(recipe, predict(recipe, 3).peak - 1) == 2


@pytest.mark.parametrize(
    ("words", "term", "grows"),
    [
        (("finetune.training.compile=false",), "activations", True),
        (("finetune.training.recompute=full",), "activations", False),
        (("finetune.training.master_dtype=bfloat16",), "weights", False),
        (("finetune.sharding.reshard_after_forward=false",), "unsharded", True),
    ],
)
def test_a_setting_moves_its_own_term(words: tuple[str, ...], term: str, grows: bool) -> None:
    before = getattr(predict(recipe_of()), term)
    after = getattr(predict(recipe_of("llama3.1-8b", *words)), term)
    assert (after > before) is grows
    assert after != before


@pytest.mark.parametrize(
    ("words", "judged"),
    [
        (("finetune.training.compile=false",), True),
        (("finetune.training.compile=true",), False),
    ],
)
def test_blocks_are_judged_only_as_the_reference_computes_them(
    words: tuple[str, ...], judged: bool
) -> None:
    recipe = recipe_of("llama3.1-8b", *words)
    assert rules_of(recipe).blocks_judged(recipe) is judged


@pytest.mark.parametrize(("dropout", "judged"), [("0.0", True), ("0.1", False)])
def test_blocks_with_dropout_are_not_judged(dropout: str, judged: bool) -> None:
    words = ("finetune.training.compile=false", f"finetune.lora.dropout={dropout}")
    recipe = recipe_of("llama3.1-8b", *words, mode="lora")
    assert rules_of(recipe).blocks_judged(recipe) is judged
