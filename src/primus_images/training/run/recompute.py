"""Silent corruption: a GPU that computes the same twice with other bits is wrong.

:class:`Repeated` computes whole steps of our own loop twice, :func:`compare` the gradients of one
micro-batch. Gradients are those of the rank itself. Once ranks have added theirs, a wrong one is on
all of them.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from primus_images.system.measure import device_name
from primus_images.terminal import counted, some
from primus_images.training.run.facts import bits_of
from primus_images.turbo.deterministic import deterministic


class WrongResultError(RuntimeError):
    """The same computation had two results on one GPU."""


def compare(parts: Sequence[nn.Module], step: int, compute: Callable[[], object]) -> None:
    """Compute the gradients of one micro-batch of the models ``parts`` twice. All ranks.

    Both times by deterministic algorithms. Afterwards, there are no gradients, and buffers and
    random states are as before. Raises WrongResultError on a rank whose gradients
    differ in any bit.
    """
    with deterministic():
        with _as_before(parts), _gradients(parts) as first:
            compute()
        with _as_before(parts), _gradients(parts) as second:
            compute()
    if not first:
        raise RuntimeError(
            f"step {step}: no gradient of this rank was seen, so none could be compared"
        )
    wrong = _different(first, second)
    if wrong:
        raise WrongResultError(
            f"step {step}: {_device()} computed one micro-batch twice, and {some(wrong, 3)} got "
            f"other gradients: it computes wrong. {_REMEDY}"
        )


_REMEDY = "Replace it, and resume from an earlier checkpoint"
# Name of a tensor → the sum of its bits, as integers. A single flipped bit always changes it.
_Sums = dict[str, Tensor]


class Repeated:
    """Computes every ``every``-th step of the models ``parts`` twice, and compares all bits.

    The gradients of a sampled step are computed twice, by deterministic algorithms and with the
    same random numbers. The update of each weight is computed on a copy as well, so that no more
    memory is needed than for the copy of the largest weight and its moments. What the step starts
    from is compared with what the step before it left.

    The first step is never computed twice, and the second one always: kernels that cannot be
    deterministic end a run at its beginning. All methods must be called on all ranks; they raise
    WrongResultError on a rank whose GPU is wrong. What is computed twice is ``off_the_clock`` of
    steps, a context that begins and ends when the GPU has computed what it was told.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        every: int,
        off_the_clock: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._off_the_clock = off_the_clock
        self._parts = parts
        self._optimizer = optimizer
        self._every = every
        # FSDP2 shows gathered weights in place of these from a forward pass on.
        self._weights = {name: weight for part in parts for name, weight in part.named_parameters()}
        self._names = {id(weight): name for name, weight in self._weights.items()}
        self._at_rest: _Sums = {}
        # FSDP2 gathers weights into tensors that it creates in the first step.
        self._began = False
        self._steps = 0
        self._seconds = 0.0

    def due(self, step: int) -> bool:
        """Return whether ``step`` is computed twice."""
        if not self._began:
            return False
        return self._steps == 0 or step % self._every == 0

    def finished(self, step: int) -> None:
        """Note what ``step`` left, if the next one is computed twice."""
        self._began = True
        if self.due(step + 1):
            with self._timed():
                self._at_rest = self._sums_of_state()

    def gradients(self, step: int, compute: Callable[[], Tensor]) -> Tensor:
        """Call ``compute``, which adds up gradients and returns the loss, twice. Returns the loss.

        Afterwards, there are the gradients of one call.
        """
        with deterministic(), _as_before(self._parts):
            first = self._pass(compute)
        with self._timed():
            with deterministic():
                second = self._pass(compute)
            wrong = _different(first.own, second.own)
            if not wrong and not torch.equal(first.loss, second.loss):
                wrong = ["the loss"]
            if not _on_any_rank(bool(wrong), second.loss.device):
                # Only now: once ranks have added theirs, a wrong gradient is on all of them.
                wrong = _different(first.added, second.added)
        if wrong:
            raise WrongResultError(
                f"step {step}: {_device()} computed the step twice, and {some(wrong, 3)} got other "
                f"gradients: it computes wrong. {_REMEDY}"
            )
        return second.loss

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Compare the update that the optimizer makes in the context."""
        expected: _Sums = {}

        def before(*_: object) -> None:
            with self._timed():
                self._compare_rest(step)
                expected.update(self._expected())

        def after(*_: object) -> None:
            with self._timed():
                wrong = _different(expected, self._sums_of_state(expected))
            if wrong:
                raise WrongResultError(
                    f"step {step}: {_device()} computed the update of {some(wrong, 3)} twice, and "
                    f"got other bits: it computes wrong. {_REMEDY}"
                )

        hooks = [
            self._optimizer.register_step_pre_hook(before),
            self._optimizer.register_step_post_hook(after),
        ]
        yield
        for hook in hooks:
            hook.remove()
        self._steps += 1

    def cost(self, seconds: float) -> str:
        """Return what this cost of a run of ``seconds`` in a sentence."""
        share = self._seconds / max(seconds, 1e-9)
        return (
            f"{counted(self._steps, 'step')} computed twice, with the same bits: "
            f"{self._seconds:.1f} s, {share:.2%} of the time"
        )

    def _pass(self, compute: Callable[[], Tensor]) -> "_Pass":
        with _gradients(self._parts) as own:
            loss = compute()
        added = {}
        for name, weight in self._weights.items():
            if weight.grad is not None:
                added[name] = _sum_of_bits(weight.grad)
        return _Pass(loss=loss, own=own, added=added)

    def _compare_rest(self, step: int) -> None:
        at_rest = self._at_rest
        self._at_rest = {}
        wrong = _different(at_rest, self._sums_of_state(at_rest))
        if wrong:
            raise WrongResultError(
                f"step {step}: {some(wrong, 3)} changed in the memory of {_device()} since the "
                f"step before: its memory is wrong. {_REMEDY}"
            )

    def _sums_of_state(self, names: Mapping[str, Tensor] | None = None) -> _Sums:
        """Return the sums of all weights and moments, or of those of ``names``."""
        sums = {}
        for name, weight in self._weights.items():
            tensors = {name: weight, **_moments(name, self._optimizer.state.get(weight, {}))}
            for key, tensor in tensors.items():
                if names is None or key in names:
                    sums[key] = _sum_of_bits(tensor)
        return sums

    def _expected(self) -> _Sums:
        """Return the sums of what the optimizer makes of a copy of each weight and its moments."""
        sums: _Sums = {}
        for group in self._optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                copy = nn.Parameter(_local(weight).detach().clone())
                copy.grad = _local(weight.grad)
                alone: Any = type(self._optimizer)([copy])
                alone.param_groups[0].update(settings)
                for key, value in self._optimizer.state.get(weight, {}).items():
                    alone.state[copy][key] = _local(value).clone()
                alone.step()
                name = self._names[id(weight)]
                sums[name] = _sum_of_bits(copy)
                for key, value in _moments(name, alone.state[copy]).items():
                    sums[key] = _sum_of_bits(value)
        return sums

    @contextmanager
    def _timed(self) -> Iterator[None]:
        # The clock waits for the GPU at both ends, so that the time between is of this alone.
        with self._off_the_clock():
            began = time.perf_counter()
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._seconds += time.perf_counter() - began


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """The loss of a step, and sums of this rank's ``own`` gradients and of those that are added."""

    loss: Tensor
    own: _Sums
    added: _Sums


def _on_any_rank(flag: bool, device: torch.device) -> bool:
    flags = torch.tensor(int(flag), device=device)
    if dist.is_initialized():
        dist.all_reduce(flags)
    return bool(flags)


def _moments(name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    moments = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim:
            moments[f"{key} of {name}"] = value
    return moments


def _different(first: _Sums, second: _Sums) -> list[str]:
    """Return the names whose sums differ."""
    if not first:
        return []
    ours = torch.stack(list(first.values()))
    none = torch.full_like(ours[0], -1)
    theirs = torch.stack([second.get(name, none) for name in first])
    equal = (ours == theirs).tolist()
    return [name for name, same in zip(first, equal, strict=True) if not same]


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def _sum_of_bits(tensor: Tensor) -> Tensor:
    return bits_of(_local(tensor.detach())).sum(dtype=torch.int64)


@contextmanager
def _as_before(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Leave buffers and random states as they were before the context, and no gradients."""
    buffers = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers()]
    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.current_device()]
    with torch.random.fork_rng(gpus):
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for part in parts:
        part.zero_grad()


@contextmanager
def _gradients(parts: Sequence[nn.Module]) -> Iterator[_Sums]:
    """Yield the sums of the bits of the gradients that the context computes."""
    sums: _Sums = {}
    hooks = []
    for name, tensor in _computed(parts):
        hooks.append(tensor.register_hook(partial(_note, sums, name)))
    yield sums
    for hook in hooks:
        hook.remove()


def _computed(parts: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors whose gradients autograd computes.

    FSDP2's are gathered copies, which it reuses.
    """
    for part in parts:
        for name, tensor in part.named_parameters():
            if tensor.requires_grad:
                yield name, tensor
        for module in part.modules():
            if isinstance(module, FSDPModule):
                yield from _gathered(module)


def _gathered(module: FSDPModule) -> Iterator[tuple[str, Tensor]]:
    state: Any = module._get_fsdp_state()
    # Newer versions of PyTorch can have several groups.
    groups = vars(state).get("_fsdp_param_groups") or [state._fsdp_param_group]
    for group in filter(None, groups):
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad:
                yield str(parameter._param_fqn), parameter._unsharded_param


def _note(sums: _Sums, name: str, gradient: Tensor) -> None:
    # Micro-batches are added up: each has a weight of its own, so that two cannot be exchanged.
    sums[name] = 3 * sums.get(name, 0) + _sum_of_bits(gradient)


def _device() -> str:
    node = platform.node()
    if not torch.cuda.is_available():
        return f"the CPU of {node}"
    name = device_name(torch.device("cuda", torch.cuda.current_device()))
    return f"GPU {os.environ.get('LOCAL_RANK', '0')} of {node} ({name})"
