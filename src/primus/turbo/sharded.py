"""Faster handling of shards by FSDP2 and the optimizer, for every model and every backend that uses both."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from primus.patch import replace
from primus.turbo.kernels import adamw_, copy_in


def lay_out_gradients() -> None:
    """Make FSDP2 copy gradients to the layout of the reduce-scatter with one kernel per gradient, in this process."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    def foreach_reduce_scatter_copy_in(grads: Any, out: torch.Tensor, ranks: int) -> None:
        if not copy_in(grads, out, ranks):
            original(grads, out, ranks)

    takes = "unsharded_grads, reduce_scatter_input, world_size"
    original = replace(collectives, "foreach_reduce_scatter_copy_in", foreach_reduce_scatter_copy_in, takes=takes)


class Step:
    """AdamW's step over all parameters of one optimizer, with the optimizer's own state, so that checkpoints are
    unchanged.

    It replaces ``optimizer.step`` and runs the same hooks, which see clipped gradients as before.
    """

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        self._optimizer, self._count = optimizer, -1
        # Without a gradient norm (when states are created for loading a checkpoint), there is nothing to clip.
        self._clip = torch.ones((), device=optimizer.param_groups[0]["params"][0].device)
        # torch's learning-rate schedulers check for their own attribute.
        self._wrapped_by_lr_sched = True
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def _loaded(self, _: Any) -> None:
        self._count = -1

    def clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """Let the next update scale gradients of this ``norm`` so that it is at most ``max_norm``."""
        self._clip = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()

    def __call__(self, *_args: Any, **_options: Any) -> None:
        """Update all parameters. Arguments of torch's ``step`` are ignored."""
        optimizer, clip = self._optimizer, self._clip
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        with torch.no_grad():
            if before := [*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]:
                # Only hooks read gradients before the kernel scales them. This pass is needed only for them.
                gradients = [p.grad for p in parameters if p.grad is not None]
                torch._foreach_mul_([getattr(g, "_local_tensor", g) for g in gradients], clip)
                clip = torch.ones_like(clip)
            for hook in before:
                hook(optimizer, (), {})
            self._update(clip, torch.zeros(len(parameters), device=clip.device))
        for done in chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
            done(optimizer, (), {})

    def _update(self, clip: torch.Tensor, largest: torch.Tensor) -> None:
        from torch.distributed.tensor import DTensor

        scaled: list[Any] = []
        first = 0
        for group in self._optimizer.param_groups:
            lists: list[list[Any]] = [[], [], [], [], [], []]
            self._optimizer._init_group(group, *lists)
            params, grads, first_moments, second_moments, _unused, steps = lists
            if self._count < 0:
                self._count = int(steps[0].item())
            torch._foreach_add_(steps, 1)
            for index, tensors in enumerate(
                zip(params, grads, first_moments, second_moments, strict=True), start=first
            ):
                shards = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
                eight = hasattr(shards[0], "_precomputed_scale")
                p, g, m, v = (getattr(t, "_tensor", t) for t in shards)
                if eight:
                    scaled.append((shards[0], index))
                adamw_(
                    p, g, m, v, clip=clip, amax=largest[index] if eight else None, lr=float(group["lr"]),
                    decay=group["weight_decay"], betas=group["betas"], eps=group["eps"], step=self._count + 1,
                )  # fmt: skip
            first += len(params)
        self._count += 1
        self._optimizer._opt_called = True
        if scaled:
            _scale(scaled, largest)


def _scale(scaled: list[Any], largest: torch.Tensor) -> None:
    """Compute the scales as in torchao's ``precompute_float8_dynamic_scale_for_fsdp``, with the kernel's maximum."""
    import torch.distributed as dist

    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    tops = largest.double().clamp(min=1e-12)
    scales = (torch.finfo(scaled[0][0]._dtype).max / tops).float()
    for weight, index in scaled:
        weight._precomputed_scale = scales[index]
