from typing import Any

import pytest

from primus_images.errors import HostError
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.resolve import resolve
from primus_images.recipes.rules import rules_of
from primus_images.recipes.setting import Choices
from primus_images.training.run import start
from primus_images.training.run.job import Job


def proxy(
    *words: str, name: str = "llama3.1-8b", precision: str | None = None, gpu: str = "cpu"
) -> Recipe:
    return resolve(
        name, words, Choices(backend="megatron", gpu=gpu, proxy=True, precision=precision)
    )


@pytest.mark.parametrize("name", ["llama3.1-8b", "deepseek-v2-lite", "mixtral-8x7b"])
def test_the_recipes_are_computable(name: str) -> None:
    for recipe in (
        proxy(name=name),
        resolve(name, (), Choices(backend="megatron", gpu="mi300x", precision="bf16")),
    ):
        assert list(rules_of(recipe).faults(recipe)) == []


def test_fp8_without_transformer_engine_is_refused(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = resolve("llama3.1-8b", (), Choices(backend="megatron", gpu="h200", precision="fp8"))
    monkeypatch.setattr(start, "importable", lambda name: name != "transformer_engine")
    with pytest.raises(HostError, match="transformer_engine cannot be imported"):
        start.check_backend(Job(name="train", recipe=recipe, output=tmp_path))
    start.check_backend(Job(name="train", recipe=proxy(), output=tmp_path))


def test_gpus_gather_the_unequal_shares_of_experts() -> None:
    assert (
        proxy(
            "ranks=4", "tp=2", "ep=2", "global_batch=16", name="mixtral-8x7b", gpu="mi355x"
        ).degree("ep")
        == 2
    )
