"""Weights are trained as the model they are of; a recipe of another one is refused key by key."""

import json
import os
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from primus_images.errors import InputError
from primus_images.recipes import weights
from primus_images.recipes.architecture import Architecture, architecture, size
from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.backends.finetune import backend
from primus_images.training.backends.flux.backend import check_weights
from primus_images.training.backends.protocol import backend_of
from primus_images.training.judge import proof
from primus_images.training.run import metrics
from tables import table_of


def published(name: str) -> dict[str, Any]:
    """The facts of a publisher's config.json."""
    path = Path(__file__).parents[3] / "recipes/published" / f"{name}.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key != "parameters"}


LLAMA31 = published("meta-llama--Llama-3.1-8B")
LLAMA2 = published("meta-llama--Llama-2-7b-hf")
QWEN25 = published("Qwen--Qwen2.5-7B")
MISTRAL, MIXTRAL = (
    published("mistralai--Mistral-7B-v0.1"),
    published("mistralai--Mixtral-8x7B-v0.1"),
)


def whole(name: str) -> Architecture:
    backend = "finetune" if name in ("llama3.1-8b", "llama2-7b") else None
    return resolve(name, (), Choices(gpu="mi300x", backend=backend)).architecture


def tensors(folder: Path, dtype: str = "F32", content: bytes = b"\0" * 4) -> None:
    head = json.dumps({"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + content)


def written(folder: Path, config: object) -> Path:
    """A folder with one small, whole file of weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors(folder)
    return folder


def model(folder: Path, family: str = "llama3") -> Architecture:
    section = weights.model_of(folder, family)
    return architecture(
        {key.removeprefix("model."): setting.value for key, setting in section.items()}
    )


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama3.1-8b", LLAMA31),
        ("llama2-7b", LLAMA2),
        ("mistral-7b", MISTRAL),
        ("mixtral-8x7b", MIXTRAL),
        ("qwen2.5-7b", QWEN25),
    ],
)
def test_the_recipe_of_published_weights_fits_them(
    tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    recipe = whole(name)
    theirs = model(written(tmp_path / "w", config), recipe.family)
    moe = replace(theirs.moe, auxiliary_loss=recipe.moe.auxiliary_loss)
    assert (
        replace(theirs, hf_repo=recipe.hf_repo, moe=moe, max_seq_len=recipe.max_seq_len) == recipe
    )


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        *table_of("finetune_hub.sizes"),
        (
            {"rope_scaling": {**LLAMA31["rope_scaling"], "factor": 32.0}},
            "rope_scaling.factor",
            32.0,
        ),
    ],
)
def test_the_sizes_are_those_of_the_written(
    tmp_path: Path, change: dict[str, Any], key: str, value: object
) -> None:
    assert attrgetter(key)(model(written(tmp_path / "w", {**LLAMA31, **change}))) == value


@pytest.mark.parametrize(
    ("change", "said"), table_of("finetune_hub.odd_settings_are_named_with_their_field")
)
def test_odd_settings_are_named_with_their_field(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    folder = written(tmp_path / "w", {**LLAMA31, **change})
    with pytest.raises(InputError) as refused:
        resolve("llama3.1-8b", [f"weights={folder}"], Choices(gpu="mi300x", backend="finetune"))
    assert re.search(
        said, f"{refused.value.where}: {refused.value}".replace(f"{folder}/config.json: ", "", 1)
    ), refused


def test_weights_that_torchtitan_starts_from_are_checked_too(tmp_path: Path) -> None:
    folder = written(tmp_path / "w", QWEN25)
    words = ["checkpoint.initial_load_in_hf=true", f"assets.tokenizer={folder}"]
    with pytest.raises(InputError, match="of type qwen2, and the recipe's family is llama3"):
        recipe = resolve("llama3.1-8b", words, Choices(gpu="mi300x", backend="torchtitan"))
        backend_of(recipe).check_weights(recipe)


def test_another_activation_is_not_judged(tmp_path: Path) -> None:
    words = [f"weights={written(tmp_path / 'w', {**LLAMA31, 'hidden_act': 'gelu'})}"]
    recipe = resolve("llama3.1-8b", words, Choices(gpu="cpu", backend="finetune"))
    assert "hidden_act of the weights is gelu" in (proof.unjudged(recipe) or "")


def test_the_nearest_recipe_is_of_the_same_family_and_size(tmp_path: Path) -> None:
    smaller = {**LLAMA31, "num_hidden_layers": 16, "max_position_embeddings": 1024}
    large = {**LLAMA31, "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672}
    names = ("llama3-8b", "llama2-7b", "llama3.2-3b", "qwen2.5-7b", "mixtral-8x7b", "llama3-70b")
    configs = (LLAMA31, LLAMA2, smaller, QWEN25, MIXTRAL, large)
    for number, (name, config) in enumerate(zip(names, configs, strict=True)):
        assert weights.nearest_recipe(written(tmp_path / str(number), config)).recipe == name
    assert (
        resolve(
            "llama2-7b", [f"weights={tmp_path / '2'}"], Choices(gpu="cpu", backend="finetune")
        ).seq_len
        == 1024
    )
    with pytest.raises(InputError, match="mode 'pretrain' does not fine-tune"):
        weights.nearest_recipe(tmp_path / "0", "pretrain")


def test_a_model_of_no_family_is_trained_and_not_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = {
        **LLAMA31,
        "model_type": "granite",
        "rope_scaling": {"rope_type": "dynamic"},
        "logits_scaling": 8.0,
    }
    folder = written(tmp_path / "w", config)
    name, words = weights.nearest_recipe(folder).recipe, [f"weights={folder}", "model.family=other"]
    recipe = resolve(name, words, Choices(gpu="mi300x", backend="finetune", mode="full"))
    assert recipe.architecture.parameters == size(recipe.architecture).total == 1
    assert proof.unjudged(recipe) == "the reference has no formula of models of type granite"
    assert metrics.of_run(recipe, {}) is None
    choices = Choices(gpu="cpu", backend="finetune", mode="full")
    for more, said in {
        "packing=true": (
            "packing: no recipe has this type of model .family other., and nothing shows that it "
            "keeps packed documents apart"
        ),
        "model.layers=2": "model.layers is 2, and the weights have 32",
    }.items():
        with pytest.raises(InputError, match=said):
            resolve(name, [*words, "assets.corpus=assets/corpus.jsonl", more], choices)
    # Only transformers knows its layers.
    resolve(name, [*words, "lora.targets=[qkv_proj]"], replace(choices, mode="lora", gpu="mi300x"))
    with pytest.raises(InputError, match="models of the family other have no hf_repo"):
        resolve(
            name, ["model.family=other"], Choices(gpu="mi300x", backend="finetune", mode="full")
        )
    parts = written(tmp_path / "parts", {"model_type": "llava", "text_config": LLAMA31})
    assert weights.config_of(parts)[1]["model_type"] == "llama"
    lora = resolve(
        "llama3.1-8b", [f"weights={parts}"], Choices(gpu="mi300x", backend="finetune", mode="lora")
    )
    monkeypatch.setattr(backend, "check", lambda *_: None)
    with pytest.raises(InputError, match="adapters of the language model alone fit no such model"):
        backend.check_weights(lora)


def test_weights_with_settings_that_their_family_lacks_are_trained_as_of_none(
    tmp_path: Path,
) -> None:
    scaling = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    for number, more in enumerate((scaling, {"attention_bias": True})):
        folder = written(tmp_path / f"w{number}", LLAMA31 | more)
        words = [f"weights={folder}"]
        choices = Choices(gpu="mi300x", backend="finetune", mode="full")
        with pytest.raises(InputError) as caught:
            resolve("llama3.1-8b", words, choices)
        assert "model.family=other" in str(caught.value.hint)
        name = weights.nearest_recipe(folder, other=True).recipe
        recipe = resolve(name, [*words, "model.family=other"], choices)
        assert recipe.architecture.family == "other"
        assert proof.unjudged(recipe)


def test_weights_of_flux_are_compared_too(tmp_path: Path) -> None:
    config = {
        "num_layers": 19,
        "num_single_layers": 38,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "in_channels": 64,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
    }

    def check(folder: Path) -> None:
        check_weights(resolve("flux.1-dev", [f"weights={folder}"], Choices(gpu="mi300x")))

    check(written(tmp_path / "dev", config))
    with pytest.raises(InputError, match=r"model.dit.guidance is True, the weights have False"):
        check(written(tmp_path / "schnell", {**config, "guidance_embeds": False}))
    (tmp_path / "dev/config.json").unlink()
    os.mkfifo(tmp_path / "dev/config.json")
    with pytest.raises(InputError, match="this is not a regular file"):
        check(tmp_path / "dev")


def test_tokens_beyond_the_weights_need_larger_weights(tmp_path: Path) -> None:
    """The size of the vocabulary cannot be set beside weights."""
    folder = written(tmp_path / "w", {**LLAMA31, "vocab_size": 100})
    with pytest.raises(InputError, match="100 is less than the 1024 tokens") as refused:
        resolve("llama3.1-8b", [f"weights={folder}"], Choices(gpu="mi300x", backend="finetune"))
    assert "model.resize_token_embeddings(1024)" in (refused.value.hint or "")
    assert "model.vocab_size" not in (refused.value.hint or "")


def test_added_tokens_beyond_the_weights_are_refused_where_a_corpus_has_them(
    tmp_path: Path,
) -> None:
    """Gemma 3 1B has one for images, and no row for it."""
    tokenizer = {"model": {"vocab": {"a": 99}}, "added_tokens": [{"id": 100}]}
    folder = written(tmp_path / "w", {**LLAMA31, "vocab_size": 100})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = [f"weights={folder}", f"assets.tokenizer={folder}"]
    recipe = resolve("llama3.1-8b", words, Choices(gpu="mi300x", backend="finetune"))
    assert recipe.architecture.vocab_size == 100
