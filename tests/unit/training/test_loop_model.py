"""What our own loop does with a model, on one rank without a GPU."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from primus_images.training.backends.loop import weights  # noqa: E402
from primus_images.training.backends.loop.config import LoopConfig, ShardingConfig  # noqa: E402
from primus_images.training.backends.loop.session import shard  # noqa: E402


class Tied(nn.Module):
    """Two names of one weight, and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def job(*turbo: str) -> Any:
    training = LoopConfig(dtype="float32")
    return SimpleNamespace(turbo=turbo, training=training, section=lambda *_: ShardingConfig())


@pytest.fixture
def group() -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("turbo", [(), ("frozen-weights",)])
@pytest.mark.parametrize("trained", [(), ("layer.weight",), ("embedding.weight",)])
def test_tied_weights_stay_one(
    group: None, turbo: tuple[str, ...], trained: tuple[str, ...]
) -> None:
    with weights.empty():
        model = Tied()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    shard(model, [model.layer], job(*turbo), torch.device("cpu"))
    assert model.head.weight is model.embedding.weight
    assert [name for name, _ in model.named_parameters()] == [
        "embedding.weight",
        "layer.weight",
        "layer.bias",
    ]
    weights.draw_all(model, 1, outer=("embedding.weight",))
    assert model.embedding.weight.requires_grad == ("embedding.weight" in trained)
    assert not model.embedding.weight.is_meta
