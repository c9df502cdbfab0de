"""Planted wrong kernels, and healthy ones, for ``primus_images.training.run.recompute``. Prints
what was named and what was not.
"""

import json
from functools import partial
from typing import Any

import torch
from torch import nn

from primus_images.training.run import recompute


class WrongOnce(torch.autograd.Function):
    """A kernel whose result, forwards or backwards, has one wrong bit in one call of all."""

    calls, wrong = 0, -1

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return WrongOnce.result(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return WrongOnce.result(gradient)

    @staticmethod
    def result(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        if WrongOnce.calls == WrongOnce.wrong:
            values.view(-1).view(torch.int32)[values.abs().argmax()] ^= 1 << 16
        WrongOnce.calls += 1
        return values


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.tokens += values.numel()
        values = self.dropout(values)
        for layer in self.layers:
            values = WrongOnce.apply(layer(values).tanh()) + values
        return values.square().sum()


torch.manual_seed(1)
model = Model().train()


def compute(sample: torch.Tensor) -> None:
    model(sample).backward()


def named(wrong: int = -1) -> bool:
    WrongOnce.calls, WrongOnce.wrong = 0, wrong
    state = torch.get_rng_state()
    try:
        recompute.compare([model], 1, partial(compute, torch.randn(8, 16)))
    except recompute.WrongResultError as error:
        assert "layers." in str(error)
        return True
    finally:
        assert all(parameter.grad is None for parameter in model.parameters())
        assert model.tokens == 0
        torch.set_rng_state(state)
        torch.randn(8, 16)
    return False


print(
    json.dumps(
        {
            "planted": sum(named(call) for call in range(20)),
            "healthy": sum(named() for _ in range(200)),
        }
    )
)
