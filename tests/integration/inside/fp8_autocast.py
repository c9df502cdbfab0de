"""Autocast decides the type of what FP8 layers return and keep: torchtitan uses it on one rank.

In float32, Llama 3.1 8B kept 17 GiB more than without the layers.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear as plain, silu

from primus_images.turbo import fp8

cast = [
    SimpleNamespace(target_dtype=kind)
    for kind in (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
]
product = SimpleNamespace(use_fast_accum=False)
CONFIG = SimpleNamespace(
    cast_config_input=cast[0],
    cast_config_weight=cast[1],
    cast_config_grad_output=cast[2],
    gemm_config_output=product,
    gemm_config_grad_input=product,
    gemm_config_grad_weight=product,
)
torch.manual_seed(0)
x = torch.randn(2, 32, 64)
gate, up, down = torch.randn(96, 64) / 8, torch.randn(96, 64) / 8, torch.randn(64, 96) / 10
LAYERS = {
    "linear": (lambda x: fp8.linear(x, gate, CONFIG), lambda x: plain(x, gate)),
    "feed_forward": (
        lambda x: fp8.feed_forward(x, gate, up, down, CONFIG),
        lambda x: plain(silu(plain(x, gate)) * plain(x, up), down),
    ),
}


def kept_by(
    layer: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor
) -> tuple[torch.Tensor, set[torch.dtype]]:
    """What ``layer`` makes of ``given`` under autocast, and the types of what it keeps but for
    weights and scales.
    """
    kept: set[torch.dtype] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if (
            tensor.numel() > 1
            and tensor.shape[0] == given.shape[0] * given.shape[1]
            and tensor is not down
        ):
            kept.add(tensor.dtype)
        return tensor

    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        return layer(given), kept


for name, (layer, same) in LAYERS.items():
    given = x.clone().requires_grad_()
    made, kept = kept_by(layer, given)
    made.sum().backward()
    assert given.grad is not None
    wanted = same(x)
    assert made.dtype is torch.bfloat16, name
    assert given.grad.dtype is torch.float32, name
    assert torch.float32 not in kept, (name, kept)
    assert (made.float() - wanted).norm() < 0.1 * wanted.norm(), name
