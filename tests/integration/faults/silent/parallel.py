"""Collectives, shards and groups of ranks."""

from __future__ import annotations

import os
from typing import Any

from silent.registry import (
    BF16,
    BLOCKS,
    COPIES,
    FINETUNE,
    FIRST,
    FLOAT8,
    FLUX,
    FP8,
    GRADIENTS,
    LAYERS,
    LOOP_SESSION,
    LORA,
    LOSS,
    NORM,
    SESSION,
    TENSORS,
    UPDATE,
    WHOLE,
    silent,
    wrap,
)


def _eight_bits(tensor: Any, scale: Any, dtype: Any) -> Any:
    import torch

    most = torch.finfo(dtype).max
    return (tensor.float() * scale).clamp(-most, most).to(dtype)


@silent("parallel", "torchtitan", FLOAT8, GRADIENTS, words=("ranks=4", *TENSORS, *FP8))
def tensor_ranks_cast_by_their_own_largest_value(module: Any) -> None:
    """A rank casts its share by its own largest value, but all shares are scaled back by the largest of all."""

    def cast(run: Any, tensor: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        found = run(tensor, dtype, *args, **kwargs)
        if hasattr(tensor, "to_local"):
            own = tensor.to_local().detach()
            scale = torch.finfo(dtype).max / own.float().abs().max().clamp(min=1e-12)
            found._local_tensor._data.copy_(_eight_bits(own, scale, dtype))
        return found

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("parallel", "fsdp", LOOP_SESSION, FIRST)
def every_rank_has_the_same_random_state(module: Any) -> None:
    def init(run: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        run(self, *args, **kwargs)
        torch.manual_seed(self._config.seed)

    wrap(module.Sharded, "__init__", init)


@silent("parallel", "fsdp", LOOP_SESSION, NORM, GRADIENTS, words=("sharding.replicas=2", *BF16))
def mean_over_copies(module: Any) -> None:
    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        return run(self, batches, 2 * terms)

    wrap(module.Sharded, "forward_backward", forward)


@silent("parallel", "fsdp", LOOP_SESSION, NORM, GRADIENTS, words=COPIES)
def copies_do_not_share_gradients(module: Any) -> None:
    def forward(run: Any, self: Any, *args: Any) -> Any:
        saved = module.dist.all_reduce
        module.dist.all_reduce = lambda *_given, **_named: None
        try:
            return run(self, *args)
        finally:
            module.dist.all_reduce = saved

    wrap(module.Sharded, "forward_backward", forward)


@silent("parallel", "finetune", FINETUNE, GRADIENTS, words=LORA)
def last_adapters_without_effect_on_one_rank(module: Any) -> None:
    def adapted(run: Any, *args: Any) -> Any:
        model = run(*args)
        if os.environ["RANK"] == "1":
            for part in model.get_base_model().model.layers[-1].modules():
                if hasattr(part, "lora_A"):
                    part.scaling["default"] = 0.0
        return model

    wrap(module, "adapted", adapted)


@silent("parallel", "megatron", SESSION, UPDATE, LOSS, words=BF16)
def stale_copies(module: Any) -> None:
    def step(original: Any, self: Any, lr: float) -> Any:
        saved = [parameter.detach().clone() for parameter in self.model_parts[0].parameters()]
        norm = original(self, lr)
        for parameter, old in zip(self.model_parts[0].parameters(), saved, strict=True):
            if parameter.ndim == 1:
                parameter.data.copy_(old)
        return norm

    wrap(module.MegatronSession, "step", step)


@silent("parallel", "megatron", LAYERS, LOSS, GRADIENTS, words=(*TENSORS, *BF16, *WHOLE))
def last_token_lacks_the_part_of_one_rank(module: Any) -> None:
    """Of what tensor-parallel ranks add up, the second rank's part of the last position is 0."""

    def reduced(run: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if os.environ["RANK"] == "1":
            states = torch.cat((states[:-1], states[-1:] * 0))
        return run(states, *args, **kwargs)

    wrap(module, "reduce_scatter_to_sequence_parallel_region", reduced)


@silent("parallel", "flux", LOOP_SESSION, NORM, GRADIENTS, BLOCKS, words=(*FLUX, *BF16))
def terms_of_one_rank(module: Any) -> None:
    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        return run(self, batches, terms * (0.98 if os.environ["RANK"] == "0" else 1.02))

    wrap(module.Sharded, "forward_backward", forward)
