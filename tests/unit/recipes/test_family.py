"""A model and its ``config.json``: what one says, the other says too."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_images.errors import InputError
from primus_images.recipes.architecture import architecture
from primus_images.recipes.family import (
    FULL,
    WINDOWED,
    Weight,
    config_of,
    described,
    families,
    families_of,
    family,
    renamed,
    uncomputed,
)
from primus_images.recipes.load import entries
from primus_images.yamlfile import section

FILE = Path("folder/config.json")
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
}
MODELS = {entry.recipe: entry.architecture for entry in entries()}
OF_TEXT = [name for name, model in MODELS.items() if not model.of_images]


def said(name: str, **changes: Any) -> dict[str, tuple[str, Any]]:
    """Field of ``model.`` → its key in a ``config.json`` and its value."""
    rows = described(family(name), {**SIZES, **changes}, FILE)
    return {key: (field, value) for key, field, value in rows}


@pytest.mark.parametrize("name", OF_TEXT)
def test_the_config_of_a_model_describes_the_same_model(name: str) -> None:
    model = MODELS[name]
    config = config_of(model)
    known = family(model.family)
    # What belongs to the whole family stands in no config.json.
    values = {key: allowed[0] for key, allowed in known.values.items()}
    values |= {key: value for key, _, value in described(known, dict(config), FILE)}
    again = architecture({"family": model.family, **values})
    assert config_of(again) == config
    for key in known.names:
        assert attribute(again, key) == attribute(model, key), key
    assert again.rope_scaling == model.rope_scaling
    assert [again.has_window(layer) for layer in range(model.layers)] == [
        model.has_window(layer) for layer in range(model.layers)
    ]
    if not model.mla.kv_lora_rank:
        assert again.head_size == model.head_size


def attribute(model: Any, key: str) -> object:
    for part in key.split("."):
        model = getattr(model, part)
    if key in ("head_dim", "query_scalar"):
        return None
    return model


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({}, "layers", ("num_hidden_layers", 4)),
        ({}, "kv_heads", ("num_key_value_heads", 2)),
        ({"num_key_value_heads": None}, "kv_heads", ("num_key_value_heads", 4)),
        # The size that follows from the width is 0.
        ({"head_dim": 16}, "head_dim", ("head_dim", 0)),
        ({"head_dim": 32}, "head_dim", ("head_dim", 32)),
        ({"head_dim": None}, "head_dim", ("head_dim", 0)),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta", ("rope_theta", 5.0)),
        ({"rope_scaling": {"rope_theta": 6.0}}, "rope_theta", ("rope_theta", 6.0)),
    ],
)
def test_a_field_is_read_from_its_key(
    changes: dict[str, Any], key: str, expected: tuple[str, Any]
) -> None:
    assert said("qwen3", **changes)[key] == expected


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, {"kind": "none"}),
        ({"rope_type": "default"}, {"kind": "none"}),
        ({"type": "linear", "factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        ({"rope_type": "odd", "factor": 4.0}, {"kind": "odd"}),
        ({"rope_type": 3}, {"kind": 3}),
        (
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512},
            {
                "kind": "llama3",
                "original_max_position": 512,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
        (
            {"rope_type": "llama3", "high_freq_factor": 2.0},
            {
                "kind": "llama3",
                "original_max_position": 1024,
                "factor": 1.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 2.0,
            },
        ),
    ],
)
@pytest.mark.parametrize("part", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_has_the_values_of_its_kind(
    part: str, rope: Mapping[str, Any] | None, expected: dict[str, Any]
) -> None:
    rows = said("llama3", **{part: rope})
    scaling = section({key: value for key, (_, value) in rows.items()}, "rope_scaling")
    assert scaling == expected
    place = part if rope is not None else "rope_scaling"
    assert rows["rope_scaling.kind"][0] == f"{place}.rope_type"


@pytest.mark.parametrize("part", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_that_is_no_mapping_is_refused_at_its_key(part: str) -> None:
    with pytest.raises(InputError, match=f"{part} is not a mapping") as caught:
        said("llama3", **{part: "yarn"})
    assert caught.value.where == f"folder/config.json: {part}"


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 8),
        # transformers gives a window to the layers from max_window_layers on.
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, 0),
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}, 0),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, 0),
    ],
)
def test_a_window_counts_where_it_is_used(changes: dict[str, Any], window: int) -> None:
    rows = said("qwen2", **changes)
    assert rows["window"] == ("sliding_window", window)


@pytest.mark.parametrize(
    ("name", "window", "words"),
    [
        ("qwen2", 8, {"use_sliding_window": True, "max_window_layers": 0}),
        ("qwen2", 0, {"use_sliding_window": False, "max_window_layers": 4}),
        ("mistral", 8, {}),
    ],
)
def test_a_config_says_which_layers_have_the_window(
    name: str, window: int, words: dict[str, Any]
) -> None:
    values = {"family": name, "layers": 4, "hidden_size": 64, "heads": 4, "window": window}
    config = config_of(architecture({**values, "vocab_size": 8, "ffn_size": 64}))
    assert config["sliding_window"] == (window or None)
    switches = ("use_sliding_window", "max_window_layers")
    assert {key: config[key] for key in switches if key in config} == words


@pytest.mark.parametrize(
    ("layers", "pattern"),
    [
        ([WINDOWED, FULL, WINDOWED, FULL], 2),
        ([WINDOWED, WINDOWED, FULL, WINDOWED], 3),
        ([FULL, FULL], 1),
        # Orders that no pattern describes are text, which no field accepts.
        ([FULL, WINDOWED], "[full_attention, sliding_attention]"),
        ([WINDOWED, FULL, FULL], "[sliding_attention, full_attention, full_attention]"),
    ],
)
def test_layers_with_a_window_follow_a_pattern(layers: list[str], pattern: object) -> None:
    rows = said("gemma3", sliding_window=8, layer_types=layers, query_pre_attn_scalar=16)
    assert rows["window_pattern"][1] == pattern


@pytest.mark.parametrize(("scalar", "expected"), [(16, 0), (32, 32)])
def test_a_scalar_of_the_size_of_a_head_is_the_usual_one(scalar: int, expected: int) -> None:
    assert said("gemma3", query_pre_attn_scalar=scalar, head_dim=16)["query_scalar"][1] == expected


def test_layers_with_a_window_rotate_by_a_frequency_of_their_own() -> None:
    rope = {FULL: {"rope_theta": 7.0}, WINDOWED: {"rope_theta": 3.0}}
    rows = said("gemma3", rope_parameters=rope)
    assert (rows["rope_theta"][1], rows["local_rope_theta"][1]) == (7.0, 3.0)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama3", {}, []),
        ("llama3", {"hidden_act": "silu"}, []),
        (
            "llama3",
            {"hidden_act": "gelu"},
            [("hidden_act", "gelu, and the family llama3 is computed with silu")],
        ),
        (
            "llama3",
            {"layer_twist": 2, "a_twist": 1},
            [
                (
                    "a_twist, layer_twist",
                    "unknown; what changes no result belongs to `ignored`, and the values that are "
                    "computed to `computes`, in families/llama3.yaml",
                )
            ],
        ),
    ],
)
def test_what_makes_another_model_is_named(
    name: str, changes: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert list(uncomputed(family(name), {**SIZES, **changes})) == expected


def test_a_size_without_a_default_is_missing() -> None:
    config = {key: value for key, value in SIZES.items() if key != "hidden_size"}
    missing = ("hidden_size", "missing, and transformers has no value for it")
    assert list(uncomputed(family("llama3"), config)) == [missing]


def test_an_unknown_family_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"there is no family 'lama3'.*llama3") as caught:
        family("lama3")
    assert caught.value.hint == ", ".join(families())
    assert list(families()) == sorted(families())
    assert "decoder" not in families()


def test_families_are_found_by_the_type_of_transformers() -> None:
    assert families_of("qwen3_moe") == ["qwen3_moe"]
    assert families_of("llama") == ["llama2", "llama3"]
    assert families_of("absent") == []
    for name in families():
        known = family(name)
        assert (name in families_of(known.transformers)) is not known.images


@pytest.mark.parametrize(
    ("when", "belongs"),
    [
        ([], True),
        (["window"], True),
        (["!window"], False),
        (["bias"], False),
        (["!bias"], True),
        (["window=8"], True),
        (["window=9"], False),
        (["!window=9"], True),
        (["window", "bias"], False),
        (["moe.experts=4", "window"], True),
    ],
)
def test_a_weight_belongs_to_models_that_fulfill_all_conditions(
    when: list[str], belongs: bool
) -> None:
    model = SimpleNamespace(window=8, bias=False, moe=SimpleNamespace(experts=4))
    assert Weight(name="w", shape=(), when=when, names={}).belongs(model) is belongs


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (["hidden_size"], (64,)),
        (["heads*head_size", "hidden_size"], (32, 64)),
        (["heads*head_size+2*moe.experts", 3], (48, 3)),
        ([], ()),
    ],
)
def test_the_shape_of_a_weight_is_sums_of_products(
    shape: list[str | int], sizes: tuple[int, ...]
) -> None:
    moe = SimpleNamespace(experts=8)
    model = SimpleNamespace(hidden_size=64, heads=4, head_size=8, moe=moe)
    assert Weight(name="w", shape=shape, when=(), names={}).sizes(model) == sizes


def test_of_two_weights_with_one_name_the_models_own_counts() -> None:
    for name in OF_TEXT:
        model = MODELS[name]
        for backend in ("torchtitan", "megatron"):
            names = renamed(model, backend)
            assert len(names) > 5, (name, backend)
