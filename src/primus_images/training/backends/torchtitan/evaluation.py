"""Evaluation of torchtitan's model during a run, on held-out documents."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from primus_images.training.backends.loop import checkpoint, evaluation
from primus_images.training.backends.loop.data import Documents
from primus_images.training.backends.loop.session import IGNORED, Batch
from primus_images.training.run import facts, identity
from primus_images.training.text.tokens import stored


class Evaluation:
    """Evaluates the model of a torchtitan ``trainer``. ``job`` is the content of ``job.json``.

    torchtitan's own validator reads a data set of the hub without end, and keeps no best weights.
    ``interval`` is the number of steps between checkpoints; 0 means only the best ones are saved.
    """

    def __init__(self, job: Mapping[str, Any], trainer: Any) -> None:
        self._job = job
        self._trainer = trainer
        self._output = Path(job["output"])
        resume_from = None
        if job["resume_from"] is not None:
            resume_from = Path(job["resume_from"])
        patience = job["evaluation"]["patience"]
        self.standing = evaluation.Standing(self._output, patience, resume_from)
        self._former: list[Path] = []
        training = trainer.job_config.training
        tokens = stored(self._output / "cache", "eval")
        self._data = Documents(tokens, training.seq_len, trainer.job_config.debug.seed)
        self._parts = self._data.by_corpus()
        self._size = training.local_batch_size
        self.interval = int(job["config"].get("checkpoint.interval", 0))

    def due(self, step: int) -> bool:
        """Return whether to evaluate after ``step``."""
        return step % self._job["evaluation"]["every"] == 0 or step == self._job["last_step"]

    def run(self, step: int) -> bool:
        """Evaluate after ``step``. All ranks. Returns whether the run is to end early."""
        standing = self.standing
        standing.say_note(_say)
        losses = self._losses()
        standing.record(step, losses)
        former = standing.best
        best = standing.add(step, losses.whole)
        if best and former is not None:
            self._former.append(former)
        return standing.announce(step, losses, _say, self._track)

    def _track(self, figures: Mapping[str, float], step: int) -> None:
        for tracker in self._trainer.metrics_processor.trackers:
            tracker.log(figures, step)

    @property
    def spared(self) -> list[Path]:
        """The best checkpoint, and the former best ones until it is complete."""
        if self.standing.best is None:
            return []
        return [*self._former, self.standing.best]

    def remove_former(self) -> None:
        """Remove the former best checkpoints, unless they were due anyway. One rank.

        They stay until the best one is complete.
        """
        if self.standing.best not in identity.complete_checkpoints(self._output):
            return
        for folder in self._former:
            if self.standing.only_best(folder):
                shutil.rmtree(folder, ignore_errors=True)
        self._former = []

    def note(self, step: int) -> None:
        """Write beside the checkpoint after ``step`` what a resumed run goes on with. One rank."""
        fields = self.standing.fields
        if fields is not None:
            checkpoint.write_standing(checkpoint.folder_of(self._output, step), fields)

    def _losses(self) -> evaluation.Losses:
        if not self._parts:
            return evaluation.Losses(whole=self._mean_loss())
        sums = {name: self._total(self._batches_of(part)) for name, part in self._parts.items()}
        return evaluation.losses_of(sums)

    def _mean_loss(self) -> float:
        """Return the mean loss of all held-out labels. All ranks."""
        total, terms = self._total(self._batches()).tolist()
        return float(total / terms)

    @torch.no_grad()
    def _total(self, batches: Iterator[Batch]) -> Tensor:
        """Return the sum of the losses of ``batches``, and the number of labels. All ranks."""
        trainer = self._trainer
        with _evaluating(trainer.model_parts):
            sums = torch.stack([self._sums(batch) for batch in batches]).sum(0)
        # Only the last stage of a pipeline has a loss.
        for name in ("loss", "pp"):
            mesh = trainer.parallel_dims.get_optional_mesh(name)
            if mesh:
                dist.all_reduce(sums, group=mesh.get_group())
        return sums

    def _batches(self) -> Iterator[Batch]:
        return self._batches_of(self._data)

    def _batches_of(self, data: Documents) -> Iterator[Batch]:
        rank = 0
        mesh = self._trainer.parallel_dims.get_optional_mesh("batch")
        if mesh:
            rank = mesh.get_local_rank()
        return evaluation.batches_of(data, self._size, rank, self._job["data_parallel"])

    def _sums(self, batch: Batch) -> Tensor:
        """Return the sum of this rank's losses of ``batch``, and the number of its labels."""
        trainer = self._trainer
        tokens = batch["input_ids"].to(trainer.device)
        prepared = trainer.post_dataloading_process(
            {"input": tokens}, batch["labels"].to(trainer.device)
        )
        inputs, labels, extra_inputs, options = prepared
        with trainer.train_context():
            if trainer.parallel_dims.pp_enabled:
                losses = self._of_stages(inputs, labels, extra_inputs, options)
                if not trainer.pp_has_last_stage:
                    return torch.zeros(2, dtype=torch.float64, device=trainer.device)
                loss = torch.stack(losses).sum()
            else:
                with trainer.maybe_enable_amp:
                    output = trainer.model_parts[0](inputs, **extra_inputs, **options)
                    loss = trainer.loss_fn(output, labels)
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        terms = (labels != IGNORED).sum()
        return torch.stack([loss.double().to(trainer.device), terms.double()])

    def _of_stages(
        self,
        inputs: Tensor,
        labels: Tensor,
        extra_inputs: Mapping[str, Tensor],
        options: Mapping[str, Any],
    ) -> list[Tensor]:
        """Return the losses of the parts of a batch that the pipeline takes one after the other."""
        trainer = self._trainer
        losses: list[Tensor] = []
        target = None
        if trainer.pp_has_last_stage:
            target = labels
        arguments: tuple[Tensor, ...] = ()
        if trainer.pp_has_first_stage:
            arguments = (inputs,)
            options = {**extra_inputs, **options}
        trainer.labels_of_step = torch.ones((), device=trainer.device)
        trainer.pp_schedule.eval(*arguments, **options, target=target, losses=losses)
        return losses


@contextmanager
def _evaluating(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluate in the context, and leave nothing of it in ``parts``."""
    # The biases that balance experts are updated by these counts.
    counts: dict[Tensor, Tensor] = {}
    for part in parts:
        part.eval()
        for name, buffer in part.named_buffers():
            if name.endswith("tokens_per_expert"):
                counts[buffer] = buffer.clone()
    yield
    for part in parts:
        part.train()
        facts.reshard(part)
    for buffer, count in counts.items():
        buffer.copy_(count)


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        # A single write, because several ranks write to the same pipe.
        print(f"{text}\n", end="", flush=True)
