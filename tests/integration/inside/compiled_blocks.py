"""Blocks that are recomputed are compiled once, and PyTorch can keep what it traces of them for later runs."""

import os
import pickle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx
from torch import nn
from torch._functorch._aot_autograd import autograd_cache
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from primus.training import gloo
from primus.training.loop.config import ShardingConfig
from primus.training.loop.process import Process, name_policies
from primus.training.loop.session import shard
from primus.training.torchtitan import cpu


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return functional.scaled_dot_product_attention(*[self.wide(x)] * 3, is_causal=True) + x


def selective(block: nn.Module) -> nn.Module:
    """Recompute as torchtitan's selective checkpointing decides."""
    from torchtitan.config.job_config import ActivationCheckpoint
    from torchtitan.distributed import activation_checkpoint

    saved = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    return activation_checkpoint._apply_op_sac(block, ActivationCheckpoint(), op_sac_save_list=saved)


def seen(graph: torch.fx.GraphModule) -> dict[str, Any]:
    """Describe a graph. PyTorch itself says whether it would keep it."""
    why = ""
    try:
        autograd_cache.check_cacheable(graph)
        autograd_cache._collect_context_fn_hashes(graph)
        policies = [part.meta.get("_checkpoint_context_fn") for part in graph.modules() if hasattr(part, "meta")]
        pickle.dumps(policies)
    except (autograd_cache.BypassAOTAutogradCache, pickle.PicklingError, AttributeError) as error:
        why = str(error)
    policies = [getattr(one, "cache_hash", "") for one in policies if one] if not why else []
    return {"calls": [str(node.target) for node in graph.graph.nodes], "why": why, "policies": policies}


def compiled(recompute: str) -> list[dict[str, Any]]:
    """Train three blocks for one step, and describe what was compiled."""
    graphs = []

    def compile_fx(graph: torch.fx.GraphModule, _inputs: object, **_: object) -> torch.fx.GraphModule:
        # Instead of PyTorch's, which needs a C++ compiler.
        graphs.append(seen(graph))
        return graph

    torch._dynamo.reset()
    how = "none" if recompute == "selective" else recompute
    training = SimpleNamespace(master_dtype="float32", dtype="float32", fp8="", recompute=how, compile=True)
    given = SimpleNamespace(turbo=(), training=training, section=lambda *_: ShardingConfig())
    blocks = [selective(Block()) if recompute == "selective" else Block() for _ in range(3)]
    model = nn.Sequential(*blocks)
    shard(model, blocks, given, Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu")))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    with mock.patch.object(torch._inductor.compile_fx, "compile_fx", compile_fx):
        model(torch.ones(2, 4, 8, 16, requires_grad=True)).sum().backward()
    return graphs


cpu.apply(1)
name_policies()
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
for recompute in ("none", "full", "selective"):
    (graph,) = compiled(recompute)  # One for all three blocks.
    assert graph["why"] == "", (recompute, graph["why"])
    assert ("tag_activation_checkpoint" in graph["calls"]) == (recompute != "none"), recompute
    assert len(graph["policies"]) == (recompute == "selective"), recompute
    assert all("aten.mm.default" in name and "0x" not in name for name in graph["policies"]), graph["policies"]
gloo.leave()
