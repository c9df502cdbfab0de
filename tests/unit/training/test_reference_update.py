"""What the reference expects of a step: its weights, and how its gradients are summed."""

import pytest

torch = pytest.importorskip("torch")

from primus_images.training.judge.reference import replay, update  # noqa: E402

BEFORE = {"a": torch.zeros(2).double(), "b": torch.zeros(2).double()}
EXPECTED = {"a": torch.tensor([3.0, 4.0]).double(), "b": torch.tensor([6.0, 8.0]).double()}


@pytest.mark.parametrize(
    ("errors", "rounding", "gap", "name"),
    [
        ({}, 0.0, 0.0, ""),
        ({"a": 0.5}, 0.0, 0.1, "a"),
        # 0.5 of a change of 5 is more than 0.6 of one of 10.
        ({"a": 0.5, "b": 0.6}, 0.0, 0.1, "a"),
        ({"a": 0.5, "b": 2.0}, 0.0, 0.2, "b"),
        # 0.04 of a length of 5 and of 10 is rounding.
        ({"a": 0.5, "b": 2.0}, 0.04, 0.16, "b"),
        ({"a": 0.2, "b": 0.4}, 0.05, 0.0, ""),
        ({"b": float("nan")}, 0.0, 1e9, "b"),
    ],
)
def test_the_weight_with_the_largest_error_is_named(
    errors: dict[str, float], rounding: float, gap: float, name: str
) -> None:
    after = {key: tensor.clone() for key, tensor in EXPECTED.items()}
    for key, error in errors.items():
        after[key][0] += error
    worst = update.gap(BEFORE, EXPECTED, after, rounding)
    assert worst["gap"] == pytest.approx(gap)
    assert worst["name"] == name


@pytest.mark.parametrize(
    ("settings", "precision", "narrow"),
    [
        ({"sharding.reduce_dtype": "bfloat16"}, "bf16", True),
        ({"sharding.reduce_dtype": "float32"}, "bf16", False),
        ({"ddp.grad_reduce_in_fp32": False}, "bf16", True),
        ({"ddp.grad_reduce_in_fp32": True}, "bf16", False),
        ({"torch_fsdp2": True}, "bf16", True),
        ({"torch_fsdp2": True}, "fp32", False),
        ({}, "bf16", False),
    ],
)
def test_sums_over_ranks_are_narrow_if_the_recipe_asks_for_it(
    settings: dict[str, object], precision: str, narrow: bool
) -> None:
    assert replay._adds_narrowly({"config": settings, "precision": precision}) is narrow
