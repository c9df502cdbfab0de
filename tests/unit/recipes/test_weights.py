"""The model of weights is that of their ``config.json``, and only in a recipe of their family."""

import json
from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.recipes.family import families_of
from primus_images.recipes.weights import model_of, other_family

PUBLISHED = Path(__file__).parents[3] / "recipes/published"
OF_TEXT = [file.stem for file in sorted(PUBLISHED.glob("*.json")) if "FLUX" not in file.stem]
QWEN = "Qwen--Qwen3-8B"


def weights(folder: Path, name: str, **changes: object) -> tuple[Path, str]:
    """A folder with a published ``config.json``, and its ``model_type``."""
    config = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    del config["parameters"]
    config |= changes
    for key in [key for key, value in config.items() if value == "gone"]:
        del config[key]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder, str(config["model_type"])


def write_tensor(file: Path) -> None:
    """A file of one number."""
    head = json.dumps({"norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    file.write_bytes(len(head).to_bytes(8, "little") + head.encode() + bytes(4))


@pytest.mark.parametrize("name", OF_TEXT)
def test_a_published_model_is_one_of_its_family_and_of_no_other(name: str, tmp_path: Path) -> None:
    folder, kind = weights(tmp_path, name)
    own = families_of(kind)
    assert own
    for family in own:
        assert model_of(folder, family)["model.family"].value == family
    other = "qwen3" if "qwen3" not in own else "gemma3"
    with pytest.raises(InputError, match=f"the weights are of type {kind}") as caught:
        model_of(folder, other)
    assert caught.value.where == f"{folder / 'config.json'}: model_type"


def test_weights_of_no_family_are_fine_tuned_as_such_alone(tmp_path: Path) -> None:
    folder, _ = weights(tmp_path, QWEN, model_type="new")
    assert other_family(folder) == {"model.family": "other"}
    with pytest.raises(InputError, match="the weights are of type new"):
        model_of(folder, "qwen3")


def test_sizes_may_have_other_names_in_weights_of_no_family(tmp_path: Path) -> None:
    gpt2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_inner": None, "n_positions": 512}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", "vocab_size": 100, **gpt2}))
    write_tensor(tmp_path / "model.safetensors")
    settings = model_of(tmp_path, "other")
    sizes = {key.removeprefix("model."): setting.value for key, setting in settings.items()}
    assert sizes["layers"] == 2
    assert (sizes["hidden_size"], sizes["ffn_size"]) == (64, 256)
    assert (sizes["heads"], sizes["max_seq_len"]) == (4, 512)
    file.write_text(json.dumps({"model_type": "new", "vocab_size": 100, "blocks": 2}))
    with pytest.raises(InputError, match="has no num_hidden_layers") as caught:
        model_of(tmp_path, "other")
    assert "a model for text; if it has another name" in str(caught.value.hint)


def test_a_size_of_each_layer_counts_as_the_largest(tmp_path: Path) -> None:
    folder, _ = weights(tmp_path, QWEN, model_type="new", intermediate_size=[64, 128, 96])
    write_tensor(folder / "model.safetensors")
    assert model_of(folder, "other")["model.ffn_size"].value == 128


def test_a_list_of_kinds_of_layers_counts_them(tmp_path: Path) -> None:
    kinds = ["mamba", "attention", "mlp"]
    folder, _ = weights(
        tmp_path, QWEN, model_type="new", num_hidden_layers="gone", layers_block_type=kinds
    )
    write_tensor(folder / "model.safetensors")
    assert model_of(folder, "other")["model.layers"].value == 3


def test_sizes_are_those_of_the_file_with_their_place(tmp_path: Path) -> None:
    folder, _ = weights(tmp_path, QWEN, num_hidden_layers=3)
    setting = model_of(folder, "qwen3")["model.layers"]
    assert (setting.value, setting.origin) == (3, f"{folder / 'config.json'}: num_hidden_layers")
    with pytest.raises(InputError, match=r"model\.layers must be a whole number") as caught:
        model_of(weights(tmp_path, QWEN, num_hidden_layers="3")[0], "qwen3")
    assert caught.value.where == f"{folder / 'config.json'}: num_hidden_layers"


def test_a_size_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder, _ = weights(tmp_path, QWEN, hidden_size="gone")
    with pytest.raises(InputError, match=r"config\.json has no hidden_size"):
        model_of(folder, "qwen3")
