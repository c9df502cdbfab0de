"""Clipping, learning rates and AdamW, from their definitions, and relative errors of gradients and
updates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from primus_images.training.judge.reference.names import Job, Tensors, kind_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``decay_vectors``: weight decay also applies to norms and biases. ``decoupled``: it shortens
    the weights (AdamW) instead of adding to the gradients (Adam).
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_norm: float
    decay_vectors: bool = True
    decoupled: bool = True


def settings(job: Job) -> Settings:
    """Return the settings that the recipe of ``job`` requests, with the backend's documented
    defaults.
    """
    config = job["config"]
    part = "training"
    if job["backend"] == "torchtitan":
        part = "optimizer"
    usual = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    return Settings(
        **{key: float(config.get(f"{part}.{key}", value)) for key, value in usual.items()},
        max_norm=float(config.get("training.max_norm", 1.0)),
        decay_vectors=job["backend"] != "megatron",
        decoupled=config.get("optimizer.name", "AdamW") == "AdamW",
    )


def rate(job: Job, step: int) -> float:
    """Return the learning rate of ``step`` (from 1): linear warm-up, then constant or decaying."""
    config = job["config"]
    if job["backend"] == "torchtitan":
        lr = float(config.get("optimizer.lr", 8e-4))
        kind = config.get("lr_scheduler.decay_type", "linear")
        least = lr * float(config.get("lr_scheduler.min_lr_factor", 0.0))
        total = int(config.get("lr_scheduler.total_steps") or config["training.steps"])
        warmup = min(int(config.get("lr_scheduler.warmup_steps", 200)), total)
        ratio = config.get("lr_scheduler.decay_ratio")
        if ratio is None:
            decay = total - warmup
        else:
            decay = min(round(total * ratio), total - warmup)
        # The first decaying step is one after the last stable one; the last step's rate is not 0.
        risen = warmup
        begin = total + 1 - decay
        end = total + 1
    else:
        lr = float(config.get("training.lr", 3e-4))
        kind = config.get("training.lr_schedule", "constant")
        least = float(config.get("training.min_lr", 0.0))
        warmup = int(config.get("training.warmup_steps", 0))
        end = int(config.get("training.decay_steps", 0)) or int(config.get("training.steps", 50))
        risen = warmup + 1
        begin = warmup
    if step <= warmup:
        return lr * step / risen
    if kind == "constant" or step < begin:
        return lr
    done = min(1.0, (step - begin) / max(1, end - begin))
    remaining = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "sqrt": 1 - math.sqrt(done),
    }
    return least + (lr - least) * remaining[kind]


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """Return the length of all gradients as one vector."""
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))


def clipped(gradients: Mapping[str, Tensor], norm: float, limit: float) -> dict[str, Tensor]:
    """Return ``gradients`` shortened to ``limit`` if ``norm`` exceeds it (with PyTorch's 1e-6 in
    the quotient).
    """
    factor = 1.0
    if limit > 0:
        factor = min(1.0, limit / (norm + 1e-6))
    return {name: gradient * factor for name, gradient in gradients.items()}


@dataclass
class AdamW:
    """Adam with weight decay, decoupled or not (arXiv:1711.05101, algorithm 2)."""

    settings: Settings
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0

    def update(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float
    ) -> dict[str, Tensor]:
        """Return the weights after one update. A weight without a gradient stays as it is."""
        settings = self.settings
        self.step += 1
        after = {}
        for name, weight in weights.items():
            gradient = gradients.get(name)
            if gradient is None:
                after[name] = weight
                continue
            decay = 0.0
            if weight.ndim > 1 or settings.decay_vectors:
                decay = settings.weight_decay
            if not settings.decoupled:
                gradient = gradient + decay * weight
            for moments in (self.first, self.second):
                moments.setdefault(name, torch.zeros_like(weight))
            first = self.first[name].mul_(settings.beta1).add_(gradient, alpha=1 - settings.beta1)
            second = (
                self.second[name]
                .mul_(settings.beta2)
                .addcmul_(gradient, gradient, value=1 - settings.beta2)
            )
            spread = (second / (1 - settings.beta2**self.step)).sqrt_().add_(settings.eps)
            if settings.decoupled:
                decayed = weight * (1 - lr * decay)
            else:
                decayed = weight
            after[name] = torch.addcdiv(
                decayed, first, spread, value=-lr / (1 - settings.beta1**self.step)
            )
        return after


def least_rounded(settings: Settings, used: Tensors, norm: float) -> float:
    """Return the least share of a matrix's gradients that are bfloat16 numbers × the factor of
    clipping. Sums in float32 have more digits. ``norm`` is the reported one before clipping.
    """
    factor = 1.0
    if settings.max_norm:
        factor = min(1.0, settings.max_norm / (norm + 1e-6))
    shares = [1.0]
    for gradient in used.values():
        plain = gradient[gradient != 0].double() / factor
        if gradient.ndim > 1 and len(plain):
            near = (plain - plain.bfloat16().double()).abs() <= 4e-7 * plain.abs()
            shares.append(float(near.double().mean()))
    return min(shares)


def moving(before: Tensors, expected: Tensors, rounding: float) -> set[str]:
    """Return the weights that an update changes. Less than half the distance to the next number is
    always lost.
    """
    return {
        name
        for name, target in expected.items()
        if bool(((target - before[name]).abs() > rounding / 2 * before[name].abs()).any())
    }


def gap(before: Tensors, expected: Tensors, after: Tensors, rounding: float) -> dict[str, Any]:
    """Return the largest error of a weight beyond its rounding, relative to its change, and the
    weight's name.
    """
    worst = 0.0
    at = ""
    for name, target in expected.items():
        change = float((target - before[name]).norm())
        error = max(
            0.0,
            float((after[name].to(torch.float64) - target).norm())
            - rounding * float(target.norm()),
        )
        if error:
            if change:
                relative = error / change
            else:
                relative = math.inf
            if not relative <= worst:
                worst = relative
                at = name
    return {"gap": min(worst, 1e9), "name": at}


def scales_of(gradients: Tensors) -> dict[str, float]:
    """Return the scale of each tensor's error: its own length, or a thousandth of the length of all
    gradients.
    """
    lengths = {name: float(gradient.norm()) for name, gradient in gradients.items()}
    least = 1e-3 * math.sqrt(sum(length**2 for length in lengths.values()))
    return {name: max(length, least) or 1.0 for name, length in lengths.items()}


def gaps_of(
    run: Mapping[str, Tensor], expected: Tensors, scales: Mapping[str, float]
) -> dict[str, tuple[float, str]]:
    """Return the largest relative error of a gradient, with its tensor's name, for each kind of
    tensor. Those of all layers and experts are similar, so the noise of some predicts that of the
    others.
    """
    worst: dict[str, tuple[float, str]] = {}
    for name, target in expected.items():
        if name in run:
            kind = kind_of(name)
            gap = float((run[name].to(target.dtype) - target).norm()) / scales[name]
            worst[kind] = max(
                worst.get(kind, (0.0, "")), (gap if math.isfinite(gap) else 1e9, name)
            )
    return worst


def typical(gaps: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the root mean square of the gaps under several roundings, and the tensor with the
    largest one.
    """
    return math.sqrt(sum(gap**2 for gap, _ in gaps) / len(gaps)), max(gaps)[1]
