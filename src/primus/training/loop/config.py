"""The sections shared by backends with our own loop: ``training``, and ``sharding`` for those that use FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from primus.recipes.bounds import bounded


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How to train, independent of the model. Bounds that name keys are relations between settings.

    ``micro_batch_size`` is the number of sequences (or images) per rank and forward pass. ``global_batch_size`` is that
    of one optimizer step over all ranks; -1 means one micro-batch per rank. ``dtype`` is that of matrix products;
    weights and optimizer states use ``master_dtype``. ``fp8`` other than "none" computes the linear layers in FP8.
    ``checkpoint_interval`` and ``profile_step`` are steps; 0 means never. ``lr_schedule`` decays from ``lr`` to
    ``min_lr`` after ``warmup_steps``, until step ``decay_steps`` (0: the last step of the run). ``tensorboard`` and
    ``wandb`` also write the figures of every step to folders with those names. Weights & Biases is offline unless
    WANDB_MODE is set.
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
    """How FSDP2 distributes a model over the ranks.

    ``replicas`` is the number of copies of the model, each sharded over a group of ranks (1: over all ranks). Without
    ``reshard_after_forward``, gathered weights are kept until the backward pass. Gradients are summed in
    ``reduce_dtype``.
    """

    replicas: int = bounded(1, "[1, inf)")
    reshard_after_forward: bool = True
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
