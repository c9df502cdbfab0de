"""The published figures that a run on a GPU is judged by: each at its own sequence length."""

import json
from pathlib import Path
from typing import Any

import pytest

from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.yamlfile import read_values

ROOT = Path(__file__).parents[3]
ROWS = json.loads((ROOT / "benchmarks/results/projection.json").read_text(encoding="utf-8"))["rows"]
# Mistral's figures are of a window that is not the model's.
PUBLISHED = [row for row in ROWS if "(v25.2)" in row["source"] and not row["words"]]


KEY = "validation.throughput"


def references() -> list[tuple[str, dict[str, Any], float]]:
    """The references in all recipes: recipe, conditions of the case, and figure."""
    found = []
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        for case in read_values(file).data.get("cases", []):
            if KEY in case:
                found.append((file.stem, case["when"], case[KEY]))
    return found


def figures(recipe: str, when: dict[str, Any]) -> list[float]:
    """The committed figures of whole models of the same size, GPU and precision."""
    found = []
    for row in ROWS:
        size = (row["recipe"], row["gpu"], row["precision"], row["seq_len"], row["words"])
        if size != (recipe, when["gpu"], when["precision"], when["seq_len"], []):
            continue
        if row["turbo"] != "auto":
            continue  # not the recipe's default
        tokens_per_second = row["tokens_per_second"]
        if row in PUBLISHED and row["precision"] == "fp8":
            tokens_per_second *= 0.981  # the benchmark counts too much there
        found.append(tokens_per_second)
    return found


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


def test_every_reference_is_a_committed_figure_of_its_own_size() -> None:
    found = references()
    assert len(found) == 13
    for recipe, when, throughput in found:
        if recipe == "flux.1-dev":
            assert throughput == images_per_second(recipe, when)
            continue
        assert {"backend", "gpu", "precision", "seq_len"} <= when.keys(), (recipe, when)
        near = [figure for figure in figures(recipe, when) if abs(throughput / figure - 1) < 1e-3]
        assert near, (recipe, when, throughput)


def images_per_second(recipe: str, when: dict[str, Any]) -> float:
    for cell in read_values(ROOT / "docs/site/published.yaml").data["cells"]:
        if cell["recipe"] == recipe and when["gpu"] in cell.get("measured", {}):
            return float(cell["measured"][when["gpu"]])
    raise AssertionError(f"{recipe}: no document has a figure of {when['gpu']}")
