"""Attention of packed documents: each sees itself alone, whatever else its sample holds."""

import pytest

torch = pytest.importorskip("torch")

from primus_images.training.backends.loop.data import Documents  # noqa: E402
from primus_images.training.text.tokens import Tokens  # noqa: E402
from primus_images.turbo.packed import bounds_of, packed_attention  # noqa: E402

LENGTH = 16
HEADS = 4
SIZE = 8


def test_bounds_are_those_of_the_concatenated_samples() -> None:
    ends = torch.tensor([[3, 7, 16], [10, 16, 16]], dtype=torch.int32)
    assert bounds_of(ends, LENGTH).tolist() == [0, 3, 7, 16, 26, 32, 32]
    assert bounds_of(ends, LENGTH).dtype == torch.int32


@pytest.mark.parametrize(("kv_heads", "window"), [(HEADS, 0), (2, 0), (1, 3)])
def test_documents_do_not_see_each_other(kv_heads: int, window: int) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([[1, 9, 16], [16, 16, 16]], dtype=torch.int32)
    bounds = bounds_of(ends, LENGTH)
    q = torch.randn(2 * LENGTH, HEADS, SIZE)
    k, v = torch.randn(2, 2 * LENGTH, kv_heads, SIZE)
    out = packed_attention(q, k, v, bounds, LENGTH, window=window)
    for first, last in ((0, 1), (1, 9), (9, 16), (16, 32)):
        alone = torch.tensor([0, last - first], dtype=torch.int32)
        parts = (part[first:last] for part in (q, k, v))
        expected = packed_attention(*parts, alone, LENGTH, window=window)
        torch.testing.assert_close(out[first:last], expected)
    # A token sees itself and earlier ones only.
    changed = k.clone()
    changed[9] += 1
    again = packed_attention(q, changed, v, bounds, LENGTH, window=window)
    assert torch.equal(again[:9], out[:9])
    assert not torch.equal(again[9:16], out[9:16])


def test_a_window_hides_what_lies_before_it() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, LENGTH, HEADS, SIZE)
    bounds = torch.tensor([0, LENGTH], dtype=torch.int32)
    out = packed_attention(q, k, v, bounds, LENGTH, window=2)
    changed = v.clone()
    changed[4] += 1
    again = packed_attention(q, k, changed, bounds, LENGTH, window=2)
    different = [i for i in range(LENGTH) if not torch.equal(out[i], again[i])]
    assert different == [4, 5]


def test_samples_say_where_their_documents_end() -> None:
    lengths = (5, 6, 4, 16, 3)
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    tokens = Tokens(
        tokens=torch.arange(sum(lengths)).numpy(),
        ends=torch.tensor(ends).numpy(),
    )
    data = Documents(tokens, LENGTH, seed=1, packing=True, with_ends=True)
    batch = data.batch(0, data.samples)
    for positions, document_ends in zip(batch["positions"], batch["ends"], strict=True):
        starts = [0, *(end for end in document_ends.tolist() if end < LENGTH)]
        assert (positions == 0).nonzero().flatten().tolist() == starts
        assert document_ends[-1] == LENGTH
    assert "ends" not in Documents(tokens, LENGTH, seed=1, packing=True).batch(0, 1)
