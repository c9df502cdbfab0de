"""Attention that leaves out what lies outside of a sliding window: against a mask of all pairs in
64 bits.
"""

import pytest

torch = pytest.importorskip("torch")

from primus_images.recipes.resolve import resolve  # noqa: E402
from primus_images.recipes.setting import Choices  # noqa: E402
from primus_images.training.backends.fsdp.llama import Llama  # noqa: E402
from primus_images.turbo.attention import seen_within, windowed_attention  # noqa: E402


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Each token sees itself and the ``window`` - 1 tokens before it; tensors are [batch, tokens,
    heads, size].
    """
    q, k, v = (part.double().transpose(1, 2) for part in (q, k, v))
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    places = torch.arange(q.shape[2])
    apart = places[:, None] - places
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(
        (apart < 0) | (apart >= window), float("-inf")
    )
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [0, 33, 130])
def test_the_blocks_for_a_gpu_hold_the_same_pairs(window: int) -> None:
    """flex_attention with the mask that a GPU gets; on a CPU it has no backward pass."""
    from torch.nn.attention.flex_attention import create_block_mask

    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 256, heads, 16) for heads in (4, 2, 2))
    mask = create_block_mask(seen_within(window or 256), None, None, 256, 256, device="cpu")
    assert torch.allclose(
        windowed_attention(q, k, v, mask).double(), exact(q, k, v, window or 256), atol=1e-5
    )


@pytest.mark.parametrize("window", [0, 24])
def test_a_model_computes_the_same_with_either_attention(window: int) -> None:
    words = [f"model.window={window}", "model.layers=2"]
    choices = Choices(backend="fsdp", precision="bf16", gpu="cpu", proxy=True)
    model = resolve("mistral-7b", words, choices).architecture
    torch.manual_seed(5)
    plain = Llama(model, 64, 64)
    other = Llama(model, 64, 64, "flex-attention")
    other.load_state_dict(plain.state_dict())
    tokens = torch.randint(0, model.vocab_size, (2, 64))
    assert other.mask is None
    assert torch.allclose(other(tokens, tokens), plain(tokens, tokens), rtol=1e-5)
