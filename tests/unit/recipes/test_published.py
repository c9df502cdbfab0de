"""A recipe whose model is not the one that its publisher describes is refused, with the field,
before a run.
"""

import json
import re
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from primus_images.cli.main import main
from primus_images.errors import InputError
from primus_images.recipes import load
from primus_images.recipes.family import families, family
from primus_images.recipes.load import entries
from primus_images.recipes.published import facts_of, published_faults
from primus_images.recipes.resolve import resolve
from primus_images.recipes.schema import model_rules
from primus_images.recipes.setting import Choices

FIXTURE = Path(__file__).parents[2] / "fixtures/wrong_models.yaml"
WRONG = [
    (name, key, value)
    for name, row in yaml.safe_load(FIXTURE.read_text()).items()
    for key, value in row.items()
]
NAMED = {"model.hf_repo": "model.max_seq_len"}
CASE = (
    "uses: [{0}.yaml]\nname: wrong\ndescription: a wrong model\ncases: [{{when: {{proxy: "
    "false}}, {1}: {2}}}]\n"
)


@pytest.mark.parametrize(("name", "key", "value"), WRONG, ids=str)
def test_a_wrong_model_is_refused_with_its_field(
    name: str, key: str, value: object, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(CASE.format(name, key, json.dumps(value)))
    with pytest.raises(InputError) as caught:
        resolve(str(file), (), Choices(gpu="mi355x"))
    fields = (
        [f"{key}.{field}" for field in value] if isinstance(value, dict) else [NAMED.get(key, key)]
    )
    assert caught.value.message.startswith(tuple(f"{field}: " for field in fields))
    assert caught.value.hint


# How a model is trained, not which one it is.
FREE = ("hf_repo", "family", "moe.auxiliary_loss", "dit.image_size", "dit.text_tokens")
WHOLE = dict.fromkeys(entry.recipe for entry in entries() if not entry.only_proxy)


@pytest.mark.parametrize("name", WHOLE)
def test_no_field_of_any_recipe_s_model_can_be_another_one(name: str, tmp_path: Path) -> None:
    model = resolve(name, (), Choices(gpu="mi355x")).architecture
    for key in (key for key in model_rules() if key not in FREE):
        value, choices = attrgetter(key)(model), model_rules()[key].choices
        if isinstance(value, bool):
            other: object = not value
        elif isinstance(value, str):
            other = next(choice for choice in choices if choice != value)
        else:
            other = value + 2 if isinstance(value, int) else value * 1.5 or 0.5
        (file := tmp_path / "wrong.yaml").write_text(
            CASE.format(name, f"model.{key}", json.dumps(other))
        )
        with pytest.raises(InputError) as caught:
            resolve(str(file), (), Choices(gpu="mi355x"))
        # Of two fields that no longer fit each other, the other one may be at the beginning.
        word = {"kv_heads": "heads", "head_dim": "head"}.get(key, key.rpartition(".")[2])
        assert caught.value.message.startswith("model.")
        assert word in caught.value.message, (key, other)


def test_show_refuses_it_and_says_of_others_what_they_are_compared_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(CASE.format("llama3.1-8b", "model.kv_heads", "4"))
    assert main(["show", str(file), "--gpu", "mi300x"]) == 2
    assert "Llama-3.1-8B has num_key_value_heads = 8 in its config.json" in capsys.readouterr().err
    for words, line in {
        (): "as published by meta-llama/Llama-3.1-8B",
        ("model.layers=12",): "another model than meta-llama/Llama-3.1-8B: layers 12, not 32",
        (
            "model.hf_repo=me/mine",
        ): "not compared with me/mine: there is no published/me--mine.json",
        ("model.hf_repo=",): "not compared with a publisher: model.hf_repo names none",
    }.items():
        assert main(["show", "llama3.1-8b", "--gpu", "mi300x", *words]) == 0
        assert line in capsys.readouterr().out
    assert main(["fit", "llama3.1-8b", "--gpu", "mi300x", "model.kv_heads=4"]) == 0
    assert (
        "another model than meta-llama/Llama-3.1-8B: kv_heads 4, not 8" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("model.layers", 31, "model.layers=32, or a case whose `because` names both"),
        ("model.norm_eps", 0.1, "model.norm_eps=1.0e-05, or a case whose `because` names both"),
        ("model.rope_scaling", {"kind": "none"}, "model.rope_scaling.kind=llama3"),
    ],
)
def test_another_number_than_the_published_one_needs_a_reason(
    key: str, value: object, remedy: str, tmp_path: Path
) -> None:
    (file := tmp_path / "wrong.yaml").write_text(CASE.format("llama3.1-8b", key, json.dumps(value)))
    with pytest.raises(InputError) as caught:
        resolve(str(file), (), Choices(gpu="mi355x"))
    assert caught.value.hint == remedy


@pytest.mark.parametrize(
    ("name", "key"),
    [("mistral-7b", "model.window"), ("deepseek-v3", "model.moe.shared_experts")],
)
def test_a_proxy_that_lacks_a_part_of_the_model_is_refused(
    name: str, key: str, tmp_path: Path
) -> None:
    (file := tmp_path / "wrong.yaml").write_text(CASE.replace("false", "true").format(name, key, 0))
    with pytest.raises(InputError, match=rf"{key}: 0, but \S+ has") as caught:
        resolve(str(file), (), Choices(gpu="cpu", proxy=True))
    assert str(caught.value.where).startswith(f"{file}:4:")


def test_weights_that_the_formula_does_not_count_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = resolve("llama3.1-8b", (), Choices(gpu="mi300x"))
    facts = facts_of(recipe)
    assert facts is not None
    for parameters in (1, 8030261248 - 4096 * 128256, 8030261248 + 1):
        published = {**facts, "parameters": parameters}
        monkeypatch.setattr(
            "primus_images.recipes.published.facts_of", lambda _recipe, facts=published: facts
        )
        ((key, why, remedy),) = published_faults(recipe)
        assert key == "model.family"
        assert why == (
            "the model has 8,030,261,248 parameters, the files of meta-llama/Llama-3.1-8B "
            f"{parameters:,}"
        )
        assert remedy == "one size is wrong here and in the published file"


@pytest.mark.parametrize(
    ("name", "key", "value", "why"),
    [
        ("llama3.1-8b", "hidden_act", "gelu", "gelu, and the family llama3 is computed with silu"),
        ("llama3.1-8b", "mlp_bias", True, "true, and"),
        ("llama3.1-8b", "partial_rotary_factor", 0.5, "0.5, and"),
        (
            "qwen3-8b",
            "layer_types",
            ["full_attention", "sliding_attention"],
            "computed with .full_attention. or",
        ),
        ("qwen3-30b-a3b", "decoder_sparse_step", 2, "2, and"),
        ("qwen3-30b-a3b", "mlp_only_layers", [0, 1], "and"),
        (
            "deepseek-v3",
            "topk_method",
            "greedy",
            "greedy, and the family deepseek_v3 is computed with noaux_tc",
        ),
        (
            "llama3.1-8b",
            "query_pre_attn_scalar",
            256,
            "unknown; what changes no result .* to `computes`, in families/",
        ),
        ("gpt-oss-20b", "swiglu_alpha", 1.5, "1.5, and the family gpt_oss is computed with 1.702"),
        ("gpt-oss-20b", "swiglu_alpha", 1.702, ""),
        ("llama3.1-8b", "transformers_version", "4.43.0.dev0", ""),
        ("llama3.1-8b", "vocab_size", None, "missing, and transformers has no value for it"),
        (
            "llama3.1-8b",
            "layer_types",
            ["sliding_attention"] * 32,
            "and the family llama3 is computed with",
        ),
        ("qwen3-8b", "layer_types", ["full_attention"] * 36, ""),
    ],
)
def test_what_a_family_does_not_compute_is_named(
    name: str, key: str, value: object, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = resolve(name, (), Choices(gpu="mi355x"))
    published = {k: v for k, v in {**(facts_of(recipe) or {}), key: value}.items() if v is not None}
    monkeypatch.setattr("primus_images.recipes.published.facts_of", lambda _recipe: published)
    faults = [(fault, reason) for fault, reason, _ in published_faults(recipe)]
    if not why:
        assert faults == []
    else:
        assert faults[0][0] == "model.hf_repo"
        assert re.match(rf"{key} of \S+: .*{why}", faults[0][1]), faults


def test_every_recipe_s_model_is_published_beside_it() -> None:
    for entry in entries():
        recipe = resolve(
            entry.recipe, (), Choices(backend=entry.backend, mode=entry.mode, gpu="mi355x")
        )
        if not entry.only_proxy:
            assert facts_of(recipe) is not None, (
                f"add recipes/published/ for {recipe.find('model.hf_repo', '')}"
            )
    kinds = {
        json.loads(file.read_text()).get("model_type")
        for file in (load.folder() / "published").glob("*.json")
    }
    assert kinds - {None} <= {family(name).transformers for name in families()}
