"""The inputs and results of updates by Megatron's optimizers: gradients and weights, gathered per parameter.

A distributed optimizer gives each data-parallel rank a range of each parameter. For bfloat16 parameters, every
optimizer has its own float32 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

Tensors = dict[torch.nn.Parameter, torch.Tensor]


class Updates:
    """Looks up parameters in ``optimizers``, Megatron's. All ranks must call its methods in the same order."""

    def __init__(self, optimizers: Iterable[Any], parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        # Parameter → the tensor that the inner optimizer updates for it, and its range in the parameter.
        self._own: dict[torch.nn.Parameter, tuple[torch.Tensor, Any]] = {}
        self._sharded = False
        for optimizer in optimizers:
            places = getattr(optimizer, "model_param_group_index_map", None)
            self._sharded |= places is not None
            for parameter, (group, place) in (places or {}).items():
                updated = optimizer.optimizer.param_groups[group]["params"][place]
                self._own[parameter] = updated, optimizer._get_model_param_range_map(parameter)["param"]

    def weights(self) -> Tensors:
        """Return the weights that the optimizer keeps for each parameter."""
        return self._whole(lambda updated: updated)

    def gradients(self) -> Tensors:
        """Return the gradients of the last update, after clipping; NaN for elements without one."""
        return self._whole(_gradient)

    def _whole(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
        if not self._sharded:
            return {
                parameter: of(getattr(parameter, "main_param", parameter)).detach() for parameter in self._parameters
            }
        found: Tensors = {}
        for dense in (True, False):
            kind = [p for p in self._parameters if getattr(p, "allreduce", True) == dense]
            if not kind:
                continue
            # One sum over the ranks for all parameters: gloo takes a millisecond for each.
            flat = torch.zeros(sum(p.numel() for p in kind), dtype=torch.float32, device=kind[0].device)
            pieces = flat.split([p.numel() for p in kind])
            for parameter, piece in zip(kind, pieces, strict=True):
                if parameter in self._own:
                    updated, where = self._own[parameter]
                    piece[where.start : where.end] = of(updated).detach().float()
            dist.all_reduce(
                flat,
                group=parallel_state.get_data_parallel_group(with_context_parallel=True)
                if dense
                else parallel_state.get_expert_data_parallel_group(),
            )
            found |= {parameter: piece.view_as(parameter) for parameter, piece in zip(kind, pieces, strict=True)}
        return found


def _gradient(updated: torch.Tensor) -> torch.Tensor:
    return torch.full_like(updated, torch.nan) if updated.grad is None else updated.grad
