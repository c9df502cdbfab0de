"""What an architecture says of its layers, and how its size is written."""

import pytest

from primus_images.recipes.architecture import Architecture, MixtureOfExperts, readable


@pytest.mark.parametrize(
    ("window", "pattern", "with_window"),
    [
        (0, 0, []),
        (128, 0, [0, 1, 2, 3, 4, 5]),
        # As Gemma has it: the last of each group attends to all tokens.
        (128, 3, [0, 1, 3, 4]),
        (128, 2, [0, 2, 4]),
        (0, 2, []),
    ],
)
def test_the_last_layer_of_each_pattern_has_no_window(
    window: int, pattern: int, with_window: list[int]
) -> None:
    model = Architecture(family="llama3", layers=6, window=window, window_pattern=pattern)
    assert [layer for layer in range(6) if model.has_window(layer)] == with_window


@pytest.mark.parametrize(
    ("dense", "every", "sparse"),
    [(0, 1, [0, 1, 2, 3, 4]), (1, 1, [1, 2, 3, 4]), (1, 2, [1, 3]), (5, 1, [])],
)
def test_experts_are_in_every_nth_layer_after_the_dense_ones(
    dense: int, every: int, sparse: list[int]
) -> None:
    moe = MixtureOfExperts(experts=8, dense_layers=dense, every=every)
    model = Architecture(family="llama3", layers=5, moe=moe)
    assert [layer for layer in range(5) if model.is_sparse(layer)] == sparse
    assert model.sparse_layers == len(sparse)
    assert not Architecture(family="llama3", layers=5).sparse_layers


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (520_000, "0.52 M"),
        (10_000_000, "10.0 M"),
        (100_000_000, "100 M"),
        (999_000_000, "999 M"),
        (1_000_000_000, "1.00 B"),
        (8_030_261_248, "8.03 B"),
        (70_553_706_496, "70.6 B"),
    ],
)
def test_a_count_has_three_digits_and_a_unit(count: int, text: str) -> None:
    assert readable(count) == text
