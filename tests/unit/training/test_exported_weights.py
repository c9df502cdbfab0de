"""What the folder ``weights`` of a run has, on one rank without a GPU."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from primus_images.recipes.load import folder as recipes  # noqa: E402
from primus_images.training.backends.finetune import export, models  # noqa: E402
from primus_images.training.backends.finetune.backend import FinetuneConfig  # noqa: E402

SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def test_weights_that_are_not_trained_are_exported(group: None, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    name = "model.layers.0.input_layernorm.weight"  # in place of the bias of a router
    model.get_parameter(name).requires_grad_(False)
    job: Any = SimpleNamespace(
        mode="full",
        output=tmp_path,
        assets={"tokenizer": "mock"},
        section=lambda _: FinetuneConfig(),
    )
    export.save(models.FineTuned(model, 64), job, None)
    tensors = safetensors.load_file(tmp_path / "weights/model.safetensors")
    assert name in tensors
    assert tensors.keys() == dict(model.named_parameters()).keys()


def test_templates_for_tools_are_exported(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(recipes() / "assets/tokenizer", tokenizer)
    other = Path("additional_chat_templates/tool_use.jinja")
    (tokenizer / other).parent.mkdir()
    (tokenizer / other).write_text("{{ tools }}", encoding="utf-8")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    export.write(models.FineTuned(model, 64), tmp_path / "out", model.state_dict(), tokenizer)
    assert (tmp_path / "out" / other).read_text(encoding="utf-8") == "{{ tools }}"
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_a_config_without_tied_weights_is_read(tmp_path: Path) -> None:
    """CLIP's config.json has a text_config, and says nothing about ties."""
    transformers.CLIPConfig().save_pretrained(tmp_path)
    assert models.config_of_weights(tmp_path).model_type == "clip_text_model"
