"""Flipped bits in gradients, weights and moments, for ``recompute.Repeated``: what is named where.

A bit is flipped in the memory of a sampled step: before it, in its backward pass, or by its update.
Prints how many of the flips were named by what they changed, and how many healthy steps were.
"""

import json
import random
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from primus_images.training.run.recompute import Repeated, WrongResultError


class Run:
    """Three steps of a small model, of which the second is computed twice."""

    def __init__(self, every: int = 2) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=True)
        self.repeated = Repeated([self.model], self.optimizer, every)
        self.samples = torch.randn(3, 2, 5, 8)
        self.deterministic: set[int] = set()

    def compute(self, step: int) -> Tensor:
        total = torch.zeros(())
        if torch.are_deterministic_algorithms_enabled():
            self.deterministic.add(step)
        for samples in self.samples[step - 1]:
            loss = self.model(samples).square().sum()
            loss.backward()
            total += loss.detach()
        return total

    def train(self, between: Callable[[int], None] = lambda step: None) -> list[float]:
        losses = []
        torch.manual_seed(2)
        for step in (1, 2, 3):
            between(step)
            if self.repeated.due(step):
                loss = self.repeated.gradients(step, partial(self.compute, step))
                with self.repeated.update(step):
                    self.optimizer.step()
            else:
                loss = self.compute(step)
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.repeated.finished(step)
            losses.append(float(loss))
        return losses


def flip(tensor: Tensor, bit: int) -> None:
    """Flip one bit of one number."""
    with torch.no_grad():
        tensor.view(-1)[3:4].view(torch.int32).bitwise_xor_(1 << bit)


def weight_at_rest(run: Run, bit: int) -> None:
    def between(step: int) -> None:
        if step == 2:
            flip(run.model[0].weight, bit)

    run.train(between)


def moment_at_rest(run: Run, bit: int) -> None:
    def between(step: int) -> None:
        if step == 2:
            flip(run.optimizer.state[run.model[2].weight]["exp_avg_sq"], bit)

    run.train(between)


def gradient(run: Run, bit: int) -> None:
    calls = 0

    def wrong(grad: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:  # the second micro-batch of the second step, in its first computation
            grad = grad.clone()
            flip(grad, bit)
        return grad

    run.model[2].weight.register_hook(wrong)
    run.train()


def update(run: Run, bit: int, key: str = "") -> None:
    def between(step: int) -> None:
        if step == 2:
            run.optimizer.register_step_post_hook(after)

    def after(*_: object) -> None:
        weight = run.model[0].weight
        flip(run.optimizer.state[weight][key] if key else weight, bit)

    run.train(between)


FLIPS = {
    "changed in the memory": (weight_at_rest, moment_at_rest),
    "other gradients": (gradient,),
    "the update of": (update, partial(update, key="exp_avg"), partial(update, key="exp_avg_sq")),
}
named = 0
planted = 0
for words, flips in FLIPS.items():
    for plant in flips:
        for bit in random.Random(1).sample(range(31), 10):
            planted += 1
            try:
                plant(Run(), bit)
            except WrongResultError as error:
                named += words in str(error) and "step 2" in str(error)

plain = Run()
plain.repeated.due = lambda step: False  # type: ignore[method-assign]
healthy = Run()
assert healthy.train() == plain.train()
assert healthy.deterministic == {2}
rare = Run(every=100)
rare.train()
assert rare.deterministic == {2}
assert not plain.deterministic
assert all(map(torch.equal, healthy.model.parameters(), plain.model.parameters()))
assert healthy.repeated.cost(1e9).startswith("1 step computed twice, with the same bits: ")
print(json.dumps({"planted": planted, "named": named}))
