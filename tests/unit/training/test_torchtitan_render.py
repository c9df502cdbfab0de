"""What torchtitan reads of a recipe: its TOML file, and the arguments of its model."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.backends.torchtitan.render import FILE, files, model_arguments
from primus_images.training.run.job import Job


def written(*words: str, resume: Path | None = None) -> dict[str, Any]:
    recipe = resolve("llama3-proxy", words, Choices(gpu="cpu"))
    job = Job(name="job", recipe=recipe, output=Path("/out"), resume_from=resume)
    (name,) = files(job)
    assert name == FILE
    return tomllib.loads(files(job)[name])


def test_the_file_has_the_settings_and_where_things_are() -> None:
    found = written("steps=7", "lr=1e-4")
    assert found["training"]["steps"] == 7
    assert found["optimizer"]["lr"] == 1e-4
    assert found["job"] == {"dump_folder": "/out", "description": "llama3-proxy"} | found["job"]
    assert (found["model"]["name"], found["model"]["flavor"]) == ("llama3", "recipe")
    assert found["training"]["dataset"] == "recipe_corpus"
    assert found["training"]["dataset_path"].endswith("corpus.jsonl")
    assert "tokenizer" in found["model"]["hf_assets_path"]


@pytest.mark.parametrize(
    ("words", "enabled", "interval"),
    [
        (["checkpoint=0"], False, None),
        (["checkpoint=3"], True, 3),
        (["checkpoint=30m"], True, 1),
    ],
)
def test_checkpoints_are_saved_if_they_are_asked_for(
    words: list[str], enabled: bool, interval: int | None
) -> None:
    table = written(*words)["checkpoint"]
    assert table["enable"] is enabled
    if interval is not None:
        assert table["interval"] == interval
    assert "initial_load_path" not in table


@pytest.mark.parametrize(("word", "saves"), [("checkpoint=0", False), ("checkpoint=3", True)])
def test_a_run_that_resumes_loads_even_if_it_saves_nothing(word: str, saves: bool) -> None:
    table = written(word, resume=Path("/run/step-5"))["checkpoint"]
    assert table["initial_load_path"] == "/run/step-5"
    assert table["enable"] is True
    assert table["load_only"] is not saves


def test_the_newest_checkpoints_are_kept() -> None:
    table = written("checkpoint=3", "saving.keep=2")["checkpoint"]
    assert table["keep_latest_k"] == 2


def arguments(recipe: str, precision: str = "bf16") -> dict[str, Any]:
    found = resolve(recipe, (), Choices(gpu="mi300x"))
    return model_arguments(found.architecture, precision)


def test_an_expert_of_llama_4_has_its_share_of_the_units() -> None:
    found = resolve("llama4-scout", (), Choices(gpu="mi300x"))
    # torchtitan's own Llama 4, which has other attention, is of this family.
    model = replace(found.architecture, family="moe")
    values = model_arguments(model, "bf16")
    parts = model.moe.top_k + model.moe.shared_experts
    units = int(values["ffn_dim_multiplier"] * int(8 * model.hidden_size / 3))
    assert values["multiple_of"] == 1
    assert units // parts == model.moe.ffn_size
    assert values["moe_args"]["score_before_experts"] is model.moe.weighted_inputs


def test_rotary_positions_are_those_of_the_model() -> None:
    assert arguments("llama3.1-8b")["rope_scaling_args"]["scaling_factor"] == 8
    yarn = arguments("deepseek-v3")
    assert (yarn["rope_factor"], yarn["beta_fast"], yarn["beta_slow"]) == (40, 32, 1)


@pytest.mark.parametrize(("precision", "grouped"), [("fp32", False), ("bf16", True)])
def test_products_of_all_experts_at_once_are_in_bf16_only(precision: str, grouped: bool) -> None:
    assert arguments("deepseek-16b", precision)["moe_args"]["use_grouped_mm"] is grouped
