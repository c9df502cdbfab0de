"""The sections that backends with our own loop share: ``training``, and ``sharding`` where FSDP2 shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LoopConfig", "ShardingConfig"]


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How to train, apart from the model.

    ``micro_batch_size`` counts sequences (or images) per rank and forward pass, ``global_batch_size`` those of one
    optimizer step over all ranks; their quotient is the number of accumulation steps. ``dtype`` is that of the matrix
    products; weights and optimizer states follow ``master_dtype``. ``fp8`` other than "none" replaces the products of
    the linear layers. ``checkpoint_interval`` and ``profile_step`` are steps; 0 means never. ``lr_schedule`` decays
    from ``lr`` to ``min_lr`` after ``warmup_steps``. ``tensorboard`` and ``wandb`` leave the figures of every step in
    folders of those names, too; Weights & Biases stays offline unless its environment says otherwise.
    """

    steps: int = 50
    seq_len: int = 2048
    micro_batch_size: int = 1
    global_batch_size: int = -1
    seed: int = 42
    deterministic: bool = False
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    fp8: Literal["none", "tensorwise"] = "none"
    lr: float = 3e-4
    min_lr: float = 0.0
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_norm: float = 1.0
    recompute: Literal["none", "full"] = "none"
    compile: bool = False
    checkpoint_interval: int = 0
    profile_step: int = 0
    tensorboard: bool = False
    wandb: bool = False


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How FSDP2 spreads a model over the ranks.

    ``replicas`` groups of ranks hold the whole model each (1: all ranks share one). Without
    ``reshard_after_forward`` gathered weights stay until the backward pass. Gradients are summed in ``reduce_dtype``.
    """

    replicas: int = 1
    reshard_after_forward: bool = True
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
