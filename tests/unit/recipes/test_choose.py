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
