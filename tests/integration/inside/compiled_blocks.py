"""Blocks that are recomputed are compiled once, and PyTorch can keep what it traces of them for
later runs. Compiled blocks of fine-tuning keep fewer activations.
"""

import os
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.compile_fx
from torch import nn
from torch._functorch._aot_autograd import autograd_cache
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from primus_images.training.backends import gloo
from primus_images.training.backends.loop import process
from primus_images.training.backends.loop.config import ShardingConfig
from primus_images.training.backends.loop.session import shard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return functional.scaled_dot_product_attention(*[self.wide(x)] * 3, is_causal=True) + x


def compiled(recompute: str) -> list[list[str]]:
    """Train three blocks for one step; return the calls of each graph that was compiled."""
    graphs = []

    def compile_fx(
        graph: torch.fx.GraphModule, _inputs: object, **_: object
    ) -> torch.fx.GraphModule:
        # Instead of PyTorch's, which needs a C++ compiler. PyTorch itself says whether it would
        # keep the graph.
        autograd_cache.check_cacheable(graph)
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    torch._dynamo.reset()
    training = SimpleNamespace(
        master_dtype="float32", dtype="float32", fp8="", recompute=recompute, compile=True
    )
    given = SimpleNamespace(turbo=(), training=training, section=lambda *_: ShardingConfig())
    blocks = [Block() for _ in range(3)]
    model = nn.Sequential(*blocks)
    shard(model, blocks, given, torch.device("cpu"))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    with mock.patch.object(torch._inductor.compile_fx, "compile_fx", compile_fx):
        model(torch.ones(2, 4, 8, 16, requires_grad=True)).sum().backward()
    return graphs


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.up(self.norm(x)))) + x


def kept_shapes() -> list[tuple[int, ...]]:
    """The activations that a compiled block keeps for its backward pass."""
    torch._dynamo.reset()
    block = FeedForward()
    weights = {parameter.data_ptr() for parameter in block.parameters()}
    shapes = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights and tensor.numel() >= 8 * 16:
            shapes.append(tuple(tensor.shape))
        return tensor

    # The partitioner of torch.compile, without the C++ compiler that its kernels need.
    block.compile(backend="aot_eager_decomp_partition")
    x = torch.ones(8, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x).sum().backward()
    return sorted(shapes)


os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
for recompute in ("none", "full"):
    (calls,) = compiled(recompute)  # One for all three blocks.
    assert ("tag_activation_checkpoint" in calls) == (recompute != "none"), recompute
assert kept_shapes() == [(8, 16), (8, 16), (8, 64), (8, 64)]
process.keep_fewer_activations()
assert kept_shapes() == [(8, 16), (8, 64)]
gloo.leave()
