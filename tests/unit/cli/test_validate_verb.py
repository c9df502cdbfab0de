"""`primus validate`: what it trains, and what it shows."""

from pathlib import Path

import pytest

from primus_images.cli.host.validate import cells_to_train as _cells
from primus_images.errors import InputError
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve as pinned
from primus_images.recipes.load import names
from primus_images.recipes.resolve import resolve
from primus_images.release.cells import cell_of, cells_of
from primus_images.training.judge import suite

ROOT = Path(__file__).resolve().parents[3]


def test_the_cpu_target_trains_every_recipe() -> None:
    recipes = Project.find(ROOT).target("cpu")[0].recipes
    assert recipes[0] == "llama3-proxy"
    assert sorted(recipes) == names()


def test_a_recipe_is_trained_by_default_or_in_every_way() -> None:
    one = cell_of("llama3.1-8b")
    assert (one.folder, one.choices.backend, one.choices.proxy) == ("llama3.1-8b", None, True)
    every = [*cells_of(["llama3.1-8b"])]
    assert [cell.folder for cell in every] == [
        "llama3.1-8b-torchtitan-pretrain",
        "llama3.1-8b-megatron-pretrain",
        "llama3.1-8b-fsdp-pretrain",
        "llama3.1-8b-finetune-full",
        "llama3.1-8b-finetune-lora",
    ]
    assert str(every[-1]) == "llama3.1-8b finetune lora"
    recipe = resolve(every[-1].recipe, (), every[-1].choices)
    assert (recipe.backend, recipe.mode, recipe.gpu, recipe.precision) == (
        "finetune",
        "lora",
        "cpu",
        "fp32",
    )
    with pytest.raises(InputError, match="no recipe 'lama'"):
        next(cells_of(["lama"]))
    with pytest.raises(InputError, match=r"llama3\.1-8b is trained in none of mxfp8 on mi300x"):
        next(cells_of(["llama3.1-8b"], gpu="mi300x", precisions=("mxfp8",)))


@pytest.mark.parametrize("target", ["mi300x", "mi355x"])
def test_an_instinct_target_trains_every_recipe_in_float32_and_bfloat16(
    target: str, tmp_path: Path
) -> None:
    project = Project.find(ROOT)
    assert sorted(project.target(target)[0].recipes) == names()
    planned = _cells(pinned(project, target), "cpu", recipe=None, level=None)
    (first, level), *rest = planned
    assert (first.recipe, level) == ("llama3-proxy", "standard")
    assert {level for _, level in rest} == {"quick"}
    ways = {str(cell) for cell in cells_of(names())}
    assert {str(cell) for cell, _ in rest} == {
        f"{way} {precision}" for way in ways for precision in ("fp32", "bf16")
    }
    request = suite.Request(recipe="llama3.1-8b", choices=rest[-1][0].choices)
    (job,) = suite.plan(request, tmp_path, "quick")
    assert job.recipe.precision == "bf16"
    assert len({cell.folder for cell, _ in planned}) == len(planned)


def test_one_recipe_alone_and_the_cpu_target_have_the_standard_suite() -> None:
    project = Project.find(ROOT)
    for target, name in (("cpu", None), ("mi355x", "mistral-7b")):
        ((_, level),) = _cells(pinned(project, target), "cpu", recipe=name, level=None)
        assert level == "standard"
    assert {
        level for _, level in _cells(pinned(project, "cpu"), "cpu", recipe=None, level="full")
    } == {"full"}
