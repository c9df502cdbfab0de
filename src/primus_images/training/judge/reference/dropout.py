"""Dropout before the adapters of LoRA: the masks of a run, and what is wrong with them."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primus_images.recipes.architecture import Architecture
from primus_images.training.judge.reference.names import Job, Tensors
from primus_images.training.judge.reference.parameters import adapters_of

# How many standard errors a share may be from what it should be, by chance.
_ERRORS = 6.0
# Layer → its masks, one per micro-batch: true where an input is kept.
_Masks = dict[str, list[Tensor]]
# A layer, and a data-parallel rank.
_Place = tuple[str, int]


def rate_of(job: Job) -> float:
    """Return the share of the inputs of adapters that ``job`` drops."""
    if job["mode"] != "lora":
        return 0.0
    return float(job["config"].get("lora.dropout", 0.0))


class Dropout:
    """The masks that a run left in ``folder``."""

    def __init__(self, job: Job, sizes: Architecture, folder: Path) -> None:
        self.rate = rate_of(job)
        self._folder = folder
        self._ranks = int(job["data_parallel"])
        self._pieces = int(job["accumulation"])
        self._layers: list[str] = []
        if self.rate:
            for name in adapters_of(job, sizes):
                layer, end, _ = name.partition(".lora_A.weight")
                if end:
                    self._layers.append(layer)

    def factors(self, step: int, rank: int, piece: int, dtype: torch.dtype) -> Tensors:
        """Return by which factors the inputs of each layer's adapter are multiplied.

        These are 0, or 1 ÷ the share that is kept.
        """
        if not self.rate:
            return {}
        factors = {}
        recorded = self._recorded(step, rank)
        for layer, masks in recorded["masks"].items():
            mask = masks[piece].to(dtype)
            factors[f"{layer}.dropout"] = mask / (1 - self.rate)
        return factors

    def findings(self, steps: Sequence[int]) -> list[str] | None:
        """Return what no random masks of the run's rate are; None if it drops nothing."""
        if not self.rate:
            return None
        findings: list[str] = []
        every: dict[_Place, list[Tensor]] = {}
        for step in steps:
            for rank in range(self._ranks):
                recorded = self._recorded(step, rank)
                for fault in self._of_step(recorded):
                    findings.append(f"step {step}, rank {rank}: {fault}")
                for layer in self._layers:
                    masks = every.setdefault((layer, rank), [])
                    masks += recorded["masks"].get(layer, ())
        if findings:
            return findings
        for layer in self._layers:
            of_ranks = [every[layer, rank] for rank in range(self._ranks)]
            findings += self._of_layer(layer, of_ranks)
        for first, second in pairwise(self._layers):
            masks = every[second, 0]
            others = every[first, 0]
            findings += self._alike(second, f"{first} has", masks, others)
        return findings

    def _recorded(self, step: int, rank: int) -> dict[str, _Masks]:
        for file in self._folder.glob(f"dropout-{step}-*.pt"):
            recorded: dict[str, Any] = torch.load(file, weights_only=True)
            if recorded["data_rank"] == rank:
                return {kind: _by_layer(recorded[kind]) for kind in ("masks", "again")}
        return {"masks": {}, "again": {}}

    def _of_step(self, recorded: dict[str, _Masks]) -> Iterator[str]:
        for layer in self._layers:
            masks = recorded["masks"].get(layer, [])
            if len(masks) != self._pieces:
                yield f"{layer} dropped inputs {len(masks)} times, not {self._pieces}"
            again = recorded["again"].get(layer, [])
            for mask, repeated in zip(masks, again, strict=False):
                if not torch.equal(mask, repeated):
                    yield f"{layer} was recomputed with another mask"
                    break

    def _of_layer(self, layer: str, of_ranks: Sequence[Sequence[Tensor]]) -> Iterator[str]:
        count = 0
        kept_count = 0
        for masks in of_ranks:
            for mask in masks:
                count += mask.numel()
                kept_count += int(mask.sum())
        kept = kept_count / count
        expected = 1 - self.rate
        error = math.sqrt(self.rate * expected / count)
        if abs(kept - expected) > _ERRORS * error:
            yield f"{layer} keeps {kept:.2%} of its inputs, not {expected:.2%}"
            return
        for masks in of_ranks:
            later = masks[1:]
            earlier = masks[:-1]
            yield from self._alike(layer, "the step before has", later, earlier)
        for first, second in pairwise(of_ranks):
            yield from self._alike(layer, "another rank has", second, first)

    def _alike(
        self, layer: str, other: str, masks: Sequence[Tensor], others: Sequence[Tensor]
    ) -> Iterator[str]:
        """Yield a finding if masks agree with ``others`` more, or less, than by chance."""
        equal = 0
        count = 0
        for first, second in zip(masks, others, strict=True):
            if first.shape == second.shape:
                is_equal = first == second
                equal += int(is_equal.sum())
                count += first.numel()
        if not count:
            return
        share = equal / count
        expected = self.rate**2 + (1 - self.rate) ** 2
        error = math.sqrt(expected * (1 - expected) / count)
        if abs(share - expected) > _ERRORS * error:
            yield f"{layer} has {share:.1%} of the mask that {other}, by chance {expected:.1%}"


def _by_layer(masks: _Masks) -> _Masks:
    """Return the masks by Hugging Face's names of layers."""
    named = {}
    for name, tensors in masks.items():
        layer, _, _ = name.partition(".lora_dropout")
        layer = layer.removeprefix("model.")
        layer = layer.removeprefix("base_model.model.")
        named[layer] = tensors
    return named
