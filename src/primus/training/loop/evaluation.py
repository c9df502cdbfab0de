"""Evaluation on held-out documents during a run: the loss, the best checkpoint, and when to stop early."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from primus.training.job import step_of
from primus.training.loop.config import RankJob
from primus.training.loop.data import Documents
from primus.training.loop.session import Sharded
from primus.training.metrics import perplexity


class Evaluation:
    """Evaluates on ``data``, and keeps the checkpoint with the least loss, which is ``best``."""

    def __init__(self, job: RankJob, session: Sharded, data: Documents) -> None:
        self._job, self._session, self._data = job, session, data
        self._least, self._worse = math.inf, 0
        self.best: Path | None = None

    def due(self, step: int) -> bool:
        """Return whether to evaluate after ``step``: every ``eval.every`` steps, and after the last one."""
        return step % self._job.evaluation["every"] == 0 or step == self._job.last_step

    @property
    def over(self) -> bool:
        """Whether the run is to end early."""
        return 0 < self._job.evaluation["patience"] <= self._worse

    def loss(self) -> float:
        """Return the mean loss of all held-out labels. All ranks."""
        session, data, size = self._session, self._data, self._job.training.micro_batch_size
        sums, mine = [], size * session.data_rank
        for start in range(0, data.samples, size * self._job.data_parallel):
            batch = data.batch(start + mine, size)
            # Where a rank has no samples left, it takes others that do not count.
            batch["labels"][max(0, data.samples - start - mine) :] = -100
            loss = session.loss(batch).double()
            sums.append(torch.stack([loss, loss.new_tensor(data.terms(batch))]))
        total, terms = session.total(torch.stack(sums).sum(0)).tolist()
        return float(total / terms)

    def run(
        self, step: int, save: Callable[[int], Path], say: Callable[[str], None],
        track: Callable[[Mapping[str, float], int], None],
    ) -> None:  # fmt: skip
        """Evaluate after ``step``, ``save`` a checkpoint if it is the best, and ``say`` and ``track`` it. All ranks."""
        loss, job = self.loss(), self._job
        self._worse = 0 if loss < self._least else self._worse + 1
        before = self.best
        if not self._worse:
            self._least, self.best = loss, save(step)
        if dist.get_rank() == 0:
            with (job.output / "eval.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "eval_loss": repr(loss)}) + "\n")
            every = job.training.checkpoint_interval
            if before and before != self.best and not (every and step_of(before) % every == 0):
                shutil.rmtree(before)
        best = "" if self._worse else ", the best so far"
        say(f"primus: evaluation after step {step}: loss {loss:.5f}, perplexity {perplexity(loss):.4g}{best}")
        track({"eval_loss": loss, "eval_perplexity": perplexity(loss)}, step)
        if self.over:
            say(f"primus: the last {self._worse} evaluations were no better, so the run ends after step {step}")
