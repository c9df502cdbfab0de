"""The arguments of each backend's model class, of every recipe that it trains."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.recipes.architecture import Architecture
from primus_images.recipes.load import entries
from primus_images.training.backends.megatron import render as megatron
from primus_images.training.backends.torchtitan import render as torchtitan

GOLDEN = Path(__file__).parents[2] / "golden/arguments.json"


def models(backend: str) -> dict[str, Architecture]:
    return {entry.recipe: entry.architecture for entry in entries() if entry.backend == backend}


def of_megatron(model: Architecture) -> dict[str, Any]:
    training: Any = SimpleNamespace(dtype="bfloat16", deterministic=True, recompute="none")
    return {"transformer": megatron.transformer(model, training), "gpt": megatron.gpt(model, 4096)}


def test_arguments_are_as_they_were_reviewed(request: pytest.FixtureRequest) -> None:
    """A new recipe changes no other one's arguments, and needs no entry here."""
    made: dict[str, dict[str, Any]] = {"megatron": {}, "torchtitan": {}}
    for name, model in models("megatron").items():
        made["megatron"][name] = of_megatron(model)
    for name, model in models("torchtitan").items():
        made["torchtitan"][name] = torchtitan.model_arguments(model, "bf16")
    # As in a file: tuples are lists.
    text = json.dumps(made, indent=1, sort_keys=True) + "\n"
    if request.config.getoption("--regenerate-golden"):
        GOLDEN.write_text(text)
    found = json.loads(text)
    for backend, reviewed in json.loads(GOLDEN.read_text()).items():
        for name, arguments in reviewed.items():
            same = found[backend].get(name) == arguments
            assert same, f"run pytest --regenerate-golden if {backend}'s {name} is meant so"


@pytest.mark.parametrize(
    ("dtype", "recompute", "expected"),
    [
        ("float32", "none", (False, None, None)),
        ("bfloat16", "full", (True, "full", 1)),
        ("float32", "full", (False, "full", 1)),
    ],
)
def test_precision_and_recomputation_of_megatron_are_those_of_the_job(
    dtype: str, recompute: str, expected: tuple[bool, str | None, int | None]
) -> None:
    training: Any = SimpleNamespace(dtype=dtype, deterministic=False, recompute=recompute)
    values = megatron.transformer(models("megatron")["llama3.1-8b"], training)
    granularity = values.get("recompute_granularity")
    layers = values.get("recompute_num_layers")
    assert (values["bf16"], granularity, layers) == expected
    assert values["deterministic_mode"] is False
