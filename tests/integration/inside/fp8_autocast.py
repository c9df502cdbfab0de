"""Print the types of what FP8 layers return and keep under autocast, and how far they are from PyTorch's layers."""

import json
from types import SimpleNamespace

import torch
from torch.nn.functional import linear as plain
from torch.nn.functional import silu

from primus.turbo import fp8

cast = [SimpleNamespace(target_dtype=kind) for kind in (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)]
product = SimpleNamespace(use_fast_accum=False)
CONFIG = SimpleNamespace(
    cast_config_input=cast[0], cast_config_weight=cast[1], cast_config_grad_output=cast[2],
    gemm_config_output=product, gemm_config_grad_input=product, gemm_config_grad_weight=product,
)  # fmt: skip
torch.manual_seed(0)
x = torch.randn(2, 32, 64)
gate, up, down = torch.randn(96, 64) / 8, torch.randn(96, 64) / 8, torch.randn(64, 96) / 10
LAYERS = {
    "linear": (lambda x: fp8.linear(x, gate, CONFIG), lambda x: plain(x, gate)),
    "projections": (lambda x: fp8.projections(x, [gate, up], CONFIG)[1], lambda x: plain(x, up)),
    "feed_forward": (
        lambda x: fp8.feed_forward(x, gate, up, down, CONFIG),
        lambda x: plain(silu(plain(x, gate)) * plain(x, up), down),
    ),
}
found = {}
for name, (layer, same) in LAYERS.items():
    kept: set[str] = set()
    given = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(
        # Weights and scales stay as they are.
        lambda t: (kept.add(str(t.dtype)) if t.numel() > 1 and t.shape[0] == 64 and t is not down else None, t)[1],
        lambda t: t,
    ):
        made = layer(given)
    made.sum().backward()
    assert given.grad is not None
    wanted = same(x)
    found[name] = {
        "returned": str(made.dtype), "kept": sorted(kept), "gradient": str(given.grad.dtype),
        "off": float((made.float() - wanted).norm() / wanted.norm()),
    }  # fmt: skip
print(json.dumps(found))
