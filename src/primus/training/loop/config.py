"""The sections that backends with our own loop share: ``training``, and ``sharding`` where FSDP2 shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from primus.recipes.bounds import bounded

__all__ = ["LoopConfig", "ShardingConfig"]


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How to train, apart from the model. Bounds that name keys are relations between settings.

    ``micro_batch_size`` counts sequences (or images) per rank and forward pass, ``global_batch_size`` those of one
    optimizer step over all ranks; their quotient is the number of accumulation steps. ``dtype`` is that of the matrix
    products; weights and optimizer states follow ``master_dtype``. ``fp8`` other than "none" replaces the products of
    the linear layers. ``checkpoint_interval`` and ``profile_step`` are steps; 0 means never. ``lr_schedule`` decays
    from ``lr`` to ``min_lr`` after ``warmup_steps``, until step ``decay_steps`` (0: the last step of the run).
    ``tensorboard`` and ``wandb`` leave the figures of every step in folders of those names, too; Weights & Biases
    stays offline unless its environment says otherwise.
    """

    steps: int = bounded(50, "[1, inf)")
    seq_len: int = bounded(2048, "[1, inf)")
    micro_batch_size: int = bounded(1, "[1, inf)")
    global_batch_size: int = bounded(-1, "-1 | [1, inf)")
    seed: int = bounded(42, "[0, 4294967295]")
    deterministic: bool = False
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    fp8: Literal["none", "tensorwise"] = "none"
    lr: float = bounded(3e-4, "(0, 1]")
    min_lr: float = bounded(0.0, "[0, training.lr]")
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = bounded(0, "[0, training.steps]")
    decay_steps: int = bounded(0, "[0, inf)")
    weight_decay: float = bounded(0.1, "[0, 1]")
    beta1: float = bounded(0.9, "[0, 1)")
    beta2: float = bounded(0.95, "[0, 1)")
    eps: float = bounded(1e-8, "(0, 1]")
    max_norm: float = bounded(1.0, "(0, inf)")
    recompute: Literal["none", "full"] = "none"
    compile: bool = False
    checkpoint_interval: int = bounded(0, "[0, inf)")
    profile_step: int = bounded(0, "[0, training.steps]")
    tensorboard: bool = False
    wandb: bool = False


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How FSDP2 spreads a model over the ranks.

    ``replicas`` groups of ranks hold the whole model each (1: all ranks share one). Without
    ``reshard_after_forward`` gathered weights stay until the backward pass. Gradients are summed in ``reduce_dtype``.
    """

    replicas: int = bounded(1, "[1, inf)")
    reshard_after_forward: bool = True
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
