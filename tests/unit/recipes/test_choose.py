"""Which backend, mode, precision and GPU a recipe takes if the user names none."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primus_images.errors import InputError
from primus_images.gpus import detect
from primus_images.gpus.detect import DetectedGpus
from primus_images.recipes.choose import check_choice, check_condition, choose
from primus_images.recipes.setting import Choices, Setting

FILE = Path("recipes/small.yaml")
# A recipe that trains in BF16 or FP8 on GPUs.
SETTINGS = {
    "supports.finetune.full": Setting(value=["bf16", "fp8"], origin="small.yaml:4:13"),
    "default.precision": Setting(value="bf16", origin="small.yaml:5:1"),
}


def chosen(choices: Choices, *, sized: bool = True) -> dict[str, object]:
    settings = choose(SETTINGS, choices, FILE, sized=sized)
    return {name: setting.value for name, setting in settings.items()}


@pytest.mark.parametrize(
    ("choices", "precision"),
    [
        (Choices(gpu="mi300x"), "bf16"),
        (Choices(gpu="mi300x", precision="fp8"), "fp8"),
        (Choices(gpu="mi300x", proxy=True), "fp32"),
        (Choices(gpu="cpu"), "fp32"),
        (Choices(gpu="cpu", proxy=True), "fp32"),
        (Choices(gpu="cpu", precision="bf16"), "bf16"),
    ],
)
def test_a_cpu_and_a_proxy_compute_in_fp32_unless_asked_otherwise(
    choices: Choices, precision: str
) -> None:
    assert chosen(choices)["precision"] == precision


def test_fp32_is_not_offered_for_a_model_of_full_size_on_a_gpu() -> None:
    with pytest.raises(InputError, match="precision 'fp32' is not supported by this recipe"):
        chosen(Choices(gpu="mi300x", precision="fp32"))


def test_only_a_model_with_weights_may_be_of_full_size_on_a_cpu() -> None:
    with pytest.raises(InputError, match="small at full size is not trained on a CPU"):
        chosen(Choices(gpu="cpu"), sized=False)


@pytest.mark.parametrize(
    ("choices", "nodes"),
    [
        (Choices(gpu="mi300x"), 4),
        (Choices(gpu="mi300x", nodes=2), 2),
        (Choices(gpu="mi300x", nodes=65_536), 65_536),
        (Choices(gpu="mi300x", proxy=True), 1),
        (Choices(gpu="mi300x", proxy=True, nodes=2), 2),
    ],
)
def test_a_recipes_nodes_are_those_of_its_full_size(choices: Choices, nodes: int) -> None:
    of_four = {"default.nodes": Setting(value=4, origin="small.yaml:6:1")}
    settings = choose(SETTINGS | of_four, choices, FILE)
    assert settings["nodes"].value == nodes


@pytest.mark.parametrize("nodes", [0, -1, 65_537])
def test_a_number_of_nodes_that_no_cluster_has_is_refused(nodes: int) -> None:
    with pytest.raises(InputError, match="nodes must be at least 1 and at most 65,536"):
        chosen(Choices(gpu="mi300x", nodes=nodes))


def setting(value: Any) -> Setting:
    return Setting(value=value, origin="r.yaml:2:3")


BOTH = {
    "supports.torchtitan.pretrain": setting(["bf16", "fp8"]),
    "supports.megatron.pretrain": setting(["bf16"]),
    "supports.finetune.full": setting("bf16"),
}


@pytest.mark.parametrize(
    ("defaults", "choices", "cell", "origins"),
    [
        (
            {},
            Choices(),
            ("torchtitan", "pretrain", "bf16"),
            ["the first that the recipe supports"] * 3,
        ),
        (
            {"default.backend": setting("megatron")},
            Choices(),
            ("megatron", "pretrain", "bf16"),
            ["r.yaml:2:3", *["the first that the recipe supports"] * 2],
        ),
        (
            {"default.backend": setting("megatron"), "default.precision": setting("fp8")},
            Choices(backend="torchtitan"),
            ("torchtitan", "pretrain", "fp8"),
            ["--backend torchtitan", "the first that the recipe supports", "r.yaml:2:3"],
        ),
        (
            {"default.precision": setting("fp8")},
            Choices(backend="finetune", mode="full"),
            ("finetune", "full", "bf16"),
            ["--backend finetune", "--mode full", "the first that the recipe supports"],
        ),
    ],
)
def test_the_users_word_goes_before_the_recipes_and_both_before_the_first(
    defaults: dict[str, Setting],
    choices: Choices,
    cell: tuple[str, ...],
    origins: list[str],
) -> None:
    settings = choose(BOTH | defaults, replace(choices, gpu="mi300x"), FILE)
    rows = [settings[name] for name in ("backend", "mode", "precision")]
    assert tuple(row.value for row in rows) == cell
    assert [row.origin for row in rows] == origins


@pytest.mark.parametrize(
    ("settings", "choices", "message", "hint"),
    [
        ({}, Choices(), "the recipe supports no backend", "add a section such as supports:"),
        (
            {**BOTH, "default.mode": setting("lora")},
            Choices(),
            "default.mode is 'lora', which the recipe does not support",
            "supports names pretrain, full",
        ),
        (
            BOTH,
            Choices(backend="torchtitan", mode="full"),
            "backend torchtitan does not support mode 'full' with this recipe",
            "--backend finetune supports it",
        ),
        (
            BOTH,
            Choices(backend="torchtitan", mode="lora"),
            "mode 'lora' is not supported by this recipe with backend torchtitan",
            "there are: pretrain",
        ),
        (
            BOTH,
            Choices(backend="megatrn"),
            "backend 'megatrn' is not supported by this recipe; did you mean 'megatron'?",
            "there are: torchtitan, megatron, finetune",
        ),
        (
            BOTH,
            Choices(backend="megatron", precision="fp8"),
            "precision 'fp8' is not supported by this recipe with backend megatron, mode pretrain",
            "there are: bf16",
        ),
        (BOTH, Choices(gpu="mi999"), "there is no GPU 'mi999' here", "there are: cpu, "),
        (
            {"supports.torchtitan": setting(["bf16"])},
            Choices(),
            "supports.torchtitan must be a mapping such as {pretrain: [fp32]}",
            "None",
        ),
        (
            {"supports.torchtitan.lora": setting(["bf16"])},
            Choices(),
            "there is no mode 'lora' here",
            "there are: pretrain",
        ),
        (
            {"supports.torchtitan.pretrain": setting(["bf17"])},
            Choices(),
            "there is no precision 'bf17' here; did you mean 'bf16'?",
            "there are: ",
        ),
        (
            {"supports.torchtitan.pretrain": setting([])},
            Choices(),
            "supports.torchtitan.pretrain names no precision",
            "None",
        ),
        (
            {"supports.torchtitan.pretrain": setting(["mxfp8"])},
            Choices(gpu="cpu", precision="mxfp8"),
            "torchtitan does not compute mxfp8 on a CPU",
            "on a CPU: fp32",
        ),
        (
            {"supports.torchtitan.pretrain": setting(["mxfp8"])},
            Choices(gpu="mi300x"),
            "mi300x (gfx942) does not compute mxfp8",
            "those that do: mi350x, mi355x",
        ),
    ],
)
def test_a_choice_that_a_recipe_does_not_have_is_refused(
    settings: dict[str, Setting], choices: Choices, message: str, hint: str
) -> None:
    with pytest.raises(InputError) as caught:
        choose(
            settings, choices if choices.gpu else replace(choices, gpu="mi300x"), FILE, sized=True
        )
    assert caught.value.message == message
    assert str(caught.value.hint).startswith(hint)


@pytest.mark.parametrize(
    ("machine", "defaults", "gpu", "origin"),
    [
        (DetectedGpus(), {}, "cpu", "this machine has no GPU"),
        (
            DetectedGpus(generation="mi325x", names=("AMD",)),
            {},
            "mi325x",
            "the GPUs of this machine",
        ),
        (
            DetectedGpus(generation="mi325x", names=("AMD",)),
            {"default.gpu": setting("mi300x")},
            "mi300x",
            "r.yaml:2:3",
        ),
    ],
)
def test_without_a_word_the_gpu_is_the_recipes_or_that_of_the_machine(
    machine: DetectedGpus,
    defaults: dict[str, Setting],
    gpu: str,
    origin: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detect, "detect", lambda: machine)
    settings = choose(BOTH | defaults, Choices(), FILE, sized=True)
    assert (settings["gpu"].value, settings["gpu"].origin) == (gpu, origin)


def test_gpus_that_nobody_knows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "detect", lambda: DetectedGpus(names=("Odd",)))
    with pytest.raises(InputError, match="the GPUs of this machine cannot be identified"):
        choose(BOTH, Choices(), FILE, sized=True)


@pytest.mark.parametrize(
    ("proxy", "default", "value", "origin"),
    [
        (None, None, False, "default"),
        (None, True, True, "r.yaml:2:3"),
        (True, None, True, "--proxy"),
        (False, True, False, "command line: proxy=false"),
    ],
)
def test_a_proxy_is_what_the_user_or_the_recipe_says(
    proxy: bool | None, default: bool | None, value: bool, origin: str
) -> None:
    defaults = {} if default is None else {"default.proxy": setting(default)}
    chosen_proxy = choose(BOTH | defaults, Choices(gpu="mi300x", proxy=proxy), FILE)["proxy"]
    assert (chosen_proxy.value, chosen_proxy.origin) == (value, origin)


@pytest.mark.parametrize(
    ("choice", "value", "as_choice", "as_condition"),
    [
        ("backend", "torchtitan", None, None),
        ("backend", ["torchtitan", "megatron"], "backend must be one word", None),
        ("backend", "torch", "there is no backend 'torch'", "there is no backend 'torch'"),
        ("gpu", "mi300x", None, None),
        ("gpu", "cpu", None, None),
        ("gpu", "gfx942", "there is no gpu 'gfx942'", None),
        ("gpu", "amd", "there is no gpu 'amd'", None),
        ("mode", "lora", None, None),
        ("mode", "amd", "there is no mode 'amd'", "there is no mode 'amd'"),
        ("nodes", 1, None, None),
        ("nodes", 0, "nodes must be a whole number", "nodes must be a whole number"),
        ("nodes", True, "nodes must be a whole number", "nodes must be a whole number"),
        ("nodes", "multi", "nodes must be a whole number", None),
        ("proxy", True, None, None),
        ("proxy", 1, "proxy must be true or false, not 1", "proxy must be true or false, not 1"),
        ("seq_len", 4096, "there is no choice 'seq_len'", None),
        ("seq_len", "long", "there is no choice", "seq_len must be a whole number, not 'long'"),
        ("seq_len", True, "there is no choice", "seq_len must be a whole number, not True"),
        ("sped", 1, "there is no choice 'sped'", "there is no choice 'sped'"),
    ],
)
def test_choices_and_conditions_have_the_values_that_there_are(
    choice: str, value: Any, as_choice: str | None, as_condition: str | None
) -> None:
    for check, expected in ((check_choice, as_choice), (check_condition, as_condition)):
        if expected is None:
            check(choice, setting(value))
        else:
            with pytest.raises(InputError, match=re.escape(expected)) as caught:
                check(choice, setting(value))
            assert caught.value.where == "r.yaml:2:3"
