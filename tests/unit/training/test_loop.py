"""What our own loop computes without torch: rates, the job as its ranks read it, the recipes that
use it.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.backends.loop import config
from primus_images.training.backends.loop.config import (
    LoopConfig,
    ShardingConfig,
    learning_rate,
    profile_of,
)
from primus_images.training.run import ranks
from primus_images.training.run.job import Job

CELLS = [
    ("llama3.1-8b", "finetune", "full"),
    ("llama3.1-8b", "finetune", "lora"),
    ("llama3.1-8b", "fsdp", "pretrain"),
    ("flux.1-dev", "flux", "pretrain"),
    ("flux.1-dev", "flux", "full"),
]


def choices(backend: str, mode: str) -> Choices:
    return Choices(backend=backend, mode=mode, gpu="cpu", proxy=True)


def job(folder: Path, backend: str, mode: str, *words: str, recipe: str = "llama3.1-8b") -> Job:
    return Job(name="x", recipe=resolve(recipe, words, choices(backend, mode)), output=folder)


@pytest.mark.parametrize(
    ("last", "after", "files"),
    [
        (0, -1, {}),
        (3, -1, {3: "profile.json"}),
        (3, 2, {3: "profile.json"}),
        (3, 1, {2: "profile-2.json", 3: "profile-3.json"}),
        (2, 0, {1: "profile-1.json", 2: "profile-2.json"}),
        (2, 3, {}),
        (0, 0, {}),
    ],
)
def test_the_steps_after_one_and_up_to_another_are_profiled(
    last: int, after: int, files: dict[int, str]
) -> None:
    config = LoopConfig(steps=4, profile_step=last, profile_after=after)
    found = {step: profile_of(config, step) for step in range(1, 5)}
    assert {step: name for step, name in found.items() if name} == files


def test_the_rate_warms_up_and_then_follows_the_schedule() -> None:
    config = LoopConfig(steps=12, warmup_steps=3, lr=0.4, min_lr=0.1)
    assert [learning_rate(config, step) for step in (1, 2, 3, 4, 12)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.4]
    )
    linear = LoopConfig(steps=12, warmup_steps=2, lr=0.4, min_lr=0.1, lr_schedule="linear")
    assert learning_rate(linear, 7) == pytest.approx(0.25)
    assert learning_rate(linear, 12) == pytest.approx(0.1)
    cosine = LoopConfig(steps=12, warmup_steps=2, lr=0.4, min_lr=0.1, lr_schedule="cosine")
    assert learning_rate(cosine, 7) == pytest.approx(0.25)
    assert learning_rate(cosine, 3) > learning_rate(linear, 3)
    assert learning_rate(cosine, 12) == pytest.approx(0.1)


def test_the_rate_may_decay_beyond_or_before_the_runs_end() -> None:
    config = LoopConfig(steps=10, lr=1.0, min_lr=0.1, lr_schedule="linear", decay_steps=5)
    assert learning_rate(config, 5) == learning_rate(config, 10) == 0.1
    assert learning_rate(replace(config, decay_steps=100), 10) == pytest.approx(0.91)
    assert learning_rate(replace(config, decay_steps=0), 10) == 0.1


@pytest.mark.parametrize(("recipe", "backend", "mode"), CELLS)
def test_a_rank_reads_the_job_as_the_recipe_means_it(
    tmp_path: Path, recipe: str, backend: str, mode: str
) -> None:
    made = job(tmp_path, backend, mode, "training.steps=7", "sharding.replicas=2", recipe=recipe)
    (tmp_path / "job.json").write_text(ranks.job_file(made))
    read = config.read_job(tmp_path)
    assert read.model == made.recipe.architecture
    assert read.training.steps == read.last_step == 7
    assert read.training.dtype == "float32"
    assert read.global_batch == made.recipe.global_batch
    assert read.section(ShardingConfig, "sharding") == ShardingConfig(replicas=2)
    assert read.resume_from is None


def test_only_what_the_hub_holds_needs_the_hub(tmp_path: Path) -> None:
    assert ranks.environment(job(tmp_path, "finetune", "full"), {})["HF_HUB_OFFLINE"] == "1"
    weights = job(tmp_path, "finetune", "full", "finetune.weights=hf:meta-llama/Llama-3.1-8B")
    assert "HF_HUB_OFFLINE" not in ranks.environment(weights, {})
