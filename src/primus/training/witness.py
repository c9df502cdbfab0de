"""What a judged run leaves behind for the reference: batches, gradients, learning rates and weights of every step.

The files of ``OUTPUT/witness`` are written from the tensors that the model, its loss and its optimizer really use:

- ``batch-STEP-RANK.pt``: ``inputs`` and ``labels``, or what images are trained with, a tensor per micro-batch;
  ``data_rank``, which share of the data the rank takes; ``seed``, that of its random numbers; and ``device``, "cpu" or
  "cuda";
- ``update-STEP.pt``: ``gradients`` (as the optimizer got them, so clipped), ``rates``, the learning rate of each
  parameter or group, ``stale``, the parameters that are not the rounded weights of the optimizer, and ``apart``, those
  of which ranks hold different weights or gradients; absent when no optimizer ran;
- ``blocks-STEP-RANK.pt``, of some steps: ``data_rank``, and ``calls``, what :meth:`.blocks.Blocks.taken` returns;
- ``random-RANK.json``: ``kept``, whether the rank's random state after loading a checkpoint was that at its saving;
- ``seconds.json``: how long writing all this took after each step;
- ``weights-STEP.pt``: ``weights`` after the step, whole, by the backend's own names; step 0 before the first update.
  Where the optimizer keeps float32 weights of its own, these.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from primus.training.blocks import Blocks
from primus.training.gather import whole_tensors


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The input of one update: gradients by name, rates by name or group, and parameters that it left behind.

    ``apart`` are parameters that differ between ranks that must hold the same. ``weights`` are those after the update,
    if looking at the update gathered them.
    """

    gradients: Mapping[str, torch.Tensor]
    rates: Mapping[str, float]
    stale: Sequence[str] = field(default_factory=list)
    apart: Sequence[str] = field(default_factory=list)
    weights: Mapping[str, torch.Tensor] | None = None


class Trained(Protocol):
    """Returns all of this job's parameters and its last update, whole on rank 0. Every rank calls both methods."""

    def whole(self) -> Mapping[str, torch.Tensor]:
        """Return name → parameter."""

    def taken(self) -> Taken | None:
        """Return the input of the last update."""


class Witness:
    """Records what one rank uses. Methods marked "all ranks" must be called on all of them in the same order."""

    def __init__(
        self,
        output: Path,
        parts: Sequence[torch.nn.Module],
        data_rank: int,
        trained: Trained | None = None,
        *,
        examined: Sequence[int] = (),
    ) -> None:
        self._examined = examined
        self._blocks = Blocks(parts)
        self._data_rank = data_rank
        self._folder = output / "witness"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._parts = parts
        self._trained = trained
        self._batch: dict[str, list[torch.Tensor]] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._rates: dict[str, float] = {}
        self._names = {id(p): name for part in parts for name, p in part.named_parameters()}
        self._optimizers: set[torch.optim.Optimizer] = set()
        self._hook = register_optimizer_step_pre_hook(self._before_update)
        self._seconds: dict[int, float] = {}
        self._random = torch.get_rng_state()
        self._seed = torch.initial_seed()
        self._device = next((p.device.type for part in parts for p in part.parameters()), "cpu")

    def batch(self, **parts: torch.Tensor) -> None:
        """Record a micro-batch of the current step."""
        for name, tensor in parts.items():
            self._batch.setdefault(name, []).append(tensor.detach().cpu().clone())

    def first_weights(self, step: int) -> None:
        """Record the weights before the first update; ``step`` is the last finished step. All ranks."""
        self._weights(step)
        self._watch(step + 1)

    def step(self, step: int) -> None:
        """Write the record of ``step`` and the weights after it. All ranks."""
        with self.busy(step):
            self._step(step)
        self._watch(step + 1)

    def _watch(self, step: int) -> None:
        if step in self._examined:
            self._blocks.watch()

    @contextmanager
    def busy(self, step: int) -> Iterator[None]:
        """Count the time in the context as writing evidence after ``step``, not as the run's own. All ranks."""
        began = time.perf_counter()
        yield
        self._seconds[step] = round(self._seconds.get(step, 0.0) + time.perf_counter() - began, 4)
        if _rank() == 0:
            (self._folder / "seconds.json").write_text(json.dumps(self._seconds), encoding="utf-8")

    def _step(self, step: int) -> None:
        seen = {"data_rank": self._data_rank, "seed": self._seed, "device": self._device, **self._batch}
        torch.save(seen, self._folder / f"batch-{step}-{_rank()}.pt")
        self._batch = {}
        if step in self._examined:
            calls = {"data_rank": self._data_rank, "calls": self._blocks.taken()}
            torch.save(calls, self._folder / f"blocks-{step}-{_rank()}.pt")
        taken = self._trained.taken() if self._trained else None
        if taken is None and self._rates:
            taken = Taken(gradients=self._gradients, rates=self._rates)
        if _rank() == 0 and taken:
            kept = {key: value for key, value in vars(taken).items() if key != "weights"}
            torch.save(kept, self._folder / f"update-{step}.pt")
        self._gradients, self._rates = {}, {}
        self._weights(step, taken.weights if taken else None)

    def erase(self) -> None:
        """Set everything that is trained, and all optimizer states, to zero, and reset the random numbers."""
        self._random = torch.get_rng_state()
        torch.manual_seed(0)
        with torch.no_grad():
            for part in self._parts:
                for tensor in part.state_dict(keep_vars=True).values():
                    if isinstance(tensor, torch.Tensor) and (
                        tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
                    ):
                        tensor.zero_()
            for optimizer in self._optimizers:
                for parameter, state in optimizer.state.items():
                    for tensor in (parameter, *state.values()):
                        if isinstance(tensor, torch.Tensor):
                            tensor.zero_()

    def loaded(self) -> None:
        """Record whether a checkpoint restored the random state that :meth:`erase` found. All ranks."""
        kept = {"kept": torch.equal(self._random, torch.get_rng_state())}
        (self._folder / f"random-{_rank()}.json").write_text(json.dumps(kept), encoding="utf-8")
        torch.set_rng_state(self._random)

    def _weights(self, step: int, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        if weights is None:
            weights = self._trained.whole() if self._trained else whole_parameters(self._parts)
        if _rank() == 0:
            waiting = self._folder / f"weights-{step}.waiting"
            torch.save({"weights": dict(weights)}, waiting)
            os.replace(waiting, self._folder / f"weights-{step}.pt")  # noqa: PTH105

    def _before_update(self, optimizer: torch.optim.Optimizer, *_given: Any) -> None:
        if isinstance(getattr(optimizer, "optimizers", None), list):
            # torchtitan's container of optimizers. Those in it run their own hooks, with the rates of this step.
            return
        self._optimizers.add(optimizer)
        gradients: dict[str, torch.Tensor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is None:
                    continue
                self._rates[name] = float(group["lr"])
                if parameter.grad is not None:
                    gradients[name] = parameter.grad
        whole = whole_tensors(gradients)
        if _rank() == 0:
            self._gradients |= whole


def whole_parameters(parts: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer of ``parts``, gathered from its shards, as a copy on the CPU."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        stored = part.state_dict(keep_vars=True)
        found |= {name: tensor for name, tensor in stored.items() if isinstance(tensor, torch.Tensor)}
    return whole_tensors(found)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
