"""The same weights in Megatron's DeepSeek, made from our sizes, and in the reference give the same
logits.

The reference agrees with transformers' models. Judged runs of Megatron agree with it for other
families, and for DeepSeek at lengths at which YaRN changes nothing.
"""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

# The image for CPUs has no compiler for what Megatron compiles, as in a run of it.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch._dynamo.config
from megatron.core import parallel_state

from primus_images.recipes.architecture import (
    Architecture,
    LatentAttention,
    MixtureOfExperts,
    RopeScaling,
)
from primus_images.training.backends import gloo
from primus_images.training.backends.loop.config import LoopConfig
from primus_images.training.backends.megatron import cpu
from primus_images.training.judge.reference.model import Model
from primus_images.training.judge.reference.names import BIAS, to_canonical

# torch was imported before, where all scripts run.
torch._dynamo.config.disable = True
LENGTH = 48
SIZES: dict[str, Any] = {
    "layers": 3,
    "hidden_size": 64,
    "heads": 4,
    "kv_heads": 4,
    "ffn_size": 96,
    "vocab_size": 128,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": RopeScaling(
        kind="yarn", factor=40.0, original_max_position=16, mscale=0.707, mscale_all_dim=0.707
    ),
}
LATENT = LatentAttention(kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
V2 = Architecture(
    family="deepseek_v2",
    **SIZES,
    mla=LATENT,
    moe=MixtureOfExperts(experts=8, top_k=3, ffn_size=32, shared_experts=2, dense_layers=1),
)
V3 = Architecture(
    family="deepseek_v3",
    **SIZES,
    mla=replace(LATENT, q_lora_rank=20),
    moe=MixtureOfExperts(
        experts=8,
        top_k=4,
        ffn_size=32,
        shared_experts=1,
        dense_layers=1,
        score="sigmoid",
        normalize_top_k=True,
        route_scale=2.5,
        groups=4,
        top_groups=2,
    ),
)


def gap_of(sizes: Architecture) -> float:
    """The largest gap of any logit, relative to the largest logit."""
    from primus_images.training.backends.megatron.model import build

    config = {"model.moe_token_dispatcher_type": "alltoall", "model.moe_router_dtype": "fp32"}
    job = SimpleNamespace(
        model=sizes,
        training=LoopConfig(seq_len=LENGTH, dtype="float32"),
        config=config,
        turbo=(),
        section=lambda kind: kind(),
    )
    (part,) = build(job, on_cpu=True)
    own = dict(part.module.named_parameters())
    own |= {
        name: tensor for name, tensor in part.module.named_buffers() if name.endswith("expert_bias")
    }
    for name, tensor in own.items():
        tensor.data.uniform_(0.5, 1.5) if "norm" in name else tensor.data.normal_(0, 0.15)
    weights = to_canonical("megatron", sizes, own)
    assert any(name.endswith(BIAS) for name in weights) == (sizes.moe.score == "sigmoid")
    tokens = torch.randint(0, sizes.vocab_size, (2, LENGTH))
    expected, _ = Model(sizes).prediction(
        {name: tensor.double() for name, tensor in weights.items()}, {"inputs": tokens}
    )
    logits = part.module(tokens, torch.arange(LENGTH).expand_as(tokens), None)
    return float((logits - expected).abs().max() / expected.abs().max())


cpu.patch_torch()
os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
cpu.patch_megatron()
for sizes in (V2, V3):
    torch.manual_seed(0)
    # Unscaled rotary positions make it 5e-2.
    assert (gap := gap_of(sizes)) < 1e-4, (sizes.family, gap)
gloo.leave()
