"""Evaluation on held-out documents, repeated with the weights of the step after which it was."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from primus_images.training.judge.reference import data
from primus_images.training.judge.reference.model import Transformer
from primus_images.training.judge.reference.models import Models
from primus_images.training.judge.reference.names import Job, Tensors

# Samples that are evaluated together.
_SAMPLES = 16


def reported(output: Path) -> dict[int, float]:
    """Return step → the loss of the run's own evaluation after it."""
    file = output / "eval.jsonl"
    losses = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            losses[int(row["step"])] = float(row["eval_loss"])
    return losses


def due(job: Job, step: int) -> bool:
    """Return whether ``job`` evaluates after ``step``."""
    evaluation = job["evaluation"]
    if not evaluation:
        return False
    return step % evaluation["every"] == 0 or step == job["last_step"]


def best(losses: Mapping[int, float]) -> int | None:
    """Return the first step with the least loss, None without any."""
    return min(sorted(losses), key=lambda step: losses[step], default=None)


def last_step(job: Job, losses: Mapping[int, float]) -> int:
    """Return the step at which the run must end.

    That is before the last one if as many evaluations as its patience were no better.
    """
    patience = job["evaluation"].get("patience", 0)
    least = math.inf
    worse = 0
    for step in sorted(losses):
        worse += 1
        if losses[step] < least:
            least = losses[step]
            worse = 0
        if 0 < patience <= worse:
            return step
    return int(job["last_step"])


class Evaluation:
    """The evaluations of one run. ``models`` are those that repeat its steps."""

    def __init__(self, job: dict[str, Any], models: Models) -> None:
        self._models = models
        self._samples = data.held_out(job)

    def repeated(self, step: int, weights: Tensors) -> dict[str, Any]:
        """Return the mean loss of all held-out labels with ``weights``, those after ``step``.

        ``noise`` is how far the precision of the run alone moves it, ``closest`` as in
        :class:`.model.Transformer`.
        """
        dtype = torch.float32
        if self._models.exact:
            dtype = torch.float64
        model = self._models.model()
        exact = self._losses(model, self._models.weights(weights, dtype))
        narrow = self._models.weights(weights, torch.float32)
        other = self._losses(self._models.rounding(), narrow)
        loss = float(exact.mean())
        errors = other - exact
        spread = float(errors.std()) / math.sqrt(len(errors))
        of_mean = abs(float(other.mean()) - loss)
        return {
            "step": step,
            "loss": loss,
            "noise": max(of_mean, spread) / loss,
            "closest": min(model.closest, 1e9),
        }

    @torch.no_grad()
    def _losses(self, model: Transformer, weights: Tensors) -> torch.Tensor:
        losses = []
        for batch in self._batches():
            of_labels, _ = model.losses(weights, batch)
            is_trained = batch["labels"] >= 0
            losses.append(of_labels[is_trained].double())
        return torch.cat(losses)

    def _batches(self) -> Iterator[data.Batch]:
        parts = [tensor.split(_SAMPLES) for tensor in self._samples.values()]
        for tensors in zip(*parts, strict=True):
            yield dict(zip(self._samples, tensors, strict=True))
