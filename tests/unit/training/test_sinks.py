"""Attention with sinks in the Megatron backend, compared with the reference's own formula."""

import pytest

torch = pytest.importorskip("torch")

from primus_images.recipes.architecture import architecture  # noqa: E402
from primus_images.training.backends.megatron.sinks import attended  # noqa: E402
from primus_images.training.judge.reference.model import Scores, Transformer  # noqa: E402

TOKENS, SAMPLES, SIZE = 5, 2, 8


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_sink_takes_a_share_of_attention_and_adds_no_value(
    kv_heads: int, scale: float | None
) -> None:
    torch.manual_seed(3)
    heads = 4
    query = torch.randn(TOKENS, SAMPLES, heads, SIZE, dtype=torch.float64, requires_grad=True)
    key = torch.randn(TOKENS, SAMPLES, kv_heads, SIZE, dtype=torch.float64)
    value = torch.randn(TOKENS, SAMPLES, kv_heads, SIZE, dtype=torch.float64)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    scores = Scores(hidden=later, scale=scale or SIZE**-0.5, sinks=sinks)
    reference = Transformer(sizes=architecture({"family": "moe"}))

    here = attended(query, key, value, sinks, scale).flatten(2)
    there = reference.attended(
        query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), scores
    ).transpose(0, 1)

    torch.testing.assert_close(here, there)
    weights = torch.randn_like(here)
    mine = torch.autograd.grad((here * weights).sum(), (query, sinks))
    theirs = torch.autograd.grad((there * weights).sum(), (query, sinks))
    torch.testing.assert_close(mine, theirs)
