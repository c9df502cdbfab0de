"""What a judged run leaves behind for the reference.

These are batches, gradients, learning rates and weights of every step. README.md of the reference
describes the files.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from primus_images.training.run.facts import NAMES

# PyTorch 2.13 renamed this function, and warns about the old name.
if hasattr(dist, "all_gather_single"):
    _all_gather = dist.all_gather_single
else:
    _all_gather = dist.all_gather_into_tensor


# What tensors that are gathered together have in common.
_Kind = tuple[dist.ProcessGroup, torch.dtype]


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, gathered from its shards, as a copy on the CPU. All ranks."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().clone()


def whole_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return each of ``tensors``, gathered from its shards, as a copy on the CPU.

    All ranks, with the same names. Tensors sharded by rows, as in FSDP2, are gathered in one
    collective for each group and dtype: one for each tensor takes several times as long, and
    DTensor's own crashed with gloo in one of a million (PyTorch 2.11 and 2.13).
    """
    wholes: dict[str, torch.Tensor] = {}
    packs: dict[_Kind, dict[str, DTensor]] = {}
    for name, tensor in tensors.items():
        group = _group_of_rows(tensor)
        if group is None:
            wholes[name] = whole_tensor(tensor)
        else:
            kind = (group, tensor.dtype)
            pack = packs.setdefault(kind, {})
            pack[name] = tensor
    for (group, _), pack in packs.items():
        wholes |= _gathered(pack, group)
    return {name: wholes[name] for name in tensors}


def _group_of_rows(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    if not isinstance(tensor, DTensor):
        return None
    sharded = []
    for number, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            sharded.append(number)
    if len(sharded) != 1:
        return None
    (number,) = sharded
    placement = tensor.placements[number]
    # A strided shard, in some versions of PyTorch a subclass of Shard, has another order of rows.
    if type(placement) is not Shard or placement.dim != 0:
        return None
    return tensor.device_mesh.get_group(number)


def _gathered(tensors: Mapping[str, DTensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    ranks = group.size()
    shards = []
    sizes = []
    for tensor in tensors.values():
        # The last ranks may have fewer rows than the others, or none.
        rows = math.ceil(tensor.shape[0] / ranks)
        size = rows * tensor.shape[1:].numel()
        shard = tensor.to_local().detach().flatten()
        lacking = size - len(shard)
        shards.append(pad(shard, (0, lacking)))
        sizes.append(size)
    mine = torch.cat(shards)
    every = mine.new_empty(ranks * len(mine))
    _all_gather(every, mine, group=group)
    by_rank = every.cpu().view(ranks, -1)
    parts = by_rank.split(sizes, 1)
    wholes = {}
    for (name, tensor), part in zip(tensors.items(), parts, strict=True):
        padded = part.reshape(-1, *tensor.shape[1:])
        wholes[name] = padded[: tensor.shape[0]].clone()
    return wholes


_BLOCK = re.compile(NAMES["block"])
_OUTPUT = re.compile(NAMES["output"])
_WRAPPER = re.compile(NAMES["wrapper"])

Tensors = dict[str, torch.Tensor]


class Blocks:
    """Hooks on the blocks and the output layer of ``parts``.

    They are in place between :meth:`watch` and :meth:`taken`.
    """

    def __init__(self, parts: Sequence[torch.nn.Module]) -> None:
        self._modules = dict(_blocks(parts))
        self._hooks: list[Any] = []
        self._recorders: dict[str, _Recorder] = {}

    def watch(self) -> None:
        """Record all calls from now on, except those that repeat one in the backward pass."""
        for name, module in self._modules.items():
            recorder = _Recorder(whole=name != "output")
            self._recorders[name] = recorder
            before = module.register_forward_pre_hook(recorder.before, with_kwargs=True)
            after = module.register_forward_hook(recorder.after)
            self._hooks += [before, after]

    def taken(self) -> dict[str, list[Tensors]]:
        """Return name of a module → its inputs, outputs and their gradients, per call.

        The hooks are removed. Names are ``layers.N``, ``[single_]transformer_blocks.N`` and
        ``output``, whose calls have no inputs.
        """
        while self._hooks:
            self._hooks.pop().remove()
        recorders = self._recorders
        self._recorders = {}
        return {name: recorder.calls for name, recorder in recorders.items()}


def _blocks(parts: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    for part in parts:
        for path, module in part.named_modules():
            name = _WRAPPER.sub("", path)
            _, _, last = path.rpartition(".")
            if path != name and _WRAPPER.search(last):
                # The wrapper around it has been found. It is called once, the module within it
                # twice if it recomputes.
                continue
            match = _BLOCK.search(name)
            if match and match.end() == len(name):
                # Megatron numbers the layers of each pipeline stage from 0, but knows their place
                # in the model.
                by_name = int(match[2]) + 1
                number = getattr(module, "layer_number", by_name) - 1
                yield f"{match[1]}.{number}", module
            elif _OUTPUT.fullmatch(name) and not _BLOCK.search(name):
                yield "output", module


class Masks:
    """Hooks on every dropout of ``parts`` in training: which inputs it keeps."""

    def __init__(self, parts: Sequence[torch.nn.Module]) -> None:
        self._kept: dict[str, list[torch.Tensor]] = {}
        self._again: dict[str, list[torch.Tensor]] = {}
        for part in parts:
            for path, module in part.named_modules():
                if isinstance(module, torch.nn.Dropout) and module.p > 0:
                    name = _WRAPPER.sub("", path)
                    module.register_forward_hook(partial(self._record, name))

    def _record(
        self, name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor], out: torch.Tensor
    ) -> None:
        if not module.training:
            return
        record = self._kept
        if torch._C._current_graph_task_id() != -1:  # a recomputation in the backward pass
            record = self._again
        with torch.no_grad():
            # An input of 0 stays 0, whether it is kept or not.
            kept = (out != 0) | (inputs[0] == 0)
            calls = record.setdefault(name, [])
            calls.append(kept.cpu())

    def taken(self) -> dict[str, dict[str, list[torch.Tensor]]]:
        """Return ``masks`` and those of recomputations, ``again``: name of a module → its calls."""
        masks = {"masks": self._kept, "again": self._again}
        self._kept = {}
        self._again = {}
        return masks


class _Recorder:
    # ``calls`` has one mapping per call: the tensors, and later their gradients. Without ``whole``,
    # these are only outputs, because logits and their gradients are the largest tensors of a small
    # model.
    def __init__(self, *, whole: bool) -> None:
        self.calls: list[Tensors] = []
        self._whole = whole
        # Calls that had no graph. The backward pass repeats them, first come first, and then they
        # get their gradients.
        self._without_graph: list[Tensors] = []
        self._current: Tensors | None = None

    def before(
        self, module: torch.nn.Module, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        if not module.training:  # an evaluation
            self._current = None
            return
        if torch._C._current_graph_task_id() == -1:  # not within a backward pass
            self._current = {}
            self.calls.append(self._current)
            if not torch.is_grad_enabled():
                self._without_graph.append(self._current)
        elif self._without_graph:
            self._current = self._without_graph.pop(0)
        else:
            self._current = None
        if self._whole:
            inputs = dict(named)
            if arguments:
                inputs.setdefault("hidden_states", arguments[0])
            for name in ("hidden_states", "encoder_hidden_states", "temb"):
                self._record(f"in.{name}", inputs.get(name))

    def after(self, _module: torch.nn.Module, _arguments: Sequence[Any], out: Any) -> None:
        parts = out
        if not isinstance(out, tuple):
            parts = (out,)
        for number, part in enumerate(parts):
            self._record(f"out.{number}", part)

    def _record(self, name: str, tensor: Any) -> None:
        call = self._current
        if call is None or not isinstance(tensor, torch.Tensor):
            return
        if not tensor.dim():
            # A head that computes the loss, too, returns one number, and no logits.
            return
        call.setdefault(name, whole_tensor(tensor))
        if self._whole and tensor.requires_grad and torch.is_grad_enabled():
            keep = partial(_keep, call, f"grad.{name}", tensor.shape)
            tensor.register_hook(keep)


def _keep(call: Tensors, name: str, shape: torch.Size, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        # Autograd passes None where a block's result is not used, which stands for zeros.
        call[name] = torch.zeros(shape)
    else:
        call[name] = whole_tensor(gradient)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The input of one update, as ``update-STEP.pt`` has it.

    ``weights`` are those after it, if they are at hand.
    """

    gradients: Mapping[str, torch.Tensor]
    rates: Mapping[str, float]
    stale: Sequence[str] = field(default_factory=list)
    apart: Sequence[str] = field(default_factory=list)
    weights: Mapping[str, torch.Tensor] | None = None


class Source(Protocol):
    """What knows the weights and the last update of a job."""

    def whole(self) -> Mapping[str, torch.Tensor]:
        """Return on rank 0 all parameters of the job, whole and on the CPU. All ranks."""

    def taken(self) -> Taken | None:
        """Return the last update, None if torch's optimizers made it on the parameters."""


class Witness:
    """Records what one rank uses.

    Methods marked "all ranks" must be called on all of them in the same order. Without a
    ``source``, weights and updates are those of ``parts``.
    """

    def __init__(
        self,
        output: Path,
        parts: Sequence[torch.nn.Module],
        data_rank: int,
        *,
        examined: Sequence[int] = (),
        source: Source | None = None,
    ) -> None:
        self._examined = examined
        self._blocks = Blocks(parts)
        self._masks = Masks(parts)
        self._folder = output / "witness"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._parts = parts
        self._source = source
        self._batch: dict[str, list[torch.Tensor]] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._rates: dict[str, float] = {}
        self._names: dict[int, str] = {}
        for part in parts:
            for name, parameter in part.named_parameters():
                self._names[id(parameter)] = name
        self._optimizers: set[torch.optim.Optimizer] = set()
        register_optimizer_step_pre_hook(self._before_update)
        self._seconds: dict[int, float] = {}
        self._clock: dict[int, float] = {}
        self._since = time.perf_counter()
        self._busy = 0.0
        self._random = torch.get_rng_state()
        self._rank = {"data_rank": data_rank, "seed": torch.initial_seed()}

    def batch(self, **parts: torch.Tensor) -> None:
        """Record a micro-batch of the current step."""
        for name, tensor in parts.items():
            copy = tensor.detach().cpu().clone()
            micro_batches = self._batch.setdefault(name, [])
            micro_batches.append(copy)

    def first_weights(self, step: int) -> None:
        """Record the weights before the first update. All ranks.

        ``step`` is the last finished step.
        """
        self._weights(step, self._whole_weights())

    def end_time(self, step: int) -> None:
        """Stop the clock of ``step``: what follows, such as printing it, counts for the next."""
        now = time.perf_counter()
        self._clock[step] = now - self._since - self._busy
        self._since = now
        self._busy = 0.0

    def step(self, step: int) -> None:
        """Write the record of ``step`` and the weights after it. All ranks."""
        if step not in self._clock:
            self.end_time(step)
        with self.busy(step):
            rank = _rank()
            data_rank = self._rank["data_rank"]
            clock = json.dumps(self._clock)
            (self._folder / f"clock-{rank}.json").write_text(clock, encoding="utf-8")
            batch = self._rank | self._batch
            self._save(f"batch-{step}-{rank}.pt", batch)
            self._batch = {}
            masks = self._masks.taken()
            if masks["masks"]:
                self._save(f"dropout-{step}-{rank}.pt", {"data_rank": data_rank, **masks})
            if step in self._examined:
                calls = self._blocks.taken()
                self._save(f"blocks-{step}-{rank}.pt", {"data_rank": data_rank, "calls": calls})
            taken = self._taken()
            weights = None
            if taken:
                weights = taken.weights
                if rank == 0:
                    update = dict(vars(taken))
                    del update["weights"]
                    self._save(f"update-{step}.pt", update)
            if weights is None:
                # Other ranks than the first have no weights at hand, and gathering them is a matter
                # of all.
                weights = self._whole_weights()
            self._weights(step, weights)

    def _save(self, name: str, content: Mapping[str, Any]) -> None:
        torch.save(content, self._folder / name)

    def _taken(self) -> Taken | None:
        """Return the update since the last step; None if there was none."""
        taken = None
        if self._source is not None:
            taken = self._source.taken()
        if taken is None and self._rates:
            taken = Taken(gradients=self._gradients, rates=self._rates)
        self._gradients = {}
        self._rates = {}
        return taken

    @contextmanager
    def busy(self, step: int) -> Iterator[None]:
        """Count the time in the context as writing evidence after ``step``. All ranks."""
        began = time.perf_counter()
        yield
        before = self._seconds.get(step, 0.0)
        self._seconds[step] = before + time.perf_counter() - began
        if _rank() == 0:
            text = json.dumps(self._seconds)
            (self._folder / "seconds.json").write_text(text, encoding="utf-8")
        # Writing the file can take longer than a step. The next context writes that time, too.
        seconds = time.perf_counter() - began
        self._seconds[step] = before + seconds
        self._busy += seconds

    def erase(self) -> None:
        """Set all that is trained, and all optimizer states, to 0; and reset the random numbers."""
        self._random = torch.get_rng_state()
        torch.manual_seed(0)
        with torch.no_grad():
            for tensor in _stored(self._parts).values():
                if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter):
                    tensor.zero_()
            for optimizer in self._optimizers:
                for parameter, state in optimizer.state.items():
                    parameter.zero_()
                    for tensor in state.values():
                        if isinstance(tensor, torch.Tensor):
                            tensor.zero_()

    def loaded(self) -> None:
        """Record whether a checkpoint restored the random state that :meth:`erase` found.

        All ranks.
        """
        kept = torch.equal(self._random, torch.get_rng_state())
        text = json.dumps({"kept": kept})
        file = self._folder / f"random-{_rank()}.json"
        file.write_text(text, encoding="utf-8")
        torch.set_rng_state(self._random)

    def _whole_weights(self) -> Mapping[str, torch.Tensor]:
        if self._source is None:
            return whole_parameters(self._parts)
        return self._source.whole()

    def _weights(self, step: int, weights: Mapping[str, torch.Tensor]) -> None:
        if _rank() == 0:
            waiting = self._folder / f"weights-{step}.waiting"
            torch.save({"weights": dict(weights)}, waiting)
            waiting.replace(self._folder / f"weights-{step}.pt")
        if step + 1 in self._examined:
            self._blocks.watch()

    def _before_update(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        if isinstance(getattr(optimizer, "optimizers", None), list):
            # torchtitan's container of optimizers. Those in it run their own hooks, with the rates
            # of this step.
            return
        self._optimizers.add(optimizer)
        gradients: dict[str, torch.Tensor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name:
                    self._rates[name] = float(group["lr"])
                    if parameter.grad is not None:
                        gradients[name] = parameter.grad
        whole = whole_tensors(gradients)
        if _rank() == 0:
            self._gradients |= whole


def whole_parameters(parts: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer of ``parts``, whole, as a copy on the CPU."""
    return whole_tensors(_stored(parts))


def _stored(parts: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    stored: dict[str, Any] = {}
    for part in parts:
        stored |= part.state_dict(keep_vars=True)
    return {name: value for name, value in stored.items() if isinstance(value, torch.Tensor)}


def _rank() -> int:
    if dist.is_initialized():
        return int(dist.get_rank())
    return 0
