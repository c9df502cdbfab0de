"""What the loop asks of a backend: a model in training (:class:`Session`) and :class:`Data`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from primus_images.training.backends.loop import weights
from primus_images.training.backends.loop.config import RankJob, ShardingConfig
from primus_images.training.backends.loop.process import keep_graphs
from primus_images.training.judge.witness import Taken, whole_parameters
from primus_images.training.run.fingerprint import of_samples
from primus_images.turbo.optimizations import CALLS

# The label of a token that is not trained.
IGNORED = -100

# One micro-batch: tensors whose first dimension is the sample. For language models: ``input_ids``
# and ``labels``, both int64 [samples, seq_len]. Labels are already shifted, and may be IGNORED.
# Packed samples have ``positions``, too, which begin again at 0 with each document; a document sees
# only itself. With an optimization of packed attention, they also have ``ends``, int32 [samples,
# documents]: where each document ends in its sample. A model that computes the loss of trained
# tokens alone gets ``rows``, too, int64 [trained tokens]: their places among all tokens.
Batch = Mapping[str, Tensor]


class Data(Protocol):
    """Samples accessed by number."""

    def batch(self, first: int, count: int) -> Batch:
        """Return samples ``first`` … ``first + count − 1`` on the CPU.

        The data repeats, so any number is valid.
        """


def terms_of(batch: Batch) -> int:
    """Return the number of terms in the loss of ``batch``: trained labels, or images."""
    if "labels" in batch:
        return int((batch["labels"] != IGNORED).sum())
    return len(batch["latents"])


def samples_of(batch: Batch) -> int:
    """Return the sum of the numbers of the samples of ``batch``; 0 for images."""
    if "labels" in batch:
        return of_samples(batch["input_ids"], batch["labels"])
    return 0


def trained_rows(labels: Tensor) -> Tensor | None:
    """Return the places of the trained ``labels`` among all of them; None if it is all or none."""
    rows = (labels.flatten() != IGNORED).nonzero().flatten()
    if len(rows) in (0, labels.numel()):
        return None
    return rows


def length_of(batch: Batch) -> int:
    """Return the tokens of each sample of ``batch``: of its text, and of its image."""
    length = 0
    for name in ("input_ids", "latents", "text"):
        if name in batch:
            length += batch[name].shape[1]
    return length


class Session(Protocol):
    """One rank's part of a model in training. All ranks must call the methods in the same order.

    ``model_parts`` are the modules of this rank (several with interleaved pipelines), for facts and
    digests. ``linear_types`` are the classes that count as linear layers when dtypes are recorded:
    see ``facts.watching``. ``data_rank`` is the number of this rank's share of the global batch,
    from 0 to the job's ``data_parallel`` − 1.
    """

    model_parts: Sequence[torch.nn.Module]
    linear_types: tuple[type, ...]
    data_rank: int

    def forward_backward(self, batches: Sequence[Batch], terms: int) -> Tensor:
        """Add up the gradients of micro-batches on the CPU, and return the sum of their losses.

        The gradient is that of (sum of all losses over all data-parallel ranks) ÷ ``terms``. The
        returned sum is this rank's, undivided and detached; 0 if this rank computes none.
        """

    def loss(self, batch: Batch) -> Tensor:
        """Return the sum of the losses of a micro-batch on the CPU, without training on it.

        It is 0 if this rank computes none.
        """

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of ``value`` over the data-parallel ranks, on every rank of the job."""

    def step(self, lr: float) -> float:
        """Clip the gradients, update the weights, and reset the gradients.

        Returns the global norm of the gradients before clipping. It waits until the gradients are
        computed, but not for the update.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return model and optimizer for :mod:`torch.distributed.checkpoint`, which loads into
        these tensors in place.

        Different tensors on different ranks must have different names, unless they are DTensors.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Use the state that was loaded into the tensors of :meth:`state_dict`."""

    def whole(self) -> Mapping[str, Tensor]:
        """Return on rank 0 all parameters of the job, whole and on the CPU.

        Their names are those in a run on one rank.
        """
        return whole_parameters(self.model_parts)

    def taken(self) -> Taken | None:
        """Return the last update; None if torch's optimizers update the parameters themselves."""
        return None


class LanguageModel(nn.Module):
    """A transformer and its output layer, of which ``forward`` is the loss.

    Logits are computed for ``chunk`` tokens at a time, and again for the backward pass: they would
    be the largest tensor of a small model with a large vocabulary.
    """

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self._chunk = chunk
        self._summed = _summed
        self._fused: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def choose_loss(self, job: RankJob) -> None:
        """Compile logits and loss, or compute their gradients at once, as the job says."""
        if job.training.compile:
            self._summed = torch.compile(_summed)
        if "linear-cross-entropy" in job.turbo:
            from primus_images.turbo.kernels import linear_cross_entropy

            self._fused = linear_cross_entropy

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden states [samples, seq_len, hidden], and an additional loss.

        The additional loss is per label. It is None if the model has none. ``positions`` and
        ``ends`` are those of :data:`Batch`.
        """
        raise NotImplementedError

    @property
    def head(self) -> nn.Linear:
        """The output layer."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        ends: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the cross entropies of all labels, or of those of ``rows``."""
        hidden, besides = self.hidden(input_ids, positions, labels, ends)
        states = hidden.flatten(0, 1)
        targets = labels.flatten()
        if rows is not None:
            states = states.index_select(0, rows)
            targets = targets.index_select(0, rows)
        total = self._loss(states, targets)
        if besides is None:
            return total
        # The additional loss is trained but not reported: it adds a gradient, but not to the value.
        return total + (besides - besides.detach()) * (targets != IGNORED).sum()

    def _loss(self, states: Tensor, targets: Tensor) -> Tensor:
        if self._fused:
            return self._fused(states, self.head.weight, targets)
        if len(states) <= self._chunk:
            return self._summed(self.head, states, targets)
        chunks = zip(states.split(self._chunk), targets.split(self._chunk), strict=True)
        sums = [
            checkpoint(self._summed, self.head, some_states, some_targets, use_reentrant=False)
            for some_states, some_targets in chunks
        ]
        return torch.stack(sums).sum()


def _summed(head: nn.Linear, states: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(
        head(states).float(), labels, ignore_index=IGNORED, reduction="sum"
    )


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    job: RankJob,
    device: torch.device,
    *,
    wide: Callable[[str], bool] = lambda _name: False,
) -> None:
    """Set up recomputation, compilation and sharding of ``model``, and allocate it.

    The model is built inside :func:`weights.empty`. Each of ``blocks`` is recomputed, compiled and
    gathered separately. Linear layers for which ``wide`` is true keep ``training.dtype`` in FP8.
    With the optimization frozen-weights, every rank has all weights that are not trained, in
    ``training.dtype``.
    """
    config = job.training
    sharding = job.section(ShardingConfig, "sharding")
    whole = _kept_whole(model, job)
    for parameter in model.parameters():
        dtype = config.dtype if parameter in whole else config.master_dtype
        parameter.data = parameter.data.to(getattr(torch, dtype))
    if config.fp8 == "tensorwise":
        _convert_to_fp8(model, device, wide)
    if "reduce-scatter-copy-in" in job.turbo:
        from primus_images.turbo.sharded import lay_out_gradients

        lay_out_gradients()
    if config.compile:
        keep_graphs()
    distribute = partial(
        fully_shard,
        mesh=_mesh(sharding, device),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.dtype),
            reduce_dtype=getattr(torch, sharding.reduce_dtype),
        ),
        ignored_params=whole,
    )
    for block in blocks:
        if config.recompute == "full":
            block.forward = _recomputed(block.forward)
        if config.compile:
            block.compile()
        distribute(block, reshard_after_forward=sharding.reshard_after_forward)
    distribute(model)
    sum_gradients(model)
    if "peer-copies" in job.turbo:
        from primus_images.turbo.sharded import attach

        attach([model], kept=not sharding.reshard_after_forward)
    weights.materialize(model, device)


def _kept_whole(model: nn.Module, job: RankJob) -> set[nn.Parameter]:
    """Return the parameters that are not sharded."""
    if "frozen-weights" not in job.turbo:
        return set()
    CALLS["frozen_weights"] += 1
    return {parameter for parameter in model.parameters() if not parameter.requires_grad}


def _convert_to_fp8(model: nn.Module, device: torch.device, wide: Callable[[str], bool]) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # CPUs do not support FP8. There, numbers are rounded to FP8 and multiplied in float32.
    scaling = Float8LinearConfig(emulate=device.type == "cpu")
    convert_to_float8_training(
        model, module_filter_fn=lambda _module, name: not wide(name), config=scaling
    )


def _mesh(sharding: ShardingConfig, device: torch.device) -> DeviceMesh:
    ranks = dist.get_world_size()
    if sharding.replicas == 1:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    shape = (sharding.replicas, ranks // sharding.replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def sum_gradients(model: nn.Module) -> None:
    """Let FSDP2 sum gradients over ranks: losses are divided by the terms of all ranks already."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_force_sum_reduction_for_comms(True)
        if dist.get_world_size() == 1:
            module.set_custom_reduce_scatter(_SumOfOneRank())
        else:
            module.set_gradient_divide_factor(1.0)


class _SumOfOneRank(ReduceScatter):
    """The reduce-scatter of one rank, whose output is its input: FSDP2 would copy the gradients."""

    def __init__(self) -> None:
        self._input: Tensor | None = None

    @override
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return new memory for the input, and then the same for the output."""
        if self._input is None:
            self._input = torch.empty(*size, dtype=dtype, device=device)
            return self._input
        output = self._input
        self._input = None
        return output

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Do nothing: the output is the input."""


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    # A function, not functools.partial: torch.compile leaves a block whose forward is no function
    # uncompiled, silently.
    def again(*inputs: Any, **named: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **named)

    return again


class Sharded(Session):
    """A model sharded by :func:`shard`, with initialized weights. Every rank trains on different
    data.

    ``loss`` of the model and a micro-batch on its device is the sum of the losses.
    """

    linear_types = (nn.Linear,)

    def __init__(
        self,
        model: nn.Module,
        job: RankJob,
        device: torch.device,
        loss: Callable[[nn.Module, Batch], Tensor] = lambda model, batch: model(**batch),
    ) -> None:
        self._model = model.train()
        self.model_parts = [self._model]
        self._summed = loss
        self._config = job.training
        # Other losses would be compiled again for each number of rows.
        self._by_rows = "linear-cross-entropy" in job.turbo
        self._device = device
        self.data_rank = dist.get_rank()
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        implementation = {"fused": True}
        if device.type == "cpu":
            implementation = {"foreach": True}
        self.optimizer = torch.optim.AdamW(
            self._trained,
            lr=self._config.lr,
            betas=(self._config.beta1, self._config.beta2),
            eps=self._config.eps,
            weight_decay=self._config.weight_decay,
            **implementation,
        )
        # Ranks have different seeds, so that dropout differs between them.
        torch.manual_seed(self._config.seed + dist.get_rank())

    @override
    def forward_backward(self, batches: Sequence[Batch], terms: int) -> Tensor:
        total = torch.zeros((), device=self._device)
        for batch in batches:
            loss = self._loss(self._model, batch)
            (loss / terms).backward()
            total += loss.detach()
        return total

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        tensors = dict(batch)
        if self._by_rows:
            rows = trained_rows(batch["labels"])
            if rows is not None:
                tensors["rows"] = rows
        placed = {}
        for name, tensor in tensors.items():
            placed[name] = self._placed(tensor)
        return self._summed(model, placed)

    def _placed(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the device. The CPU does not wait for the GPU."""
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    @override
    @torch.no_grad()
    def loss(self, batch: Batch) -> Tensor:
        self._model.eval()
        loss = self._loss(self._model, batch)
        self._model.train()
        return loss

    @override
    def total(self, value: Tensor) -> Tensor:
        if dist.get_world_size() == 1:
            return value
        value = value.clone()
        dist.all_reduce(value)
        return value

    @override
    def step(self, lr: float) -> float:
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        norm: Any = nn.utils.get_total_norm(gradients, foreach=True)
        exact_norm = norm.full_tensor().to("cpu", non_blocking=True)
        arrived = None
        if self._device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        nn.utils.clip_grads_with_norm_(self._trained, self._config.max_norm, norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # The CPU waits for the norm, and prepares the next step while the GPU updates.
        if arrived:
            arrived.synchronize()
        return float(exact_norm)

    @override
    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self.optimizer, options=_OPTIONS)
        return {"model": model, "optimizer": optimizer}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        # PyTorch also loads the settings, such as weight decay. Those of this run count.
        settings_of_run = settings_of(self.optimizer)
        set_state_dict(
            self._model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_OPTIONS,
        )
        groups = zip(self.optimizer.param_groups, settings_of_run, strict=True)
        for group, settings in groups:
            group.update(settings)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each of the optimizer's groups of parameters."""
    groups = []
    for group in optimizer.param_groups:
        settings = dict(group)
        del settings["params"]
        groups.append(settings)
    return groups


# Frozen weights are not saved; a resumed run reads them from their source again.
_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)
