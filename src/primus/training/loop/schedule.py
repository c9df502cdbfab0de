"""The learning rate of a step: a function of the step alone, so that a resumed run has it right."""

from __future__ import annotations

import math

from primus.training.loop.config import LoopConfig

__all__ = ["learning_rate"]


def learning_rate(config: LoopConfig, step: int) -> float:
    """The rate for ``step`` (the first is 1): linear warm-up, then the schedule, ``min_lr`` where it ends."""
    if step <= config.warmup_steps:
        return config.lr * step / (config.warmup_steps + 1)
    if config.lr_schedule == "constant":
        return config.lr
    last = config.decay_steps or config.steps
    done = min(1.0, (step - config.warmup_steps) / max(1, last - config.warmup_steps))
    left = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left
