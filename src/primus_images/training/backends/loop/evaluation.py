"""Evaluation during a run, on held-out documents."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
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
from primus_images.training.backends.loop.session import IGNORED, Batch, Session, terms_of
from primus_images.training.run.job import step_of
from primus_images.training.run.logs import BY_CORPUS
from primus_images.training.run.metrics import perplexity


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The mean loss of all held-out labels, and of those of each corpus of a mixture."""

    whole: float
    by_corpus: Mapping[str, float] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """The losses by the names that metrics have."""
        named = {"eval_loss": self.whole}
        for name, loss in self.by_corpus.items():
            named[f"{BY_CORPUS}{name}"] = loss
        return named


def losses_of(sums: Mapping[str, Tensor]) -> Losses:
    """Return the losses of the sum of losses, and the number of labels, of each corpus."""
    by_corpus = {}
    for name, of_corpus in sums.items():
        total, terms = of_corpus.tolist()
        by_corpus[name] = total / terms
    total, terms = torch.stack(list(sums.values())).sum(0).tolist()
    return Losses(whole=total / terms, by_corpus=by_corpus)


class Standing:
    """How the evaluations of a run stand: which step is the best, and how many were worse since.

    ``output`` is the run's folder. A run that is resumed from ``resume_from`` goes on with the
    best one and the patience of the run before it, if these evaluated on the same text. After
    ``patience`` evaluations that are no better, the run ends; 0 means never.
    """

    def __init__(self, output: Path, patience: int, resume_from: Path | None) -> None:
        self.best: Path | None = None
        self._due: set[int] = set()
        self._worse = 0
        self._note = ""
        self._least = math.inf
        self._patience = patience
        self._output = output
        self._text = sha256_of(output / "cache" / "eval.tokens")
        if resume_from is not None:
            self._go_on(resume_from)

    def _go_on(self, folder: Path) -> None:
        fields = checkpoint.standing_of(folder)
        if not fields:
            return
        if fields["text"] != self._text:
            self._note = "the evaluations before were on other text, so they count for nothing"
            return
        best = folder.with_name(f"step-{fields['best']}")
        if not best.is_dir():
            self._note = f"{best}, the best before, is not there, so the best is looked for anew"
            return
        self._least = float(fields["least"])
        self._worse = int(fields["worse"])
        self.best = best

    def add(self, step: int, loss: float) -> bool:
        """Record the evaluation after ``step`` on this rank. Returns whether it is the best."""
        if loss < self._least:
            self._least = loss
            self._worse = 0
            self.best = checkpoint.folder_of(self._output, step)
            return True
        self._worse += 1
        return False

    def spare(self, step: int) -> None:
        """Note that the checkpoint after ``step`` is due, whether it is the best or not."""
        self._due.add(step)

    def only_best(self, folder: Path) -> bool:
        """Return whether this run saved the checkpoint in ``folder`` for its evaluation alone.

        If it was due as well, the rotation of checkpoints removes it.
        """
        own = folder == checkpoint.folder_of(self._output, step_of(folder))
        return own and step_of(folder) not in self._due

    def record(self, step: int, losses: Losses) -> None:
        """Write the exact losses after ``step`` to the run's folder, on rank 0."""
        if dist.get_rank() != 0:
            return
        row: dict[str, object] = {"step": step}
        for name, loss in losses.figures.items():
            row[name] = repr(loss)
        with (self._output / "eval.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def say_note(self, say: Callable[[str], None]) -> None:
        """Say once why the best of the run before does not count, if it does not."""
        if self._note:
            say(f"primus: {self._note}")
            self._note = ""

    def announce(
        self,
        step: int,
        losses: Losses,
        say: Callable[[str], None],
        track: Callable[[Mapping[str, float], int], None],
    ) -> bool:
        """Say what was added after ``step``, and give it to the trackers.

        Returns whether the run is to end, because its evaluations are no better any more.
        """
        loss = losses.whole
        line = f"evaluation after step {step}: loss {loss:.5f}, perplexity {perplexity(loss):.4g}"
        if self.is_best(step):
            line += ", the best so far"
        say(f"primus: {line}")
        if losses.by_corpus:
            parts = [f"{name} {part:.5f}" for name, part in losses.by_corpus.items()]
            say(f"primus: of each corpus after step {step}: {', '.join(parts)}")
        track({**losses.figures, "eval_perplexity": perplexity(loss)}, step)
        ends = 0 < self._patience <= self._worse
        if ends:
            say(
                f"primus: the last {self._worse} evaluations were no better, "
                f"so the run ends after step {step}"
            )
        return ends

    def is_best(self, step: int) -> bool:
        """Return whether the evaluation of this run after ``step`` is the best so far."""
        return self.best == checkpoint.folder_of(self._output, step)

    @property
    def fields(self) -> dict[str, Any] | None:
        """What a run that resumes after this step goes on with; None before any evaluation."""
        if self.best is None:
            return None
        return {
            "best": step_of(self.best),
            "least": repr(self._least),
            "worse": self._worse,
            "text": self._text,
        }


def batches_of(data: Documents, size: int, rank: int, ranks: int) -> Iterator[Batch]:
    """Yield the batches of ``size`` samples of which each of the data-parallel ``ranks`` takes one.

    Where ``rank`` has no samples left, it takes others that do not count.
    """
    for first_of_ranks in range(0, data.samples, size * ranks):
        first = first_of_ranks + size * rank
        batch = data.batch(first, size)
        batch["labels"][max(0, data.samples - first) :] = IGNORED
        yield batch


class Evaluation:
    """Evaluates on ``data``, and keeps the checkpoint with the least loss, which is ``best``."""

    def __init__(self, job: RankJob, session: Session, data: Documents) -> None:
        self._job = job
        self._session = session
        self._data = data
        self._parts = data.by_corpus()
        patience = job.evaluation["patience"]
        self._standing = Standing(job.output, patience, job.resume_from)

    @property
    def best(self) -> Path | None:
        """The checkpoint of the best evaluation."""
        return self._standing.best

    def spare(self, step: int) -> None:
        """See :meth:`Standing.spare`."""
        self._standing.spare(step)

    @property
    def standing(self) -> dict[str, Any] | None:
        """See :attr:`Standing.fields`."""
        return self._standing.fields

    def due(self, step: int) -> bool:
        """Return whether to evaluate after ``step``."""
        return step % self._job.evaluation["every"] == 0 or step == self._job.last_step

    def run(self, step: int, report: Report, writer: checkpoint.Writer) -> bool:
        """Evaluate after ``step``, and let ``writer`` save a checkpoint if it is the best. All
        ranks.

        Returns whether the run is to end early, because its evaluations are no better any more.
        """
        standing = self._standing
        standing.say_note(report.say)
        losses = self._losses()
        standing.record(step, losses)
        former = standing.best
        if standing.add(step, losses.whole):
            self._keep(step, writer, former)
        return standing.announce(step, losses, report.say, report.track)

    def loss(self) -> float:
        """Return the mean loss of all held-out labels. All ranks."""
        total, terms = self._sums(self._data).tolist()
        return float(total / terms)

    def _losses(self) -> Losses:
        if not self._parts:
            return Losses(whole=self.loss())
        return losses_of({name: self._sums(part) for name, part in self._parts.items()})

    def _sums(self, data: Documents) -> Tensor:
        """Return the sum of the losses of ``data``, and the number of its labels. All ranks."""
        session = self._session
        size = self._job.training.micro_batch_size
        sums: list[Tensor] = []
        for batch in batches_of(data, size, session.data_rank, self._job.data_parallel):
            loss = session.loss(batch).double()
            sums.append(torch.stack([loss, loss.new_tensor(terms_of(batch))]))
        return session.total(torch.stack(sums).sum(0))

    def _keep(self, step: int, writer: checkpoint.Writer, former: Path | None) -> None:
        """Save the best checkpoint. Then remove the former, unless it was due anyway."""
        writer.save(step, self.standing)
        if former is not None and self._standing.only_best(former):
            writer.then(partial(shutil.rmtree, former, ignore_errors=True))
