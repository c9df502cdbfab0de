"""What the ranks of our own loop read: ``job.json``, with the recipe's settings of the loop."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from primus_images.recipes.architecture import Architecture, architecture, built
from primus_images.recipes.setting import Value, bounded
from primus_images.yamlfile import section


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How to train, independent of the model. Bounds that name keys are relations between settings.

    ``micro_batch_size`` is the number of sequences (or images) per rank and forward pass.
    ``global_batch_size`` is that of one optimizer step over all ranks; -1 means one micro-batch per
    rank. ``dtype`` is that of matrix products; weights and optimizer states use ``master_dtype``.
    ``fp8`` other than "none" computes the linear layers in FP8. ``checkpoint_interval`` and
    ``profile_step`` are steps; 0 means never. With ``profile_after``, all steps after it are
    profiled, up to ``profile_step``; -1 profiles that one alone. ``lr_schedule`` decays from
    ``lr`` to ``min_lr`` after ``warmup_steps``, until step ``decay_steps`` (0: the last step of
    the run).
    ``tensorboard``, ``wandb`` and ``mlflow`` also write the figures of every step to folders with
    those names. Weights & Biases is offline unless WANDB_MODE is set, MLflow unless
    MLFLOW_TRACKING_URI is.
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
    profile_after: int = bounded(-1, "-1 | [0, training.steps]")
    tensorboard: bool = False
    wandb: bool = False
    mlflow: bool = False


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How FSDP2 distributes a model over the ranks.

    ``replicas`` is the number of copies of the model, each sharded over a group of ranks (1: over
    all ranks). Without ``reshard_after_forward``, gathered weights are kept until the backward
    pass. Gradients are summed in ``reduce_dtype``.
    """

    replicas: int = bounded(1, "[1, inf)")
    reshard_after_forward: bool = True
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"


def profile_of(config: LoopConfig, step: int) -> str | None:
    """Return the name of the file with the profile of ``step``, None if it is not profiled."""
    last = config.profile_step
    first = last
    if config.profile_after >= 0:
        first = config.profile_after + 1
    if not first <= step <= last:
        return None
    if first == last:
        return "profile.json"
    return f"profile-{step}.json"


def learning_rate(config: LoopConfig, step: int) -> float:
    """Return the rate for ``step``, of which the first is 1.

    It is a linear warm-up, and then the schedule, which ends at ``min_lr``.
    """
    if step <= config.warmup_steps:
        return config.lr * step / (config.warmup_steps + 1)
    if config.lr_schedule == "constant":
        return config.lr
    last = config.decay_steps or config.steps
    steps = max(1, last - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / steps)
    if config.lr_schedule == "linear":
        remaining = 1 - done
    else:
        remaining = (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * remaining


Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """One job as its ranks see it: fields of :func:`primus_images.training.run.ranks.job_file`.

    ``config`` is the backend's section of the recipe with dotted keys, and ``training`` the part
    that all our backends share. ``evaluation`` has ``every`` and ``patience``, or is empty.
    ``saving`` has ``seconds`` between checkpoints, and how many to ``keep``; 0: unset.
    """

    output: Path
    mode: str
    precision: str
    model: Architecture
    assets: Mapping[str, str]
    config: Mapping[str, Value]
    training: LoopConfig
    first_step: int
    last_step: int
    resume_from: Path | None
    identity: Mapping[str, Any]
    world_size: int
    data_parallel: int
    global_batch: int
    accumulation: int
    witness: bool
    examined: Sequence[int]
    blocks: bool
    turbo: tuple[str, ...]
    evaluation: Mapping[str, int]
    judge_every: int = 0
    saving: Mapping[str, float] = field(default_factory=dict)

    def section(self, kind: type[Section], under: str = "") -> Section:
        """Return the keys below ``under`` as the frozen dataclass ``kind``, with its defaults."""
        settings = self.config
        if under:
            settings = section(self.config, under)
        return built(kind, settings)


def read_job(folder: Path) -> RankJob:
    """Read the job of an output folder."""
    job: dict[str, Any] = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    values: dict[str, Any] = {}
    for field_of_job in fields(RankJob):
        if field_of_job.name in job:
            values[field_of_job.name] = job[field_of_job.name]
    values["output"] = Path(job["output"])
    values["model"] = architecture(job["model"])
    values["training"] = built(LoopConfig, section(job["config"], "training"))
    if job["resume_from"]:
        values["resume_from"] = Path(job["resume_from"])
    values["turbo"] = tuple(job["turbo"])
    return RankJob(**values)
