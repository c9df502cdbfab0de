"""Weights are trained as the model they are of; a recipe of another one is refused key by key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from primus.cli.main import main
from primus.errors import InputError
from primus.recipes.architecture import Architecture
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.training.finetune import backend
from primus.training.flux.backend import check_transformer

# As their makers publish them, without keys that are about something else.
LLAMA31: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
LLAMA2 = {
    "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
MISTRAL = {
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000,
}  # fmt: skip
MIXTRAL = {
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
    "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
    "vocab_size": 32000,
}  # fmt: skip
QWEN25 = {
    "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip


def whole(name: str) -> Architecture:
    backend = "finetune" if name in ("llama3.1-8b", "llama2-7b") else None
    return resolve(name, (), Choices(gpu="mi300x", backend=backend)).architecture


def weights(folder: Path, config: object) -> Path:
    """A folder with one small, whole file of weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    head = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"\0" * 4)
    return folder


@pytest.mark.parametrize(
    ("name", "config"),
    [("llama3.1-8b", LLAMA31), ("llama2-7b", LLAMA2), ("mistral-7b", MISTRAL), ("mixtral-8x7b", MIXTRAL),
     ("qwen2.5-7b", QWEN25)],
)  # fmt: skip
def test_the_recipe_of_published_weights_fits_them(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    assert backend.differences(whole(name), config) == []
    backend.check(weights(tmp_path / "w", config), whole(name), 4096)


def test_the_newer_form_of_rotary_settings_is_read() -> None:
    config = {key: value for key, value in LLAMA31.items() if not key.startswith("rope")}
    rope = {**LLAMA31["rope_scaling"], "rope_theta": 500000.0}
    assert backend.differences(whole("llama3.1-8b"), {**config, "rope_parameters": rope}) == []


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"rope_scaling": None}, [("rope_scaling.kind", "llama3", "none")]),
        ({"rope_scaling": {**LLAMA31["rope_scaling"], "factor": 32.0}}, [("rope_scaling.factor", 8.0, 32.0)]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, [("rope_scaling.kind", "llama3", "linear")]),
        ({"rope_theta": 10000.0}, [("rope_theta", 500000.0, 10000.0)]),
        ({"tie_word_embeddings": True}, [("tied_embeddings", False, True)]),
        ({"vocab_size": 128264, "num_hidden_layers": 16}, [("layers", 32, 16), ("vocab_size", 128256, 128264)]),
        ({"attention_bias": True}, [("qkv_bias", False, True)]),
        ({"head_dim": 64}, [("head_dim", 128, 64)]),
        ({"num_key_value_heads": None}, [("kv_heads", 8, 32)]),
        ({"rms_norm_eps": 1e-6}, [("norm_eps", 1e-5, 1e-6)]),
        ({"model_type": "qwen2"}, [("family", "llama3", "qwen2")]),
        ({"model_type": "gpt2"}, [("family", "llama3", "gpt2")]),
    ],
)
def test_each_difference_is_named(change: dict[str, Any], wanted: list[tuple[str, Any, Any]]) -> None:
    assert backend.differences(whole("llama3.1-8b"), {**LLAMA31, **change}) == wanted


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def test_the_refusal_gives_the_words_that_take_the_weights_own(tmp_path: Path) -> None:
    folder = weights(tmp_path / "w", {**LLAMA31, "rope_scaling": None, "vocab_size": 128264})
    with pytest.raises(InputError) as refused:
        backend.check(folder, whole("llama3.1-8b"), 4096)
    assert refused.value.where == str(folder / "config.json")
    words = (refused.value.hint or "").removeprefix("use the settings of the weights: ").split()
    assert words == ["model.vocab_size=128264", "model.rope_scaling.kind=none"]
    taken = resolve("llama3.1-8b", words, Choices(gpu="mi300x", backend="finetune")).architecture
    backend.check(folder, taken, 4096)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: (folder / "config.json").unlink(), "have no config.json"),
        (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "LoRA adapters, not a whole"),
        (lambda folder: (folder / "config.json").rename(folder / "weights"), "have no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read, or is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json is not a mapping"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json cannot be read, or is not"),
        (lambda folder: pipe(folder / "config.json"), "this is not a regular file"),
        (lambda folder: pipe(folder / "model.safetensors"), "this is not a regular file"),
        (lambda folder: pipe(folder / "x.safetensors.index.json"), "this is not a regular file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "contains no safetensors files"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "or it is damaged"),
        (
            lambda folder: (folder / "x.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
            "the weights lack b.safetensors",
        ),
        (lambda folder: (folder / "config.json").write_text(json.dumps({**LLAMA31, "max_position_embeddings": 1024})),
         "the weights support at most 1024 tokens"),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_trained_are_a_sentence(tmp_path: Path, spoil: Any, told: str) -> None:
    folder = weights(tmp_path / "w", LLAMA31)
    spoil(folder)
    with pytest.raises(InputError, match=told):
        backend.check(folder, whole("llama3.1-8b"), 4096)


def test_the_folder_of_a_run_is_not_its_weights(tmp_path: Path) -> None:
    weights(tmp_path / "weights", LLAMA31)
    with pytest.raises(InputError, match="a folder of a run") as refused:
        backend.check(tmp_path, whole("llama3.1-8b"), 4096)
    assert refused.value.hint == f"name {tmp_path / 'weights'}"


def test_the_command_refuses_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "llama3.1-8b", "--backend", "finetune", "--mode", "full", "--gpu", "cpu", "--proxy"]
    assert main([*words, f"weights={tmp_path}/absent"]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main([*words, f"weights={weights(tmp_path / 'w', LLAMA31)}"]) == 2
    assert "model.layers is" in capsys.readouterr().err


def test_weights_of_flux_are_compared_too(tmp_path: Path) -> None:
    model = resolve("flux.1-dev", (), Choices(gpu="mi300x")).architecture
    config = {
        "num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24, "attention_head_dim": 128,
        "in_channels": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
    }  # fmt: skip
    check_transformer(weights(tmp_path / "dev", config), model)
    with pytest.raises(InputError, match=r"model.dit.guidance is True, the weights have False"):
        check_transformer(weights(tmp_path / "schnell", {**config, "guidance_embeds": False}), model)
    pipe(tmp_path / "dev/config.json")
    with pytest.raises(InputError, match="this is not a regular file"):
        check_transformer(tmp_path / "dev", model)
