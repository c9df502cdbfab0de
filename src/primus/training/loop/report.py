"""Reporting each step: a log line of every rank, and from rank 0 exact values and the requested trackers."""

from __future__ import annotations

import json
import sys
import time

from primus.training.flops import of_recipe_unit
from primus.training.loop.process import Process, peak_memory
from primus.training.loop.rank_job import RankJob
from primus.training.loop.session import Data
from primus.training.loop.trackers import trackers


class Report:
    """Writes the lines that :mod:`primus.training.logs` reads. A step's time is that since the last call.

    ``adapters`` is the number of weights that LoRA trains, or None if all weights are trained.
    """

    def __init__(self, given: RankJob, process: Process, data: Data, adapters: int | None = None) -> None:
        self._given = given
        self._process = process
        # Tensor-parallel ranks share samples. Dividing by all ranks gives a figure per rank for any layout.
        samples = given.global_batch / process.world_size
        self._tokens = samples * data.tokens_per_sample
        self._images = samples * data.images_per_sample
        self._exact = given.output / "exact.jsonl"
        self._trackers = trackers(given) if process.rank == 0 else []
        self._since = time.perf_counter()
        # Like torchtitan, count attention as non-causal, so that the figures of all backends are comparable.
        per_unit = of_recipe_unit(given.model, given.training.seq_len, adapters=adapters)
        self._causal = per_unit.causal * (self._images or self._tokens)
        # FLOPs of one token or image, attention counted in full.
        self.flops_per_unit = per_unit.non_causal
        self._flops = per_unit.non_causal * (self._images or self._tokens)

    def start(self) -> None:
        """Restart the clock, so that the time so far does not count for a step."""
        self._since = time.perf_counter()

    def step(self, step: int, loss: float, grad_norm: float, lr: float) -> None:
        """Report a finished step of this rank."""
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
        # A single write, because several ranks write to the same pipe.
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
        """Close the trackers."""
        for track in self._trackers:
            track.end()

    def say(self, text: str) -> None:
        """Print a line from rank 0."""
        if self._process.rank == 0:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
