"""The figures of each step: the log line of every rank, exact values from rank 0, trackers when asked."""

from __future__ import annotations

import json
import sys
import time

from primus.training.flops import of_recipe_unit
from primus.training.loop.given import Given
from primus.training.loop.process import Process, peak_memory
from primus.training.loop.session import Data
from primus.training.loop.trackers import trackers

__all__ = ["Report"]


class Report:
    """Writes what :mod:`primus.training.logs` reads. Time runs from one ``step`` to the next.

    ``adapters`` is the number of weights that LoRA trains, None where all are trained.
    """

    def __init__(self, given: Given, process: Process, data: Data, adapters: int | None = None) -> None:
        self._given = given
        self._process = process
        # Tensor-parallel ranks work on the same samples: the figure is per rank, whatever the layout.
        samples = given.global_batch / process.world_size
        self._tokens = samples * data.tokens_per_sample
        self._images = samples * data.images_per_sample
        self._exact = given.output / "exact.jsonl"
        self._trackers = trackers(given) if process.rank == 0 else []
        self._since = time.perf_counter()
        # Counted as torchtitan counts, so that the figures of all backends compare: attention non-causal.
        per_unit = of_recipe_unit(given.model, given.training.seq_len, adapters=adapters)
        self._causal = per_unit.causal * (self._images or self._tokens)
        # FLOPs of one token or image, attention counted in full.
        self.flops_per_unit = per_unit.non_causal
        self._flops = per_unit.non_causal * (self._images or self._tokens)

    def start(self) -> None:
        """What went before belongs to no step."""
        self._since = time.perf_counter()

    def step(self, step: int, loss: float, grad_norm: float, lr: float) -> None:
        """Report a step that has ended on this rank."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        memory, share = peak_memory(self._process)
        speed = self._tokens / seconds
        line = (
            f"step: {step:2}  loss: {loss:8.5f}  grad_norm: {grad_norm:7.4f}  memory: {memory:5.2f}GiB({share:.2f}%)  "
            f"tps: {round(speed):,}  tflops: {self._flops / seconds / 1e12:,.2f}  mfu: N/A"
        )
        if self._images:
            line += f"  images/s: {self._images / seconds:.3f}"
        # One write: lines of several ranks meet in one pipe.
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if self._process.rank != 0:
            return
        with self._exact.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "loss": repr(loss), "grad_norm": repr(grad_norm)}) + "\n")
        figures = {
            "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens_per_second": speed, "memory_gib": memory,
            "tflops_causal": self._causal / seconds / 1e12, "tflops_non_causal": self._flops / seconds / 1e12,
        }  # fmt: skip
        if self._images:
            figures["images_per_second"] = self._images / seconds
        for track in self._trackers:
            track.step(figures, step)

    def end(self) -> None:
        """Close what the trackers have open."""
        for track in self._trackers:
            track.end()

    def say(self, text: str) -> None:
        """A line for people, from rank 0."""
        if self._process.rank == 0:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
