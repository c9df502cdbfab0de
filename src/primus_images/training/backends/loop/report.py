"""What a run tells of its steps: lines on the terminal, ``exact.jsonl``, and trackers."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from primus_images.training.backends.loop.config import RankJob
from primus_images.training.backends.loop.process import peak_memory
from primus_images.training.backends.loop.trackers import (
    NAMES,
    Tracker,
    peak_flops,
    shares_of_peak,
    trackers_of,
)
from primus_images.training.run.metrics import of_recipe_unit


def _rounded(tflops: float) -> str:
    """Return FLOP/s for the log, with at least three digits, also of a small model on a CPU."""
    if tflops < 0.1:
        return f"{tflops:.8f}"
    if tflops < 10:
        return f"{tflops:.5f}"
    return f"{tflops:,.2f}"


class Report:
    """Writes the lines that :mod:`primus_images.training.run.logs` reads.

    A step's time is that since the last one. ``trained`` is the number of weights of LoRA's
    adapters, or None if all weights are trained. ``per_unit`` has the FLOPs of one token or image,
    if they are known.
    """

    def __init__(self, job: RankJob, device: torch.device, trained: int | None = None) -> None:
        self._device = device
        # Tensor-parallel ranks share samples. Dividing by all ranks gives a figure per rank for any
        # layout.
        self._tokens = job.global_batch * job.training.seq_len / job.world_size
        self._tokens_of_image = 0
        if job.model.of_images:
            self._tokens_of_image = job.training.seq_len
        self._exact = job.output / "exact.jsonl"
        self._trackers: list[Tracker] = []
        if dist.get_rank() == 0:
            names = [name for name in NAMES if getattr(job.training, name)]
            self._trackers = trackers_of(names, job.output, job.config)
        self._tokens_of_step = job.global_batch * job.training.seq_len
        self._peak = None
        if device.type == "cuda":
            gpu = torch.cuda.get_device_properties(device)
            self._peak = peak_flops(gpu.name, gpu.multi_processor_count, job.precision)
        self._began = time.perf_counter()
        self.per_unit = None
        if job.model.has_formula:
            self.per_unit = of_recipe_unit(job.model, job.training.seq_len, adapters=trained)
        self.start()

    def start(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Count the time in the context for no step."""
        # A GPU computes later than it is told to. What it was told before is of the step.
        self._wait_for_device()
        began = time.perf_counter()
        yield
        self._wait_for_device()
        self._since += time.perf_counter() - began

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def step(
        self, step: int, loss: float, grad_norm: float, lr: float, data_hash: str | None = None
    ) -> None:
        """Report a finished step of this rank. ``data_hash`` is the fingerprint of its samples."""
        now = time.perf_counter()
        speed = self._tokens / (now - self._since)
        self._since = now
        units = speed
        if self._tokens_of_image:
            units = speed / self._tokens_of_image
        # Like torchtitan, count attention as non-causal, so that the figures of all backends are
        # comparable.
        rates = {}
        flops = "N/A"
        if self.per_unit:
            rates = self.per_unit.tera(units)
            flops = _rounded(rates["tflops_non_causal"])
        memory, share = peak_memory(self._device)
        # A single write, because several ranks write to the same pipe.
        print(
            f"step: {step:2}  loss: {loss:8.5f}  grad_norm: {grad_norm:7.4f}  "
            f"memory: {memory:5.2f}GiB({share:.2f}%)  "
            f"tps: {round(speed):,}  tflops: {flops}  mfu: N/A\n",
            end="",
            flush=True,
        )
        if dist.get_rank() != 0:
            return
        seconds = round(now - self._began, 3)
        exact = {
            "step": step,
            "loss": repr(loss),
            "grad_norm": repr(grad_norm),
            "lr": lr,
            "seconds": seconds,
            # What the rate counts, for a judge.
            "tokens": self._tokens,
        }
        if data_hash is not None:
            exact["data_hash"] = data_hash
        with self._exact.open("a", encoding="utf-8") as file:
            file.write(json.dumps(exact) + "\n")
        figures = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": step * self._tokens_of_step,
            "tokens_per_second": speed,
            "seconds": seconds,
            "memory_gib": memory,
            **rates,
            **shares_of_peak(rates, self._peak),
        }
        if self._tokens_of_image:
            figures["images_per_second"] = units
        self.track(figures, step)

    def track(self, figures: Mapping[str, float], step: int) -> None:
        """Record ``figures`` after ``step`` with the trackers."""
        for tracker in self._trackers:
            tracker.log(figures, step)

    def end(self) -> None:
        """End the trackers."""
        for tracker in self._trackers:
            tracker.close()

    def say(self, text: str) -> None:
        """Print a line from rank 0."""
        if dist.get_rank() == 0:
            print(f"{text}\n", end="", flush=True)
