"""Clipping, learning rates and AdamW from their definitions, and errors of their results."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from primus_images.training.judge.reference.names import Job, Tensors, kind_of

# Kind of tensor → the largest relative error of a gradient, and the name of its tensor.
Gaps = dict[str, tuple[float, str]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an optimizer is given.

    ``decay_vectors``: weight decay also applies to norms and biases. ``decoupled``: it shortens the
    weights (AdamW) instead of adding to the gradients (Adam).
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_norm: float
    decay_vectors: bool = True
    decoupled: bool = True


def settings(job: Job) -> Settings:
    """Return the settings that the recipe of ``job`` requests, with the backend's defaults."""
    config = job["config"]
    part = "training"
    if job["backend"] == "torchtitan":
        part = "optimizer"
    return Settings(
        beta1=float(config.get(f"{part}.beta1", 0.9)),
        beta2=float(config.get(f"{part}.beta2", 0.95)),
        eps=float(config.get(f"{part}.eps", 1e-8)),
        weight_decay=float(config.get(f"{part}.weight_decay", 0.1)),
        max_norm=float(config.get("training.max_norm", 1.0)),
        decay_vectors=job["backend"] != "megatron",
        decoupled=config.get("optimizer.name", "AdamW") == "AdamW",
    )


@dataclass(frozen=True, kw_only=True)
class _Schedule:
    """A rate rises in ``warmup`` steps of 1 / ``risen``, and falls from ``begin`` to ``end``."""

    rate: float
    least: float
    kind: str
    warmup: int
    risen: int
    begin: int
    end: int


def _of_torchtitan(config: Mapping[str, Any]) -> _Schedule:
    rate = float(config.get("optimizer.lr", 8e-4))
    total = int(config.get("lr_scheduler.total_steps") or config["training.steps"])
    warmup = min(int(config.get("lr_scheduler.warmup_steps", 200)), total)
    decay = total - warmup
    ratio = config.get("lr_scheduler.decay_ratio")
    if ratio is not None:
        decay = min(round(total * ratio), decay)
    # The first decaying step is one after the last stable one; the last step's rate is not 0.
    return _Schedule(
        rate=rate,
        least=rate * float(config.get("lr_scheduler.min_lr_factor", 0.0)),
        kind=config.get("lr_scheduler.decay_type", "linear"),
        warmup=warmup,
        risen=warmup,
        begin=total + 1 - decay,
        end=total + 1,
    )


def _of_our_loop(config: Mapping[str, Any]) -> _Schedule:
    warmup = int(config.get("training.warmup_steps", 0))
    steps = int(config.get("training.steps", 50))
    end = int(config.get("training.decay_steps", 0)) or steps
    return _Schedule(
        rate=float(config.get("training.lr", 3e-4)),
        least=float(config.get("training.min_lr", 0.0)),
        kind=config.get("training.lr_schedule", "constant"),
        warmup=warmup,
        risen=warmup + 1,
        begin=warmup,
        end=end,
    )


def rate(job: Job, step: int) -> float:
    """Return the learning rate of ``step`` (from 1): linear warm-up, then constant or decaying."""
    if job["backend"] == "torchtitan":
        schedule = _of_torchtitan(job["config"])
    else:
        schedule = _of_our_loop(job["config"])
    if step <= schedule.warmup:
        return schedule.rate * step / schedule.risen
    if schedule.kind == "constant" or step < schedule.begin:
        return schedule.rate
    steps = max(1, schedule.end - schedule.begin)
    done = min(1.0, (step - schedule.begin) / steps)
    remaining = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "sqrt": 1 - math.sqrt(done),
    }
    share = remaining[schedule.kind]
    return schedule.least + (schedule.rate - schedule.least) * share


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """Return the length of all gradients as one vector."""
    squares = [float(gradient.square().sum()) for gradient in gradients.values()]
    return math.sqrt(sum(squares))


def _factor(norm: float, limit: float) -> float:
    # PyTorch adds 1e-6 in the quotient.
    if limit > 0:
        return min(1.0, limit / (norm + 1e-6))
    return 1.0


def clipped(gradients: Mapping[str, Tensor], norm: float, limit: float) -> dict[str, Tensor]:
    """Return ``gradients`` shortened to ``limit`` if ``norm`` exceeds it."""
    factor = _factor(norm, limit)
    return {name: gradient * factor for name, gradient in gradients.items()}


@dataclass
class AdamW:
    """Adam with weight decay, decoupled or not (arXiv:1711.05101, algorithm 2)."""

    settings: Settings
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0

    def update(self, weights: Tensors, gradients: Tensors, lr: float) -> Tensors:
        """Return the weights after one update. A weight without a gradient stays as it is."""
        self.step += 1
        after = {}
        for name, weight in weights.items():
            after[name] = weight
            if name in gradients:
                after[name] = self._updated(name, weight, gradients[name], lr)
        return after

    def _updated(self, name: str, weight: Tensor, gradient: Tensor, lr: float) -> Tensor:
        settings = self.settings
        decay = 0.0
        if weight.ndim > 1 or settings.decay_vectors:
            decay = settings.weight_decay
        decayed = weight
        if settings.decoupled:
            decayed = weight * (1 - lr * decay)
        else:
            gradient = gradient + decay * weight
        beta1 = settings.beta1
        beta2 = settings.beta2
        first = self.first.setdefault(name, torch.zeros_like(weight))
        first.mul_(beta1)
        first.add_(gradient, alpha=1 - beta1)
        second = self.second.setdefault(name, torch.zeros_like(weight))
        second.mul_(beta2)
        second.addcmul_(gradient, gradient, value=1 - beta2)
        variance = second / (1 - beta2**self.step)
        spread = variance.sqrt_().add_(settings.eps)
        size = -lr / (1 - beta1**self.step)
        return torch.addcdiv(decayed, first, spread, value=size)


def least_rounded(settings: Settings, used: Tensors, norm: float) -> float:
    """Return the least share of a matrix's gradients that are bfloat16 numbers.

    They are multiplied by the factor of clipping. Sums in float32 have more digits. ``norm`` is the
    reported one before clipping.
    """
    factor = _factor(norm, settings.max_norm)
    least = 1.0
    for gradient in used.values():
        plain = gradient[gradient != 0].double() / factor
        if gradient.ndim > 1 and len(plain):
            rounded = plain.bfloat16().double()
            near = (plain - rounded).abs() <= 4e-7 * plain.abs()
            share = float(near.double().mean())
            least = min(least, share)
    return least


def moving(before: Tensors, expected: Tensors, rounding: float) -> set[str]:
    """Return the weights that an update changes.

    Less than half the distance to the next number is always lost.
    """
    changed = set()
    for name, target in expected.items():
        weight = before[name]
        lost = rounding / 2 * weight.abs()
        moves = (target - weight).abs() > lost
        if bool(moves.any()):
            changed.add(name)
    return changed


def gap(before: Tensors, expected: Tensors, after: Tensors, rounding: float) -> dict[str, Any]:
    """Return the largest error of a weight beyond its rounding, and the weight's name.

    The error is relative to the weight's change.
    """
    worst = 0.0
    at = ""
    for name, target in expected.items():
        difference = after[name].to(torch.float64) - target
        allowed = rounding * float(target.norm())
        error = float(difference.norm()) - allowed
        if error <= 0:
            continue
        change = float((target - before[name]).norm())
        relative = 1e9
        if change and math.isfinite(error):
            relative = min(error / change, relative)
        if relative > worst:
            worst = relative
            at = name
    return {"gap": worst, "name": at}


def scales_of(gradients: Tensors) -> dict[str, float]:
    """Return the scale of each tensor's error.

    It is the tensor's own length, or a thousandth of the length of all gradients.
    """
    lengths = {name: float(gradient.norm()) for name, gradient in gradients.items()}
    square = sum(length**2 for length in lengths.values())
    least = 1e-3 * math.sqrt(square)
    return {name: max(length, least) or 1.0 for name, length in lengths.items()}


def gaps_of(run: Tensors, expected: Tensors, scales: Mapping[str, float]) -> Gaps:
    """Return the largest relative error of a gradient for each kind of tensor.

    Those of all layers and experts are similar, so the noise of some predicts that of the others.
    """
    worst: Gaps = {}
    for name, target in expected.items():
        if name not in run:
            continue
        difference = run[name].to(target.dtype) - target
        gap = float(difference.norm()) / scales[name]
        if not math.isfinite(gap):
            gap = 1e9
        kind = kind_of(name)
        before = worst.get(kind, (0.0, ""))
        worst[kind] = max(before, (gap, name))
    return worst


def typical(gaps: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the root mean square of the gaps under several roundings.

    The tensor is the one with the largest gap.
    """
    square = sum(gap**2 for gap, _ in gaps) / len(gaps)
    _, name = max(gaps)
    return math.sqrt(square), name
