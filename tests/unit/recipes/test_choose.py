"""Which backend, mode, precision and GPU a recipe takes if the user names none."""

from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.recipes.choose import choose
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
