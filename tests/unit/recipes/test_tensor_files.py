"""Folders of weights: which files are read, what a damaged one lacks, and names of tensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from primus_images.errors import InputError
from primus_images.recipes.tensors import (
    Header,
    canonical_name,
    header,
    is_for_text,
    plain_shapes,
    tensor_files,
)
from primus_images.recipes.weights import config_of, nearest_recipe

AGAIN = "fetch it again"
COPY = "copy it from the source of the weights"


def refusal(act: Any, *words: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        act(*words)
    return caught.value


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_one_file_is_read_before_an_index(stem: str, tmp_path: Path) -> None:
    names = {"a": "part-2.safetensors", "b": "part-1.safetensors", "c": "part-2.safetensors"}
    index = tmp_path / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    for name in names.values():
        (tmp_path / name).touch()
    parts = [tmp_path / "part-1.safetensors", tmp_path / "part-2.safetensors"]
    assert tensor_files(tmp_path) == parts
    (tmp_path / f"{stem}.safetensors").touch()
    assert tensor_files(tmp_path) == [tmp_path / f"{stem}.safetensors"]


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ([], "name a folder that contains model.safetensors or model.safetensors.index.json"),
        (["other.safetensors"], "name a folder that contains model.safetensors"),
        (["b.pth", "a.bin", "c.pt"], "a.bin is a pickle, which can run code"),
    ],
)
def test_a_folder_without_tensors_says_what_it_has(
    files: list[str], hint: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    error = refusal(tensor_files, tmp_path)
    assert error.message.startswith(f"{tmp_path} contains no safetensors files")
    assert str(error.hint).startswith(hint)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("{", "the index of the weights cannot be read", None),
        ("{}", "the index of the weights cannot be read", None),
        ('{"weight_map": []}', "the index of the weights cannot be read", None),
        ('{"weight_map": {}}', "the weights have an index that names no file", "fetch them again"),
        (
            '{"weight_map": {"a": "gone"}}',
            "the weights lack gone, which their index names",
            "fetch them again",
        ),
        (
            '{"weight_map": {"a": "../index.json"}}',
            "the weights lack ../index.json, which their index names",
            "fetch them again",
        ),
    ],
)
def test_an_index_names_files_beside_it(
    text: str, message: str, hint: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (tmp_path / "index.json").touch()
    index = folder / "model.safetensors.index.json"
    index.write_text(text)
    error = refusal(tensor_files, folder)
    assert (error.message, error.where, error.hint) == (message, str(index), hint)


def file_of(folder: Path, entries: Mapping[str, Any], size: int) -> Path:
    text = json.dumps(entries).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return file


def tensor(shape: list[int], first: int, last: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def test_a_header_has_shapes_and_types(tmp_path: Path) -> None:
    entries = {"__metadata__": {"format": "pt"}, "a": tensor([2, 3], 0, 24)}
    head = header(file_of(tmp_path, entries, 24))
    assert (head.shapes, head.dtypes) == ({"a": (2, 3)}, {"a": "F32"})


def test_a_truncated_file_says_how_much_is_there(tmp_path: Path) -> None:
    file = file_of(tmp_path, {"a": tensor([2, 3], 0, 24)}, 23)
    size = file.stat().st_size
    error = refusal(header, file)
    assert error.message == f"the file is truncated: {size:,} of {size + 1:,} bytes"
    assert (error.where, error.hint) == (str(file), AGAIN)


@pytest.mark.parametrize(
    "entries",
    [
        {"a": tensor([2, 3], 0, 23)},
        {"a": tensor([2, 3], 1, 24)},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": 1},
        {"a": tensor([1], 0, 4) | {"data_offsets": [0]}},
    ],
)
def test_a_damaged_header_is_a_sentence(entries: dict[str, Any], tmp_path: Path) -> None:
    file = file_of(tmp_path, entries, 64)
    error = refusal(header, file)
    assert error.message == "this is not a safetensors file, or it is damaged"
    assert error.where == str(file)


@pytest.mark.parametrize("data", [b"", b"12345678", b"\xff" * 8 + b"{}"])
def test_other_files_are_no_tensors(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(data)
    assert "not a safetensors file" in refusal(header, tmp_path / "a").message


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("lm_head.weight", "lm_head.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        (
            "model.layers.0.block_sparse_moe.experts.1.w2.weight",
            "model.layers.0.mlp.experts.1.down_proj.weight",
        ),
        (
            "model.layers.0.block_sparse_moe.experts.1.w1.weight",
            "model.layers.0.mlp.experts.1.gate_proj.weight",
        ),
    ],
)
def test_tensors_have_the_names_of_transformers(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical
    assert is_for_text(name)


@pytest.mark.parametrize("name", ["vision_tower.a", "model.vision_tower.a", "model.embed_audio.b"])
def test_parts_for_images_and_sound_are_not_for_text(name: str) -> None:
    assert not is_for_text(name)
    head = Header(shapes={name: (1,), "b": (2,)}, dtypes={name: "F32", "b": "F32"}, text=b"")
    assert plain_shapes(head) == {"b": (2,)}


def test_weights_in_mxfp4_count_as_what_they_stand_for() -> None:
    shapes = {
        "a_blocks": (2, 6, 3, 16),
        "a_scales": (2, 6, 3),
        "b_blocks": (2, 6),
        "c_scales": (2, 6, 3),
    }
    dtypes = {"a_blocks": "U8", "a_scales": "U8", "b_blocks": "U8", "c_scales": "F32"}
    head = Header(shapes=shapes, dtypes=dtypes, text=b"")
    assert plain_shapes(head) == {"a": (2, 96, 6), "b_blocks": (2, 6), "c_scales": (2, 6, 3)}


@pytest.mark.parametrize(
    ("config", "message", "where", "hint"),
    [
        (None, "have no config.json, so their model is unknown", None, COPY),
        ("{", "config.json cannot be read, or is not JSON", "", COPY),
        ("\ufeff{}", "config.json cannot be read, or is not JSON", "", COPY),
        ("[]", "config.json is not a mapping", "", None),
        ("{}", "config.json names no type of model", ": model_type", COPY),
        ('{"model_type": 1}', "config.json names no type of model", ": model_type", COPY),
        (
            '{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}',
            "the weights are quantized (gptq)",
            ": quantization_config",
            "name the weights that they were made from",
        ),
        (
            '{"model_type": "llama", "compression_config": {}}',
            "the weights are quantized (compression_config)",
            ": compression_config",
            "name the weights that they were made from",
        ),
    ],
)
def test_what_does_not_describe_a_plain_model_is_refused(
    config: str | None, message: str, where: str | None, hint: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    if config is not None:
        file.write_text(config, encoding="utf-8")
    error = refusal(config_of, tmp_path)
    assert message in error.message
    assert error.where == (None if where is None else f"{file}{where}")
    assert str(error.hint).startswith(str(hint))


def test_a_folder_of_another_kind_is_named(tmp_path: Path) -> None:
    error = refusal(config_of, tmp_path / "absent")
    assert error.message == f"there is no folder {tmp_path}/absent"
    (tmp_path / "weights").mkdir()
    error = refusal(config_of, tmp_path)
    assert error.message == f"{tmp_path} is a folder of a run, not of weights"
    assert error.hint == f"name {tmp_path}/weights"
    (tmp_path / "adapter_config.json").touch()
    error = refusal(config_of, tmp_path)
    assert error.message == f"{tmp_path} contains LoRA adapters, not a whole model"


def test_the_language_model_of_several_parts_is_trained(tmp_path: Path) -> None:
    mxfp4 = {"quant_method": "mxfp4"}
    text = {"model_type": "gemma3_text", "vocab_size": 2}
    config = {"model_type": "gemma3", "vocab_size": 1, "text_config": text}
    config["quantization_config"] = mxfp4
    (tmp_path / "config.json").write_text(json.dumps(config))
    file, read = config_of(tmp_path)
    assert file == tmp_path / "config.json"
    assert (read["model_type"], read["vocab_size"]) == ("gemma3_text", 2)
    config["text_config"] = {"vocab_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert config_of(tmp_path)[1]["vocab_size"] == 1


def test_only_modes_of_fine_tuning_have_a_recipe_for_weights(tmp_path: Path) -> None:
    error = refusal(nearest_recipe, tmp_path, "pretrain")
    assert error.message == "mode 'pretrain' does not fine-tune"
    assert error.hint == "the modes are full and lora"
