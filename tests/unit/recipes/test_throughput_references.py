"""The published figures that a run on a GPU is judged by: each at its own sequence length."""

import json
from pathlib import Path
from typing import Any

import pytest

from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices

ROWS = json.loads(
    (Path(__file__).parents[3] / "benchmarks/results/projection.json").read_text(encoding="utf-8")
)["rows"]
# Mistral's figures are of a window that is not the model's.
PUBLISHED = [row for row in ROWS if "(v25.2)" in row["source"] and not row["words"]]


def reference(row: dict[str, Any], seq_len: int) -> float:
    backend = "fsdp" if row["recipe"] == "llama3.1-8b" else "torchtitan"
    choices = Choices(backend=backend, gpu=row["gpu"], precision=row["precision"])
    recipe = resolve(row["recipe"], [f"seq_len={seq_len}"], choices)
    return recipe.find("validation.throughput", 0.0)


@pytest.mark.parametrize("row", PUBLISHED)
def test_a_run_is_judged_by_the_figure_of_its_length(row: dict[str, Any]) -> None:
    published = row["tokens_per_second"]
    if row["precision"] == "fp8":
        published *= 0.981  # the benchmark counts too much there
    assert reference(row, row["seq_len"]) == pytest.approx(published, rel=1e-3)


def test_the_other_length_of_a_model_has_a_figure_of_its_own_and_others_have_none() -> None:
    assert len(PUBLISHED) == 10
    for row in PUBLISHED:
        if row["recipe"] == "llama3.1-8b":
            assert reference(row, 4096) > 1.07 * reference(row, 8192)
        assert reference(row, 2048) == 0.0
