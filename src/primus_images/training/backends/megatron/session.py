"""A :class:`primus_images.training.backends.loop.session.Session` that trains with Megatron."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config

from primus_images.recipes.architecture import arguments
from primus_images.recipes.schema import backends
from primus_images.training.backends.loop.config import RankJob
from primus_images.training.backends.loop.session import IGNORED, Batch
from primus_images.training.backends.megatron import cpu
from primus_images.training.backends.megatron.gather import (
    Values,
    different,
    gather,
    gathered,
    gradient,
    held,
)
from primus_images.training.backends.megatron.model import build
from primus_images.training.backends.megatron.render import ARGUMENTS, TABLES
from primus_images.training.judge.witness import Taken
from primus_images.yamlfile import section

# Names of data types in a recipe.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MegatronSession:
    """One rank's part of a GPT model, trained by Megatron's schedules and optimizer."""

    def __init__(self, job: RankJob, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        _start(job, on_cpu=on_cpu)
        self._device = device
        self.data_rank = parallel_state.get_data_parallel_rank()
        self._training = job.training
        self._tied = job.model.tied_embeddings
        self.model_parts: Sequence[torch.nn.Module] = build(job, on_cpu=on_cpu)
        self._ddp = self.model_parts[0].ddp_config
        settings = optimizer_settings(job, self._ddp)
        self._optimizer = get_megatron_optimizer(
            settings,
            self.model_parts,
            get_standard_config_overrides(settings),
            use_gloo_process_groups=False,
        )
        for group in self._optimizer.param_groups:
            # Norms and biases do not decay. Megatron leaves that factor to its scheduler, which is
            # not used here.
            group["weight_decay"] *= group.get("wd_mult", 1.0)
        if not on_cpu:
            _fuse(self._torch_optimizers())
        transformer = get_model_config(self.model_parts[0])
        transformer.finalize_model_grads_func = finalize_model_grads
        if self._ddp.overlap_grad_reduce:
            functions = [part.no_sync for part in self.model_parts]
            transformer.no_sync_func = functions
            if len(functions) == 1:
                transformer.no_sync_func = functions[0]
        self._separate_weights = transformer.bf16
        self.linear_types = _linear_types(transformer)

    def forward_backward(self, batches: Sequence[Batch], terms: int) -> torch.Tensor:
        """Run the micro-batches of one step through Megatron's schedule for this layout.

        It divides the gradients by the number of labels on all data-parallel ranks, which is
        ``terms``.
        """
        for part in self.model_parts:
            part.zero_grad_buffer()
        self._optimizer.zero_grad()
        return self._scheduled(batches, forward_only=False)

    def loss(self, batch: Batch) -> torch.Tensor:
        """See :meth:`primus_images.training.backends.loop.session.Session.loss`."""
        batches = [batch]
        if len(self.model_parts) > 1:
            # An interleaved pipeline takes a multiple of its stages. The others do not count.
            ignored = {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}
            stages = parallel_state.get_pipeline_model_parallel_world_size()
            batches += [ignored] * (stages - 1)
        self._gather_weights()
        for part in self.model_parts:
            part.eval()
        # With gradients, Megatron would count these tokens in the biases that balance experts.
        with torch.no_grad():
            loss = self._scheduled(batches, forward_only=True)
        for part in self.model_parts:
            part.train()
        return loss

    def _scheduled(self, batches: Sequence[Batch], *, forward_only: bool) -> torch.Tensor:
        """Run ``batches`` through Megatron's schedule, and return the sum of their losses."""
        sums = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=[iter(batches) for _ in self.model_parts],
            model=self.model_parts,
            num_microbatches=len(batches),
            seq_length=self._training.seq_len,
            micro_batch_size=self._training.micro_batch_size,
            forward_only=forward_only,
        )
        if sums:
            return torch.stack(sums).sum()
        return torch.zeros((), device=self._device)

    def _forward(
        self, batches: Iterator[Batch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]:
        """Run the next micro-batch through ``model``. Return the output and a function of it."""
        batch = next(batches)
        tokens = batch["input_ids"].to(self._device, non_blocking=True)
        labels = batch["labels"].to(self._device, non_blocking=True)
        places = torch.arange(labels.size(1), device=self._device).expand_as(labels)
        output = model(tokens, places, None, labels=labels.clamp(min=0))
        return output, partial(_loss, labels)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """Return on all ranks the sum of ``value`` over those of the last pipeline stage."""
        value = value.clone()
        dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
        dist.broadcast(
            value,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        return value

    def step(self, lr: float) -> float:
        """Clip and update. Returns the gradient norm over the whole model."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        _, norm, _ = self._optimizer.step()
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, router biases and optimizer states, in place.

        They only fit the layout that saved them.
        """
        self._gather_weights()
        dense, expert, sharded = self._places()
        state: dict[str, Any] = {}
        for number, part in enumerate(self.model_parts):
            for name, weight in (*part.named_parameters(), *part.named_buffers()):
                place = expert
                if getattr(weight, "allreduce", True):
                    place = dense
                state[f"model.{place}.{number}.{name}"] = weight.detach()
        for number, inner in enumerate(self._torch_optimizers()):
            for key, value in _states(inner, weights=self._separate_weights):
                state[f"optimizer.{sharded}.{number}.{key}"] = value
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the step counts that are not tensors. The tensors were loaded in place."""
        _, _, sharded = self._places()
        for number, inner in enumerate(self._torch_optimizers()):
            for position, group in enumerate(inner.param_groups):
                if "step" in group:
                    key = f"optimizer.{sharded}.{number}.{position}.step"
                    group["step"] = type(group["step"])(state[key])

    def whole(self) -> dict[str, torch.Tensor]:
        """See :meth:`primus_images.training.backends.loop.session.Session.whole`.

        In bfloat16, these are the optimizer's float32 weights.
        """
        tensors, _ = gather(self.model_parts, self._held(), tied=self._tied)
        return tensors

    def taken(self) -> Taken:
        """See :meth:`primus_images.training.backends.loop.session.Session.taken`."""
        self._gather_weights()
        masters = self._held()
        weights, weights_apart = gather(self.model_parts, masters, tied=self._tied)
        gradients, gradients_apart = gather(self.model_parts, self._held(gradient), tied=self._tied)
        stale: set[str] = set()
        for names in gathered(different(self.model_parts, masters, tied=self._tied)):
            stale |= names
        rates = {}
        for number, inner in enumerate(self._torch_optimizers()):
            for place, group in enumerate(inner.param_groups):
                rates[f"{number}.{place}"] = float(group["lr"])
        return Taken(
            gradients=gradients,
            rates=rates,
            stale=sorted(stale),
            apart=sorted(weights_apart | gradients_apart),
            weights=weights,
        )

    def _gather_weights(self) -> None:
        if self._ddp.overlap_param_gather:
            for part in self.model_parts:
                # The next forward would gather the weights that the other ranks updated.
                part.start_param_sync(force_sync=True)

    def _held(self, *of: Callable[[torch.Tensor], torch.Tensor]) -> Values:
        parameters: list[torch.nn.Parameter] = []
        for part in self.model_parts:
            parameters.extend(part.parameters())
        return held(self._optimizers, parameters, *of)

    def _places(self) -> tuple[str, str, str]:
        """Return the names of this rank's place: for dense and experts' weights, and optimizers."""
        stage = parallel_state.get_pipeline_model_parallel_rank()
        dense = f"tp{parallel_state.get_tensor_model_parallel_rank()}.pp{stage}"
        expert = f"{dense}.ep{parallel_state.get_expert_model_parallel_rank()}"
        if self._ddp.use_distributed_optimizer:
            return dense, expert, f"rank{dist.get_rank()}"
        return dense, expert, expert

    @property
    def _optimizers(self) -> list[Any]:
        """Megatron's optimizers: one for each kind of weights."""
        return getattr(self._optimizer, "chained_optimizers", [self._optimizer])

    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return PyTorch's optimizer in each of Megatron's. One for no weights has none."""
        wrappers = self._optimizers
        return [wrapper.optimizer for wrapper in wrappers if wrapper.optimizer is not None]


def _start(job: RankJob, *, on_cpu: bool) -> None:
    """Create Megatron's groups of ranks, and prepare this rank."""
    degrees = {
        name: value
        for name, value in section(job.config, "model").items()
        if name in TABLES["degrees"]
    }
    parallel_state.initialize_model_parallel(**degrees, create_gloo_process_groups=False)
    if on_cpu:
        cpu.patch_megatron()
    else:
        model_parallel_cuda_manual_seed(job.training.seed)
    if job.training.deterministic:
        # Transformer Engine's attention refuses to run beside Megatron's deterministic mode
        # without this variable.
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"


def optimizer_settings(job: RankJob, ddp: Any) -> OptimizerConfig:
    """Return Megatron's configuration of the job's optimizer. ``ddp`` is that of the gradients."""
    values = {
        **arguments(job.training, ARGUMENTS, "optimizer"),
        "optimizer": "adam",
        "bf16": job.training.dtype == "bfloat16",
        "use_distributed_optimizer": ddp.use_distributed_optimizer,
        "params_dtype": getattr(torch, job.training.dtype),
        "overlap_param_gather": ddp.overlap_param_gather,
        **section(job.config, "optimizer"),
    }
    for name in backends()["megatron"].dtypes:
        field = name.removeprefix("optimizer.")
        if field in values:
            values[field] = _DTYPES[values[field]]
    return OptimizerConfig(**values)


def _fuse(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.AdamW):
            for group in optimizer.param_groups:
                # The default implementation needs memory for another copy of all states.
                group |= {"fused": True, "foreach": False}


def _linear_types(transformer: Any) -> tuple[type[torch.nn.Module], ...]:
    if transformer.transformer_impl == "local":
        return (ColumnParallelLinear, RowParallelLinear)
    from megatron.core.extensions import transformer_engine as te

    return (te.TELinear, te.TELayerNormColumnParallelLinear)


def _loss(
    labels: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of trained labels, their number, and the sum to report."""
    trained = labels >= 0
    total = (losses.float() * trained).sum()
    return total, trained.sum(dtype=torch.int32), total.detach()


def _states(
    optimizer: torch.optim.Optimizer, *, weights: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the optimizer's tensors, also those that its first step would create."""
    for position, group in enumerate(optimizer.param_groups):
        if not isinstance(optimizer, torch.optim.AdamW):
            # Transformer Engine's optimizer has one step count per group, starting with its first
            # step.
            yield f"{position}.step", torch.as_tensor(group.setdefault("step", 0))
        for place, parameter in enumerate(group["params"]):
            state = optimizer.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            if isinstance(optimizer, torch.optim.AdamW) and "step" not in state:
                device = parameter.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for key, tensor in state.items():
                yield f"{position}.{place}.{key}", tensor
            if weights:
                yield f"{position}.{place}.weight", parameter.detach()
