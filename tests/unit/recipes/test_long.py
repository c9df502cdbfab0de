"""A run of many steps gets checkpoints and a schedule; what the user sets stays."""

import shutil
from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.recipes.load import folder
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.backends.loop.config import LoopConfig, learning_rate
from primus_images.training.backends.torchtitan import render
from primus_images.training.run.job import Job


def of(*words: str, backend: str = "torchtitan", name: str = "llama3.1-8b") -> Recipe:
    return resolve(name, words, Choices(backend=backend, gpu="mi300x"))


@pytest.mark.parametrize("backend", ["torchtitan", "megatron", "fsdp"])
def test_a_long_run_saves_by_time_and_its_rate_falls(backend: str) -> None:
    short = of("steps=500", backend=backend)
    assert not short.section("saving")
    recipe = of("steps=20000", backend=backend)
    assert recipe.section("saving") == {"minutes": 30.0, "keep": 3}
    settings = recipe.section(backend)
    if backend == "torchtitan":
        assert settings["lr_scheduler.warmup_steps"] == 200
        assert settings["lr_scheduler.decay_type"] == "cosine"
        assert settings["lr_scheduler.min_lr_factor"] == 0.1
        return
    config = LoopConfig(
        steps=20000,
        lr=float(str(settings["training.lr"])),
        min_lr=float(str(settings["training.min_lr"])),
        lr_schedule="cosine",
        warmup_steps=int(str(settings["training.warmup_steps"])),
    )
    assert config.warmup_steps == 200
    assert learning_rate(config, 20000) == pytest.approx(config.lr / 10)
    for key in ("training.min_lr", "training.lr_schedule", "training.warmup_steps"):
        assert recipe.settings[f"{backend}.{key}"].because


def test_what_the_user_sets_stays() -> None:
    words = ("steps=20000", "checkpoint=1000", "lr_scheduler.warmup_steps=7")
    recipe = of(*words)
    assert not recipe.section("saving")
    assert recipe.find("torchtitan.lr_scheduler.warmup_steps", 0) == 7
    assert not of("steps=20000", "checkpoint=0").section("saving")
    assert of("steps=20000", "checkpoint=2h").section("saving") == {"minutes": 120.0, "keep": 3}
    assert of("steps=20000", "checkpoint.keep_latest_k=5").section("saving") == {"minutes": 30.0}
    assert of("checkpoint=90s", "keep=4").section("saving") == {"minutes": 1.5, "keep": 4}


def test_the_schedule_of_a_recipe_that_is_the_users_own_stays(tmp_path: Path) -> None:
    shutil.copytree(folder(), tmp_path / "recipes")
    own = tmp_path / "recipes/llama3.1-8b.yaml"
    text = own.read_text(encoding="utf-8")
    own.write_text(f"{text}  - when: {{backend: fsdp}}\n    fsdp.training.warmup_steps: 3\n")
    recipe = of("steps=20000", backend="fsdp", name=str(own))
    assert recipe.find("fsdp.training.warmup_steps", 0) == 3
    assert recipe.find("fsdp.training.lr_schedule", "") == "cosine"


def test_fine_tuning_keeps_its_schedule() -> None:
    recipe = resolve("llama3.1-8b", ["steps=20000"], Choices(backend="finetune", gpu="mi300x"))
    assert recipe.find("finetune.training.warmup_steps", 0) == 5
    assert recipe.section("saving")


def test_steps_or_minutes_and_at_least_two_checkpoints() -> None:
    with pytest.raises(InputError, match="after steps or after minutes"):
        of("checkpoint=30m", "checkpoint.interval=10")
    with pytest.raises(InputError, match="at least 2"):
        of("checkpoint=30m", "keep=1")


def test_torchtitan_may_save_any_step_and_keeps_as_many(tmp_path: Path) -> None:
    recipe = of("checkpoint=30m", "keep=4")
    text = render.toml(Job(name="x", recipe=recipe, output=tmp_path))
    assert "checkpoint.enable = true" in text
    assert "checkpoint.interval = 1\n" in text
    assert "checkpoint.keep_latest_k = 4" in text
