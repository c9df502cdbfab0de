from __future__ import annotations

import pytest

from primus.recipes.architecture import Architecture, DiffusionTransformer, LatentAttention, MixtureOfExperts, size
from primus.training.metrics import of_recipe_unit

LLAMA = Architecture(
    family="llama3", layers=32, hidden_size=4096, heads=32, kv_heads=8, ffn_size=14336, vocab_size=128256
)
MISTRAL = Architecture(
    family="mistral", layers=32, hidden_size=4096, heads=32, kv_heads=8, ffn_size=14336, vocab_size=32000
)
V2_LITE = Architecture(
    family="deepseek_v2", layers=27, hidden_size=2048, heads=16, kv_heads=16, ffn_size=10944, vocab_size=102400,
    moe=MixtureOfExperts(experts=64, top_k=6, ffn_size=1408, shared_experts=2, dense_layers=1),
    mla=LatentAttention(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
)  # fmt: skip


def test_weights_are_those_of_the_published_model() -> None:
    # torchtitan prints this number for Llama 3.1 8B; DeepSeek's paper says 15.7 B, 2.4 B of them active.
    assert size(LLAMA).total == 8_030_261_248
    assert size(V2_LITE).total == pytest.approx(15.7e9, rel=0.01)
    assert size(V2_LITE).active == pytest.approx(2.7e9, rel=0.05)


@pytest.mark.parametrize(
    ("window", "seq_len", "causal", "non_causal"),
    [(0, 8192, 49.10, 55.55), (4096, 8192, 47.5, 49.1), (1024, 8192, 44.2, 44.27)],
)
def test_a_window_shortens_what_a_token_sees(window: int, seq_len: int, causal: float, non_causal: float) -> None:
    import dataclasses

    flops = of_recipe_unit(dataclasses.replace(MISTRAL, window=window), seq_len)
    assert flops.causal / 1e9 == pytest.approx(causal, abs=0.05)
    assert flops.non_causal / 1e9 == pytest.approx(non_causal, abs=0.05)


@pytest.mark.parametrize(("seq_len", "causal", "non_causal"), [(2048, 46.64, 48.25), (8192, 51.47, 57.91)])
def test_both_conventions_of_llama(seq_len: int, causal: float, non_causal: float) -> None:
    flops = of_recipe_unit(LLAMA, seq_len)
    assert flops.causal / 1e9 == pytest.approx(causal, abs=0.01)
    assert flops.non_causal / 1e9 == pytest.approx(non_causal, abs=0.01)


def test_adapters_take_less() -> None:
    whole, lora = of_recipe_unit(LLAMA, 8192), of_recipe_unit(LLAMA, 8192, adapters=0)
    assert whole.causal - lora.causal == 2 * (size(LLAMA).total - size(LLAMA).embedding)


def test_an_image_of_flux() -> None:
    flux = Architecture(
        family="flux", hidden_size=3072, heads=24,
        dit=DiffusionTransformer(double_layers=19, single_layers=38, in_channels=64, text_dim=4096, pooled_dim=768,
                                 image_size=512, text_tokens=512),
    )  # fmt: skip
    assert of_recipe_unit(flux, 0).causal / 1e12 == pytest.approx(64.4, abs=0.1)
    assert size(flux).total == pytest.approx(11.9e9, rel=0.001)
