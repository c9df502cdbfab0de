"""The learning rate as a function of the step only, so that a resumed run uses the same rates."""

from __future__ import annotations

import math

from primus.training.loop.config import LoopConfig


def learning_rate(config: LoopConfig, step: int) -> float:
    """Return the rate for ``step`` (the first is 1): linear warm-up, then the schedule, which ends at ``min_lr``."""
    if step <= config.warmup_steps:
        return config.lr * step / (config.warmup_steps + 1)
    if config.lr_schedule == "constant":
        return config.lr
    last = config.decay_steps or config.steps
    done = min(1.0, (step - config.warmup_steps) / max(1, last - config.warmup_steps))
    left = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left
