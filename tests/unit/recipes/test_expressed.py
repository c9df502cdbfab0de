"""No field of a model's description is dropped in silence: each one changes what a backend is told,
or is refused.
"""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.recipes import resolve
from primus_images.recipes.family import families, family
from primus_images.recipes.recipe import Recipe
from primus_images.recipes.schema import Rule, backends, model_rules
from primus_images.recipes.setting import Choices
from primus_images.training.backends.loop.config import LoopConfig
from primus_images.training.backends.megatron import render as megatron
from primus_images.training.backends.torchtitan import render as torchtitan

SOURCE = Path(__file__).resolve().parents[3] / "src/primus_images/training/backends"
# Which weights are downloaded, and what bounds the sequence: no argument of a model.
NO_ARGUMENT = ("family", "hf_repo", "max_seq_len")
MODELS = [
    *(("torchtitan", name) for name in ("llama3-proxy", "llama3.1-8b", "deepseek-16b")),
    *(("megatron", name) for name in ("llama3.1-8b", "mixtral-8x7b", "qwen2.5-7b", "deepseek-v3")),
]


def rendered(recipe: Recipe) -> object:
    if recipe.backend == "torchtitan":
        return torchtitan.model_arguments(recipe.architecture, recipe.precision)
    loop = LoopConfig()
    return megatron.transformer(recipe.architecture, loop), megatron.gpt(
        recipe.architecture, recipe.seq_len
    )


def others(rule: Rule, value: object) -> list[object]:
    """Values that differ from ``value``, some of which a model can have."""
    if rule.choices:
        return [choice for choice in rule.choices if choice != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [found for found in (value * 2, value / 2, value + 1.5) if found != value]
    assert isinstance(value, int)
    return [found for found in (value * 2, value // 2, value + 1, 8, 16) if found not in (value, 0)]


@pytest.mark.parametrize("key", [key for key in model_rules() if key not in NO_ARGUMENT])
@pytest.mark.parametrize(("backend", "name"), MODELS)
def test_a_field_is_rendered_or_refused_by_name(backend: str, name: str, key: str) -> None:
    choices = Choices(backend=backend, gpu="mi300x", proxy=True)
    base = resolve.resolve(name, [], choices)
    rule = model_rules()[key]
    value = base.settings[f"model.{key}"].value if f"model.{key}" in base.settings else rule.default
    for other in others(rule, value):
        if key == "head_dim" and other == base.architecture.head_size:
            continue
        word = f"{str(other).lower()}" if isinstance(other, bool) else other
        try:
            changed = rendered(resolve.resolve(name, [f"model.{key}={word}"], choices))
        except InputError as error:
            assert key in str(error)
        else:
            assert changed != rendered(base), f"model.{key}={other} is dropped"


@pytest.mark.parametrize(
    ("backend", "file"), [("fsdp", "fsdp/llama.py"), ("flux", "flux/entry.py")]
)
def test_a_field_that_a_backend_is_said_to_express_is_read_there(backend: str, file: str) -> None:
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read |= {"head_dim"} if "head_size" in read else set()
    # A value that must be the only one is the library's own.
    fields = {
        key
        for known in map(family, families())
        for key in model_rules()
        if backend in known.backends
        and known.has(key, backend)
        and len(known.backends[backend].values.get(key, known.values.get(key, ()))) != 1
        and key.partition(".")[0] not in ("moe", "mla", "dit", "rope_scaling")
    }
    # FLUX reads its sizes by the family's table. diffusers derives its width from the heads; a
    # recipe whose width is another one is refused.
    derived = {"hidden_size", *family("flux").config} if backend == "flux" else set()
    assert fields - read - derived <= set(NO_ARGUMENT)


@pytest.mark.parametrize("name", families())
def test_a_family_names_fields_and_backends_that_are_there(name: str) -> None:
    known = family(name)
    rows = known.backends.values()
    named = {key for row in (known, *rows) for key in (*row.values, *known.limits)}
    named |= {
        key for row in rows for key in (*row.lacks, *row.equal, *row.equal.values(), *row.whole)
    }
    named |= {key for key in known.fields if "*" not in key}
    assert named <= set(model_rules())
    assert set(known.config) <= set(model_rules())
    assert set(known.backends) <= set(backends())
    if not known.images:
        # transformers' own names, shapes and numbers: tests/integration/inside/families.py.
        assert known.backends and (known.transformers or name == "moe")
    # A family of which nobody says what torchtitan lacks.
    biased = replace(family("llama3"), fields=["qkv_bias"])
    assert [biased.has("qkv_bias", name) for name in ("torchtitan", "megatron", "finetune")] == [
        False,
        True,
        True,
    ]


def test_a_part_that_is_switched_off_by_name_keeps_the_file_s_values() -> None:
    recipe = resolve.resolve("llama3.1-8b", ["model.rope_scaling.kind=none"], Choices(gpu="mi300x"))
    assert recipe.architecture.rope_scaling.factor == 8.0


@pytest.mark.parametrize(("precision", "grouped"), [("fp32", False), ("bf16", True)])
def test_experts_of_an_fp32_run_are_not_computed_in_bfloat16(precision: str, grouped: bool) -> None:
    recipe = resolve.resolve(
        "deepseek-16b",
        [],
        Choices(backend="torchtitan", gpu="h200", precision=precision, proxy=True),
    )
    arguments = torchtitan.model_arguments(recipe.architecture, recipe.precision)
    assert arguments["moe_args"]["use_grouped_mm"] is grouped
