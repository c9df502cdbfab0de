"""What a run tells of its steps: lines on the terminal, ``exact.jsonl``, and trackers."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from primus_images.training.backends.loop.config import RankJob
from primus_images.training.backends.loop.process import peak_memory
from primus_images.training.run.metrics import of_recipe_unit


class Tracker(Protocol):
    """Records the figures of steps."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record ``figures`` after ``step``."""

    def close(self) -> None:
        """End the record."""


class TensorBoard:
    """Event files in the folder ``tensorboard``."""

    def __init__(self, job: RankJob) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(job.output / "tensorboard"))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record ``figures`` after ``step``."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """End the record."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project ``primus``."""

    def __init__(self, job: RankJob) -> None:
        import wandb

        self._run: Any = wandb.init(
            project="primus", name=job.output.name, dir=str(job.output), config=dict(job.config)
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record ``figures`` after ``step``."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """End the record."""
        self._run.finish()


class MLflow:
    """A run of the experiment ``primus``."""

    def __init__(self, job: RankJob) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.set_experiment("primus")
        mlflow.start_run(run_name=job.output.name)
        mlflow.log_params(dict(job.config))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Record ``figures`` after ``step``."""
        self._mlflow.log_metrics(dict(figures), step)

    def close(self) -> None:
        """End the record."""
        self._mlflow.end_run()


def _trackers(job: RankJob) -> list[Tracker]:
    trackers: list[Tracker] = []
    if job.training.tensorboard:
        trackers.append(TensorBoard(job))
    if job.training.wandb:
        trackers.append(WeightsAndBiases(job))
    if job.training.mlflow:
        trackers.append(MLflow(job))
    return trackers


def _rounded(tflops: float) -> str:
    """Return FLOP/s for the log. Those of a small model on a CPU would be 0.00."""
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
            self._trackers = _trackers(job)
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
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def step(self, step: int, loss: float, grad_norm: float, lr: float) -> None:
        """Report a finished step of this rank."""
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
        exact = {"step": step, "loss": repr(loss), "grad_norm": repr(grad_norm)}
        with self._exact.open("a", encoding="utf-8") as file:
            file.write(json.dumps(exact) + "\n")
        figures = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_second": speed,
            "memory_gib": memory,
            **rates,
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
