"""Sharding weights, gradients and optimizer states over the data-parallel ranks with torch's FSDP2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, torch_fully_sharded_data_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


class ShardedParallel(torch_fully_sharded_data_parallel.TorchFullyShardedDataParallel):  # type: ignore[misc,unused-ignore]
    """Megatron's wrapper of FSDP2, with gradients that are sums over tokens, as in its own buffers."""

    def __init__(self, config: TransformerConfig, ddp: DistributedDataParallelConfig, part: Any) -> None:
        # Megatron's wrapper omits this: gradients of bfloat16 weights would be summed over the ranks in bfloat16.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if ddp.grad_reduce_in_fp32 else None)
        torch_fully_sharded_data_parallel.fully_shard = partial(fully_shard, mp_policy=policy)
        super().__init__(config, ddp, part)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                # FSDP2 averages over ranks, but the loss here is a sum whose divisor is known only later.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Do nothing: FSDP2 reduces gradients during the backward pass. Megatron's wrapper lacks the argument."""

    def scale_gradients(self, scaling_factor: Any) -> None:
        """Divide by the labels of the step. Megatron calls this method, and its wrapper does nothing."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scaling_factor)
