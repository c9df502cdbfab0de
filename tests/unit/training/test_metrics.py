from dataclasses import replace
from typing import Any

import pytest

from primus_images.recipes.architecture import Architecture, DiffusionTransformer, size
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.backends.loop import trackers
from primus_images.training.run import metrics
from primus_images.training.run.logs import Series, Step
from primus_images.training.run.metrics import of_recipe_unit, of_run
from tables import table_of

FACTS = {"device": "cuda", "gpu": "NVIDIA H200", "gpu_units": 132}


def llama(warmup: int = 0, precision: str = "bf16", **choices: Any) -> Recipe:
    words = [f"validation.warmup_steps={warmup}"]
    return resolve("llama3.1-8b", words, Choices(gpu="h200", precision=precision, **choices))


def series(*speeds: float) -> Series:
    return Series(
        steps=tuple(
            Step(
                step=number,
                loss=7.0 - number,
                grad_norm=1.0,
                tokens_per_second=speed,
                memory_gib=40.0 + number,
            )
            for number, speed in enumerate(speeds, 1)
        )
    )


def test_figures_of_a_known_gpu_are_torchtitans_own() -> None:
    # Measured on an 8×H200 host: at 8,642 tokens/s torchtitan printed 500 TFLOP/s and 50.6 % MFU.
    summary = metrics.summarize(series(10.0, 8642.0, 8642.0), llama(1), FACTS)
    assert summary.tflops_non_causal == pytest.approx(500.4, abs=0.1)
    assert summary.tflops_causal == pytest.approx(444.8, abs=0.1)
    assert summary.mfu is not None
    assert summary.mfu.non_causal == pytest.approx(0.506, abs=0.0005)
    assert summary.mfu.causal == pytest.approx(0.4498, abs=0.0005)
    assert (summary.mfu.peak_tflops, summary.mfu.dtype) == (989, "bf16")
    assert summary.no_mfu is None
    assert "MFU 45.0 %/50.6 % of 989 BF16" in metrics.sentence(summary, "GPU")


def test_warm_up_counts_for_no_aggregate_but_the_peak_of_memory() -> None:
    summary = metrics.summarize(series(1.0, 2.0, 30.0, 50.0, 40.0), llama(2), FACTS)
    assert summary.tokens_per_second == 40.0
    assert summary.memory_gib == 45.0
    assert summary.tflops_causal == pytest.approx(40.0 * 51.47e9 / 1e12, rel=1e-3)
    assert metrics.summarize(series(70.0), llama(2), FACTS).tokens_per_second == 70
    assert metrics.summarize(Series(), llama(2), FACTS).tokens_per_second is None


@pytest.mark.parametrize(
    ("change", "precision", "says"), table_of("metrics.no_mfu_is_a_sentence_and_no_number")
)
def test_no_mfu_is_a_sentence_and_no_number(
    change: dict[str, Any], precision: str, says: str
) -> None:
    summary = metrics.summarize(
        series(8642.0), llama(precision=precision, proxy=precision == "fp32"), FACTS | change
    )
    assert summary.mfu is None
    assert says in (summary.no_mfu or "")
    assert "MFU 4" not in metrics.sentence(summary, "GPU")


def test_a_model_of_images_counts_images() -> None:
    flux = resolve("flux.1-dev", ["validation.warmup_steps=1"], Choices(gpu="h200"))
    per_image = of_recipe_unit(flux.architecture, flux.seq_len).causal
    summary = metrics.summarize(series(9000.0, 3.0 * flux.seq_len), flux, FACTS)
    assert (summary.images_per_second, summary.tflops_causal) == (
        3.0,
        pytest.approx(3 * per_image / 1e12),
    )


def test_lora_counts_what_the_run_trained_and_nothing_without_it() -> None:
    recipe = llama(backend="finetune", mode="lora")
    facts = FACTS | {"trainable_parameters": 42_000_000}
    assert of_run(recipe, facts) == of_recipe_unit(
        recipe.architecture, recipe.seq_len, adapters=42_000_000
    )
    assert of_run(recipe, {}) is None
    assert "FLOP/s are not known" in (metrics.summarize(series(8642.0), recipe, FACTS).no_mfu or "")
    whole = llama(backend="finetune", mode="full")
    assert of_run(whole, {}) == of_recipe_unit(whole.architecture, whole.seq_len)


# -- FLOPs --

MISTRAL = Architecture(
    family="mistral",
    layers=32,
    hidden_size=4096,
    heads=32,
    kv_heads=8,
    ffn_size=14336,
    vocab_size=32000,
)


@pytest.mark.parametrize(
    ("window", "seq_len", "causal", "non_causal"),
    [(0, 8192, 49.10, 55.55), (4096, 8192, 47.5, 49.1), (1024, 8192, 44.2, 44.27)],
)
def test_a_window_shortens_what_a_token_sees(
    window: int, seq_len: int, causal: float, non_causal: float
) -> None:
    flops = of_recipe_unit(replace(MISTRAL, window=window), seq_len)
    assert flops.causal / 1e9 == pytest.approx(causal, abs=0.05)
    assert flops.non_causal / 1e9 == pytest.approx(non_causal, abs=0.05)


def test_an_image_of_flux() -> None:
    flux = Architecture(
        family="flux",
        hidden_size=3072,
        heads=24,
        dit=DiffusionTransformer(
            double_layers=19,
            single_layers=38,
            in_channels=64,
            text_dim=4096,
            pooled_dim=768,
            image_size=512,
            text_tokens=512,
        ),
    )
    assert of_recipe_unit(flux, 0).causal / 1e12 == pytest.approx(64.4, abs=0.1)
    assert size(flux).total == pytest.approx(11.9e9, rel=0.001)


def test_the_spread_is_between_the_outer_tenths() -> None:
    assert metrics._spread([*map(float, range(20, 0, -1))]) == pytest.approx((18 - 3) / 10.5)
    assert metrics._spread([1.0, 3.0]) == 1.0
    assert metrics._spread([1.0]) is None
    assert metrics._spread([0.0, 0.0]) is None


def test_each_step_has_its_tokens_and_its_share_of_the_peak_at_hand() -> None:
    recipe = llama()
    first, second = metrics.rows(series(8642.0, 8642.0), recipe, FACTS)
    assert second["tokens"] == 2 * first["tokens"] == 2 * recipe.global_batch * recipe.seq_len
    assert first["mfu_non_causal"] == pytest.approx(0.506, abs=0.0005)
    assert first["mfu_causal"] == pytest.approx(0.4498, abs=0.0005)
    for facts in ({"device": "cpu"}, {**FACTS, "gpu_units": 66}, {**FACTS, "gpu": "unknown"}):
        (row,) = metrics.rows(series(8642.0), recipe, facts)
        assert row["mfu_causal"] is row["mfu_non_causal"] is None


def test_trackers_get_the_share_of_the_same_peak() -> None:
    peak = trackers.peak_flops("NVIDIA H200", 132, "bf16")
    assert trackers.shares_of_peak({"tflops_causal": 494.75}, peak) == {
        "mfu_causal": pytest.approx(0.5, abs=0.001)
    }
    for gpu in (
        ("NVIDIA H200", 66, "bf16"),
        ("unknown", 132, "bf16"),
        ("NVIDIA H200", 132, "fp32"),
    ):
        assert trackers.peak_flops(*gpu) is None
    assert trackers.shares_of_peak({"tflops_causal": 1.0}, None) == {}


def test_the_time_between_steps_is_what_their_rates_do_not_explain() -> None:
    recipe = llama()
    tokens = recipe.global_batch * recipe.seq_len / recipe.world_size
    assert recipe.world_size > 1
    steps = [
        replace(step, seconds=seconds)
        for step, seconds in zip(
            series(1.0, tokens / 4, tokens / 4).steps, (50, 54, 68), strict=True
        )
    ]
    assert metrics.time_between_steps(Series(steps=tuple(steps)), recipe) == (18, 10)
    steps[2] = replace(steps[2], tokens=tokens / 2)
    assert metrics.time_between_steps(Series(steps=tuple(steps)), recipe) == (18, 12)
    assert metrics.time_between_steps(Series(steps=tuple(steps[:1])), recipe) == (0, 0)
    assert metrics.time_between_steps(series(1.0, 2.0), recipe) == (0, 0)
