"""A flipped bit in gradients, weights or moments of a sampled step is named; healthy steps pass."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from primus_images.training.run import recompute  # noqa: E402
from primus_images.training.run.recompute import Repeated, WrongResultError  # noqa: E402


class Run:
    """Three steps of a small model, of which the second is computed twice."""

    def __init__(self, every: int = 2) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 4))
        self.model.register_buffer("calls", torch.zeros(()))
        self.model[0].bias.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=True)
        self.waits = 0
        self.repeated = Repeated([self.model], self.optimizer, every, self.off_the_clock)
        self.samples = torch.randn(3, 2, 5, 8)
        self.deterministic: set[int] = set()

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        self.waits += 1
        yield

    def compute(self, step: int) -> Tensor:
        total = torch.zeros(())
        if torch.are_deterministic_algorithms_enabled():
            self.deterministic.add(step)
        for samples in self.samples[step - 1]:
            self.model.calls += 1
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


def flip(tensor: Tensor, bit: int = 3) -> None:
    with torch.no_grad():
        tensor.view(-1)[3:4].view(torch.int32).bitwise_xor_(1 << bit)


def weight_at_rest(run: Run, bit: int) -> None:
    run.train(lambda step: flip(run.model[0].weight, bit) if step == 2 else None)


def moment_at_rest(run: Run, bit: int) -> None:
    def between(step: int) -> None:
        if step == 2:
            flip(run.optimizer.state[run.model[2].weight]["exp_avg_sq"], bit)

    run.train(between)


def gradient(run: Run, bit: int = 3, call: int = 4) -> None:
    """Flip a bit of a micro-batch: the second one of the second step, computed first."""
    calls = 0

    def wrong(grad: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            grad = grad.clone()
            flip(grad, bit)
        return grad

    run.model[2].weight.register_hook(wrong)
    run.train()


def loss(run: Run) -> None:
    compute = run.compute
    calls = 0

    def wrong(step: int) -> Tensor:
        nonlocal calls
        calls += 1
        return compute(step) + (calls == 2)

    run.compute = wrong  # type: ignore[method-assign]
    run.train()


def added_gradient(run: Run) -> None:
    """What ranks have added differs, and no gradient of this rank does."""
    calls = 0

    def wrong(parameter: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            flip(parameter.grad)

    run.model[2].weight.register_post_accumulate_grad_hook(wrong)
    run.train()


def update(run: Run, bit: int, key: str = "") -> None:
    def after(*_: object) -> None:
        weight = run.model[0].weight
        flip(run.optimizer.state[weight][key] if key else weight, bit)

    def between(step: int) -> None:
        if step == 2:
            run.optimizer.register_step_post_hook(after)

    run.train(between)


@pytest.mark.parametrize("bit", random.Random(1).sample(range(31), 10))
@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (weight_at_rest, "0.weight changed in the memory of the CPU of"),
        (moment_at_rest, "exp_avg_sq of 2.weight changed in the memory"),
        (gradient, "computed the step twice, and 2.weight got other gradients"),
        (update, "the update of 0.weight twice"),
        (partial(update, key="exp_avg"), "the update of exp_avg of 0.weight twice"),
        (partial(update, key="exp_avg_sq"), "the update of exp_avg_sq of 0.weight twice"),
    ],
)
def test_flipped_bit_is_named(plant: Callable[[Run, int], None], words: str, bit: int) -> None:
    assert words in wrong_result(partial(plant, bit=bit))


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (partial(gradient, call=6), "2.weight got other gradients"),
        (loss, "the loss got other gradients"),
        (added_gradient, "2.weight got other gradients"),
    ],
)
def test_other_computation_is_named(plant: Callable[[Run], None], words: str) -> None:
    assert words in wrong_result(plant)


def wrong_result(plant: Callable[[Run], None]) -> str:
    """Return what the error of a run with the fault ``plant`` says."""
    with pytest.raises(WrongResultError, match="step 2: ") as caught:
        plant(Run())
    assert "Replace it, and resume from an earlier checkpoint" in str(caught.value)
    return str(caught.value)


def test_healthy_steps_are_those_of_a_plain_run() -> None:
    plain = Run()
    plain.repeated.due = lambda step: False  # type: ignore[method-assign]
    healthy = Run()
    assert healthy.train() == plain.train()
    assert healthy.deterministic == {2}
    assert not plain.deterministic
    # The first computation leaves no trace.
    assert healthy.model.calls == plain.model.calls == 6
    assert all(map(torch.equal, healthy.model.parameters(), plain.model.parameters()))
    # At rest after step 1 and 3, the second computation, before and after the update.
    assert healthy.waits == 5
    assert plain.waits == 0
    assert healthy.repeated.cost(1e9).startswith("1 step computed twice, with the same bits: ")
    assert "0.00% of the time" in healthy.repeated.cost(1e9)


@pytest.mark.parametrize(("every", "steps"), [(1, {2, 3}), (2, {2}), (3, {2, 3}), (100, {2})])
def test_second_step_and_every_sampled_one_are_computed_twice(every: int, steps: set[int]) -> None:
    run = Run(every)
    run.train()
    assert run.deterministic == steps


def test_compare_names_the_weight_whose_gradient_differs() -> None:
    run = Run()

    def compute(number: list[int]) -> None:
        number.append(1)
        out = run.model(run.samples[0, 0]).square().sum()
        (out + len(number) * run.model[2].bias.sum()).backward()

    before = torch.get_rng_state()
    with pytest.raises(WrongResultError, match=r"step 7: the CPU of .* and 2\.bias got other"):
        recompute.compare([run.model], 7, partial(compute, []))
    recompute.compare([run.model], 7, partial(run.compute, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert run.model.calls == 0
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_compare_without_a_gradient_compares_nothing() -> None:
    with pytest.raises(RuntimeError, match="step 7: no gradient of this rank was seen"):
        recompute.compare([Run().model], 7, lambda: None)


def test_gathered_weights_of_fsdp_are_compared() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model[1].bias.requires_grad_(False)
        torch.distributed.fsdp.fully_shard(model)
        compute = partial(_loss, model)
        compute()
        model.zero_grad()
        with recompute._gradients([model]) as sums:
            compute()
        assert set(sums) == {"0.weight", "0.bias", "1.weight"}
        optimizer = torch.optim.AdamW(model.parameters())
        repeated = Repeated([model], optimizer, 1)
        model.zero_grad()
        repeated.finished(1)
        repeated.gradients(2, compute)
        with repeated.update(2):
            optimizer.step()
        assert repeated.cost(1.0).startswith("1 step")
    finally:
        torch.distributed.destroy_process_group()


def _loss(model: nn.Module) -> Tensor:
    loss = model(torch.ones(1, 4)).sum()
    loss.backward()
    return loss.detach()
