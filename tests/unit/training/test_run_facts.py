"""What a run notes of its first step: linear layers, products and their operations."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from primus_images.training.run import facts  # noqa: E402


def event(name: str, dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> Any:
    """An operator as the profiler records it."""
    return SimpleNamespace(name=lambda: name, dtypes=lambda: dtypes, shapes=lambda: shapes)


@pytest.mark.parametrize(
    ("name", "dtypes", "shapes", "counts", "flops"),
    [
        (
            "aten::mm",
            ["float", "c10::BFloat16"],
            [[4, 3], [3, 5]],
            {"aten::mm BFloat16": 1},
            {"aten::mm BFloat16": 2 * 4 * 3 * 5},
        ),
        (
            "aten::addmm",
            ["float", "float", "c10::Half"],
            [[5], [4, 3], [3, 5]],
            {"aten::addmm Half": 1},
            {"aten::addmm Half": 2 * 4 * 3 * 5},
        ),
        ("aten::mm", ["float", ""], [[4, 3], [3, 5]], {"aten::mm": 1}, {}),
        ("aten::mm", ["float", "float"], [[4, 3], []], {"aten::mm": 1}, {}),
        ("aten::mm", ["float"], [[4, 3]], {}, {}),
        ("aten::add", ["float", "float"], [[4, 3], [4, 3]], {}, {}),
    ],
)
def test_products_count_by_the_dtype_of_their_second_factor(
    name: str,
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    counts: dict[str, int],
    flops: dict[str, int],
) -> None:
    assert facts._products([event(name, dtypes, shapes)]) == (counts, flops)


@pytest.mark.parametrize(
    ("kernel", "attends"),
    [
        ("aten::scaled_dot_product_attention", True),
        ("flash_attn::_flash_attn_forward", True),
        ("aten::mm", False),
    ],
)
def test_kernels_of_attention_are_known_by_their_names(kernel: str, attends: bool) -> None:
    assert facts._is_attention(kernel) == attends
