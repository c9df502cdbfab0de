"""torchtitan with pipeline stages: each rank has other layers, and only the last stage knows the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_kit import failing, train

from primus.recipes.architecture import size
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.training import outcome
from primus.training.job import Job

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_a_pipeline_reports_the_loss_and_the_parameters_of_all_stages(python: list[str], tmp_path: Path) -> None:
    recipe = resolve("llama3.1-8b", ["steps=3", "pp=2"], Choices(backend="torchtitan", gpu="cpu", proxy=True))
    job = Job(name="train", recipe=recipe, output=tmp_path / "run")
    left = outcome.read(job, train(python, job))
    assert failing(outcome.basic_verdicts(left)) == []
    assert all(step.loss > 0 for step in left.series.steps)
    assert left.facts["parameters"] == size(recipe.architecture).total
