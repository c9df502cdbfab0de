"""The inputs and results of updates by Megatron's optimizers: gradients and weights, gathered per parameter.

A distributed optimizer gives each data-parallel rank a range of each parameter. For bfloat16 parameters, every
optimizer has its own float32 weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


class Updates:
    """Looks up parameters in ``optimizers``, Megatron's. All ranks must call its methods in the same order."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        # Parameter → the tensor that the inner optimizer updates for it, and its range in the parameter.
        self._own: dict[torch.nn.Parameter, tuple[torch.Tensor, Any]] = {}
        self._sharded = False
        for optimizer in optimizers:
            places = getattr(optimizer, "model_param_group_index_map", None)
            self._sharded |= places is not None
            for parameter, (group, place) in (places or {}).items():
                updated = optimizer.optimizer.param_groups[group]["params"][place]
                self._own[parameter] = updated, optimizer._get_model_param_range_map(parameter)["param"]

    def weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the weights that the optimizer keeps for ``parameter``."""
        return self._whole(parameter, lambda updated: updated)

    def gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the gradient of ``parameter`` in the last update, after clipping; NaN for elements without one."""
        return self._whole(parameter, _gradient)

    def _whole(self, parameter: torch.nn.Parameter, of: Any) -> torch.Tensor:
        if not self._sharded:
            found: torch.Tensor = of(getattr(parameter, "main_param", parameter))
            return found.detach()
        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if parameter in self._own:
            updated, where = self._own[parameter]
            flat[where.start : where.end] = of(updated).detach().float()
        dense = getattr(parameter, "allreduce", True)
        group = (
            parallel_state.get_data_parallel_group(with_context_parallel=True)
            if dense
            else parallel_state.get_expert_data_parallel_group()
        )
        dist.all_reduce(flat, group=group)
        return flat.view_as(parameter)


def _gradient(updated: torch.Tensor) -> torch.Tensor:
    return torch.full_like(updated, torch.nan) if updated.grad is None else updated.grad
