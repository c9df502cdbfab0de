"""Evaluation during a run, on held-out documents."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from primus_images.files import sha256_of
from primus_images.training.backends.loop import checkpoint
from primus_images.training.backends.loop.config import RankJob
from primus_images.training.backends.loop.data import Documents
from primus_images.training.backends.loop.report import Report
from primus_images.training.backends.loop.session import IGNORED, Session, terms_of
from primus_images.training.run.job import step_of
from primus_images.training.run.metrics import perplexity


class Evaluation:
    """Evaluates on ``data``, and keeps the checkpoint with the least loss, which is ``best``.

    A resumed run goes on with the best one and the patience of the run before it.
    """

    def __init__(self, job: RankJob, session: Session, data: Documents) -> None:
        self._job = job
        self._session = session
        self._data = data
        self._least = math.inf
        self._worse = 0
        self.best: Path | None = None
        self._text = sha256_of(job.output / "cache" / "eval.tokens")
        self._note = ""
        if job.resume_from is not None:
            self._go_on(job.resume_from)

    def _go_on(self, folder: Path) -> None:
        standing = checkpoint.standing_of(folder)
        if not standing:
            return
        if standing["text"] != self._text:
            self._note = "the evaluations before were on other text, so they count for nothing"
            return
        best = folder.with_name(f"step-{standing['best']}")
        if not best.is_dir():
            self._note = f"{best}, the best before, is not there, so the best is looked for anew"
            return
        self._least = float(standing["least"])
        self._worse = int(standing["worse"])
        self.best = best

    @property
    def standing(self) -> dict[str, Any] | None:
        """What a run that resumes after this step goes on with; None before any evaluation."""
        if self.best is None:
            return None
        return {
            "best": step_of(self.best),
            "least": repr(self._least),
            "worse": self._worse,
            "text": self._text,
        }

    def due(self, step: int) -> bool:
        """Return whether to evaluate after ``step``."""
        return step % self._job.evaluation["every"] == 0 or step == self._job.last_step

    def run(self, step: int, report: Report) -> bool:
        """Evaluate after ``step``, and save a checkpoint if it is the best. All ranks.

        Returns whether the run is to end early, because its evaluations are no better any more.
        """
        if self._note:
            report.say(f"primus: {self._note}")
            self._note = ""
        loss = self.loss()
        self._record(step, loss)
        if loss < self._least:
            self._least = loss
            self._worse = 0
            self._keep(step, report)
            comment = ", the best so far"
        else:
            self._worse += 1
            comment = ""
        report.say(
            f"primus: evaluation after step {step}: loss {loss:.5f}, "
            f"perplexity {perplexity(loss):.4g}{comment}"
        )
        report.track({"eval_loss": loss, "eval_perplexity": perplexity(loss)}, step)
        ends = 0 < self._job.evaluation["patience"] <= self._worse
        if ends:
            report.say(
                f"primus: the last {self._worse} evaluations were no better, "
                f"so the run ends after step {step}"
            )
        return ends

    def loss(self) -> float:
        """Return the mean loss of all held-out labels. All ranks."""
        size = self._job.training.micro_batch_size
        first_of_rank = size * self._session.data_rank
        sums: list[Tensor] = []
        for first_of_ranks in range(0, self._data.samples, size * self._job.data_parallel):
            first = first_of_ranks + first_of_rank
            batch = self._data.batch(first, size)
            # Where a rank has no samples left, it takes others that do not count.
            batch["labels"][max(0, self._data.samples - first) :] = IGNORED
            loss = self._session.loss(batch).double()
            sums.append(torch.stack([loss, loss.new_tensor(terms_of(batch))]))
        total, terms = self._session.total(torch.stack(sums).sum(0)).tolist()
        return float(total / terms)

    def _record(self, step: int, loss: float) -> None:
        if dist.get_rank() != 0:
            return
        with (self._job.output / "eval.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "eval_loss": repr(loss)}) + "\n")

    def _keep(self, step: int, report: Report) -> None:
        """Save the best checkpoint. Remove the former, if it is this run's and not due anyway."""
        former = self.best
        self.best = checkpoint.folder_of(self._job.output, step)
        checkpoint.save_if_new(self._job, step, self._session, report, self.standing)
        if former is None or former.parent != self.best.parent or dist.get_rank() != 0:
            return
        interval = self._job.training.checkpoint_interval
        if interval == 0 or step_of(former) % interval != 0:
            shutil.rmtree(former)
