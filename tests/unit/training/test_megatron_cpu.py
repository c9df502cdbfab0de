"""Megatron's names of a GPU mean the CPU."""

import pytest

torch = pytest.importorskip("torch")

from primus_images.training.backends.megatron import cpu  # noqa: E402


def test_a_tensor_for_a_gpu_is_made_and_stays_on_the_cpu() -> None:
    with cpu._AsCuda():
        made = torch.ones(3, device="cuda")
        assert made.cuda() is made
    assert made.device.type == "cpu"


def test_only_the_name_of_a_type_is_that_of_a_gpu() -> None:
    tensor = torch.ones(3)
    with cpu._AsCuda():
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert torch.equal(tensor.type(torch.int64), torch.ones(3, dtype=torch.int64))
