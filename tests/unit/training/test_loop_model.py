"""What our own loop does with a model, on one rank without a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from primus_images.training.backends.loop import weights  # noqa: E402
from primus_images.training.backends.loop.config import LoopConfig, ShardingConfig  # noqa: E402
from primus_images.training.backends.loop.session import (  # noqa: E402
    IGNORED,
    LanguageModel,
    Sharded,
    shard,
    trained_rows,
)


class Tied(nn.Module):
    """Two names of one weight, and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def job(*turbo: str, max_norm: float = 1.0) -> Any:
    training = LoopConfig(dtype="float32", max_norm=max_norm)
    return SimpleNamespace(turbo=turbo, training=training, section=lambda *_: ShardingConfig())


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


def test_gradients_of_one_rank_add_up(group: None) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    with weights.empty():
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    shard(model, [model[0]], job(), torch.device("cpu"))
    for parameter, source in zip(model.parameters(), plain.parameters(), strict=True):
        parameter.to_local().data.copy_(source)
    for micro_batch in (torch.randn(5, 4), torch.randn(2, 4)):
        for either in (plain, model):
            either(micro_batch).square().sum().backward()
    for parameter, source in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), source.grad)


class Embedded(LanguageModel):
    """A language model of one embedding and one output layer."""

    def __init__(self) -> None:
        super().__init__(chunk=64)
        self.embedding = nn.Embedding(16, 4)
        self.output = nn.Linear(4, 16, bias=False)

    def hidden(self, tokens: Any, *_: Any) -> tuple[Any, None]:
        return self.embedding(tokens), None

    @property
    def head(self) -> nn.Linear:
        return self.output


def test_loss_of_trained_rows_is_that_of_all_rows() -> None:
    torch.manual_seed(1)
    model = Embedded()
    tokens = torch.randint(16, (2, 8))
    labels = torch.randint(16, (2, 8))
    labels[0, :5] = IGNORED
    losses = []
    gradients = []
    for rows in (None, trained_rows(labels)):
        model.zero_grad()
        loss = model(tokens, labels, rows=rows)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_trained_rows_are_places_among_all_tokens() -> None:
    labels = torch.tensor([[3, IGNORED], [IGNORED, 5]])
    rows = trained_rows(labels)
    assert rows is not None
    assert rows.tolist() == [0, 3]
    assert trained_rows(torch.full((2, 2), 7)) is None
    assert trained_rows(torch.full((2, 2), IGNORED)) is None


@pytest.mark.parametrize("max_norm", [1e-7, 0.5, 1e9])
def test_step_clips_as_pytorch_does(group: None, max_norm: float) -> None:
    torch.manual_seed(1)
    plain = nn.Linear(4, 6)
    with weights.empty():
        model = nn.Linear(4, 6)
    shard(model, [], job(max_norm=max_norm), torch.device("cpu"))
    for parameter, source in zip(model.parameters(), plain.parameters(), strict=True):
        parameter.to_local().data.copy_(source)
    session = Sharded(model, job(max_norm=max_norm), torch.device("cpu"))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(2):
        inputs = torch.randn(5, 4)
        for either in (plain, model):
            either(inputs).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        assert session.step(0.1) == pytest.approx(float(norm))
    for parameter, source in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.to_local(), source)
