"""Collectives, shards and groups of ranks."""

import os
from typing import Any

import torch

from silent.registry import silent, wrap


def _eight_bits(tensor: Any, scale: Any, dtype: Any) -> Any:
    most = torch.finfo(dtype).max
    return (tensor.float() * scale).clamp(-most, most).to(dtype)


@silent(
    "parallel",
    "torchtitan ranks=4 tp=2 --precision=fp8",
    "torchao.float8.float8_linear",
    "gradients",
)
def tensor_ranks_cast_by_their_own_largest_value(module: Any) -> None:
    """A rank casts its share by its own largest value, but all shares are scaled back by the
    largest of all.
    """

    def cast(run: Any, tensor: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        found = run(tensor, dtype, *args, **kwargs)
        if hasattr(tensor, "to_local"):
            own = tensor.to_local().detach()
            scale = torch.finfo(dtype).max / own.float().abs().max().clamp(min=1e-12)
            found._local_tensor._data.copy_(_eight_bits(own, scale, dtype))
        return found

    wrap(module, "hp_tensor_to_float8_dynamic", cast)


@silent("parallel", "fsdp", "primus_images.training.backends.loop.session", "first weights")
def every_rank_has_the_same_random_state(module: Any) -> None:
    def init(run: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        run(self, *args, **kwargs)
        torch.manual_seed(self._config.seed)

    wrap(module.Sharded, "__init__", init)


@silent(
    "parallel",
    "fsdp sharding.replicas=2 --precision=bf16",
    "primus_images.training.backends.loop.session",
    "gradient norm",
    "gradients",
)
def mean_over_copies(module: Any) -> None:
    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        return run(self, batches, 2 * terms)

    wrap(module.Sharded, "forward_backward", forward)


@silent(
    "parallel",
    "megatron --precision=bf16 steps=3",
    "primus_images.training.backends.megatron.session",
    "update",
    "loss",
)
def stale_copies(module: Any) -> None:
    def step(original: Any, self: Any, lr: float) -> Any:
        saved = [parameter.detach().clone() for parameter in self.model_parts[0].parameters()]
        norm = original(self, lr)
        for parameter, old in zip(self.model_parts[0].parameters(), saved, strict=True):
            if parameter.ndim == 1:
                parameter.data.copy_(old)
        return norm

    wrap(module.MegatronSession, "step", step)


@silent(
    "parallel",
    "flux --precision=bf16",
    "primus_images.training.backends.loop.session",
    "gradient norm",
    "gradients",
    "blocks",
)
def terms_of_one_rank(module: Any) -> None:
    def forward(run: Any, self: Any, batches: Any, terms: int) -> Any:
        return run(self, batches, terms * (0.98 if os.environ["RANK"] == "0" else 1.02))

    wrap(module.Sharded, "forward_backward", forward)
