"""The training loop, from the first step to the last, for any model."""

import gc
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from primus_images.training.backends.loop import checkpoint
from primus_images.training.backends.loop.config import RankJob, learning_rate, profile_of
from primus_images.training.backends.loop.evaluation import Evaluation
from primus_images.training.backends.loop.report import Report
from primus_images.training.backends.loop.session import (
    Batch,
    Data,
    Session,
    Sharded,
    length_of,
    samples_of,
    terms_of,
)
from primus_images.training.judge.witness import Witness
from primus_images.training.run import facts, fingerprint, recompute
from primus_images.turbo.optimizations import active

# Python's automatic garbage collection runs at different times on each rank, and makes all other
# ranks wait. Most collections leave out what earlier ones left, which grows with every checkpoint.
_COLLECT_NEW_EVERY = 50
_COLLECT_ALL_EVERY = 1000


def run(
    job: RankJob,
    device: torch.device,
    session: Session,
    data: Data,
    evaluation: Evaluation | None = None,
) -> None:
    """Train all steps of the job, and write log, facts and checkpoints to the output folder."""
    loop = _Loop(job, device, session, data, evaluation)
    gc.collect()
    gc.disable()
    for step in range(job.first_step, job.last_step + 1):
        loop.train(step)
        loop.prove(step)
        ends = loop.evaluate(step)
        loop.save(step)
        if ends:
            break
        if step == job.first_step:
            _keep_what_compiled()
        elif step % _COLLECT_ALL_EVERY == 0:
            gc.collect()
        elif step % _COLLECT_NEW_EVERY == 0:
            gc.collect(1)
    loop.end(step)


def _keep_what_compiled() -> None:
    """Leave what exists after the first step out of later collections.

    The compiler makes so many objects that each collection would take 0.6 s.
    """
    gc.collect()
    gc.freeze()


class _Loop:
    """The stages of each step, and what they share."""

    def __init__(
        self,
        job: RankJob,
        device: torch.device,
        session: Session,
        data: Data,
        evaluation: Evaluation | None,
    ) -> None:
        self._job = job
        self._evaluation = evaluation
        self._device = device
        self._session = session
        self._data = data
        self._facts = {
            **facts.static(session.model_parts, device.type),
            "seed": job.training.seed,
            "vocab_size": job.model.vocab_size,
            "mode": job.mode,
        }
        adapters = None
        if job.mode == "lora":
            adapters = self._facts["trainable_parameters"]
        self._report = Report(job, device, adapters)
        if self._report.per_unit:
            self._facts["flops_per_unit"] = self._report.per_unit.non_causal
        if job.resume_from is not None:
            checkpoint.load(job.resume_from, session)
            self._report.say(f"resumed from {job.resume_from}")
        self._witness = None
        if job.witness:
            self._witness = _witness(job, session)
        self._repeated = None
        if job.judge_every:
            assert isinstance(session, Sharded)  # the command refuses the others
            self._repeated = recompute.Repeated(
                session.model_parts,
                session.optimizer,
                job.judge_every,
                self._report.off_the_clock,
            )
        self._began = time.perf_counter()
        self._collect(job.first_step)
        self._writer = checkpoint.Writer(job, session, self._report)
        interval = job.training.checkpoint_interval
        seconds = job.saving.get("seconds", 0.0)
        self._schedule = checkpoint.Schedule(interval, seconds, device)

    def train(self, step: int) -> None:
        """Train one step, and report it."""
        batches = self._batches
        samples = self._samples
        if self._witness:
            _show(self._witness, batches)
        rate = learning_rate(self._job.training, step)
        with self._watched(step) as kernels:
            terms, data_hash = self._totals(batches, samples)
            loss = self._mean_loss(batches, terms, step)
            # The CPU collects them while the GPU computes.
            self._collect(step + 1)
            with self._update(step):
                norm = self._session.step(rate)
        if self._witness:
            self._witness.end_time(step)
        # The loss has arrived: `step` waited for the gradients, which are computed after it.
        self._report.step(step, loss.item(), norm, rate, data_hash)
        if step == self._job.first_step:
            with self._report.off_the_clock(), self._evidence(step):
                self._write_facts(kernels | _sizes(batches))

    def _collect(self, step: int) -> None:
        """Collect the micro-batches of ``step``, and the sum of their samples' numbers."""
        self._batches = _batches(self._job, self._session, self._data, step)
        self._samples = fingerprint.added(samples_of(batch) for batch in self._batches)

    def _totals(self, batches: list[Batch], samples: int) -> tuple[int, str | None]:
        """Return the number of terms in the loss of the step, and the fingerprint of its samples.

        ``samples`` is the sum of the numbers of this rank's samples. Images have no fingerprint.
        """
        terms = sum(terms_of(batch) for batch in batches)
        if dist.get_world_size() > 1:
            of_rank = torch.tensor([terms, samples], device=self._device)
            terms, samples = self._session.total(of_rank).tolist()
        if self._job.model.of_images:
            return terms, None
        return terms, fingerprint.written(samples)

    def _mean_loss(self, batches: list[Batch], terms: int, step: int) -> torch.Tensor:
        """Add up the gradients of ``batches``. Return the mean loss, on its way to the CPU."""
        session = self._session
        if self._repeated and self._repeated.due(step):
            compute = partial(session.forward_backward, batches, terms)
            loss = self._repeated.gradients(step, compute)
        else:
            loss = session.forward_backward(batches, terms)
        mean_loss = session.total(loss.to(torch.float64)) / terms
        return mean_loss.to("cpu", non_blocking=True)

    def _update(self, step: int) -> AbstractContextManager[None]:
        """Compare the update in the context, if ``step`` is computed twice."""
        if self._repeated and self._repeated.due(step):
            return self._repeated.update(step)
        return nullcontext()

    def _watched(self, step: int) -> AbstractContextManager[dict[str, Any]]:
        """Record the kernels of the first step, and everything of those that are profiled."""
        first = step == self._job.first_step
        trace = None
        name = profile_of(self._job.training, step)
        if name and dist.get_rank() == 0:
            trace = self._job.output / name
        if first:
            self._report.start()
        if not first and trace is None:
            return nullcontext({})
        return facts.watching(
            self._session.model_parts,
            self._session.linear_types,
            compiled=self._job.training.compile,
            trace=trace,
        )

    def _write_facts(self, more: Mapping[str, Any]) -> None:
        self._facts |= {**more, **active(self._job.turbo)}
        facts.write(self._job.output / "facts.json", self._facts)

    def prove(self, step: int) -> None:
        """Record what a judge compares after ``step``, and what the next step starts from."""
        job = self._job
        if self._witness:
            with self._report.off_the_clock():
                self._witness.step(step)
                if step == (job.first_step + job.last_step) // 2:
                    with self._witness.busy(step):
                        _prove_checkpoint(job, step, self._session, self._witness)
        if self._repeated:
            self._repeated.finished(step)

    def save(self, step: int) -> None:
        """Save a checkpoint after ``step``, if it is due, and remove the oldest one.

        An evaluation after the step is over. The checkpoint of the best one stays.
        """
        self._writer.raise_failure()
        if not self._schedule.due(step, last=step == self._job.last_step):
            return
        standing = None
        spared: list[Path] = []
        if self._evaluation:
            self._evaluation.spare(step)
            standing = self._evaluation.standing
            if self._evaluation.best:
                spared.append(self._evaluation.best)
        with self._report.off_the_clock(), self._evidence(step):
            self._writer.save(step, standing)
            keep = int(self._job.saving.get("keep", 0))
            self._writer.then(partial(checkpoint.rotate, self._job.output, keep, spared))

    def evaluate(self, step: int) -> bool:
        """Evaluate after ``step``, if it is due. Returns whether the run is to end."""
        evaluation = self._evaluation
        if evaluation is None or not evaluation.due(step):
            return False
        with self._report.off_the_clock(), self._evidence(step):
            return evaluation.run(step, self._report, self._writer)

    def _evidence(self, step: int) -> AbstractContextManager[None]:
        """Let the witness count the time in the context for no step."""
        if self._witness:
            return self._witness.busy(step)
        return nullcontext()

    def end(self, step: int) -> None:
        """End the record of the run, whose last step was ``step``, and its last checkpoint."""
        self._writer.wait()
        if self._repeated:
            self._report.say(f"primus: {self._repeated.cost(time.perf_counter() - self._began)}")
        self._report.end()
        self._write_facts(facts.final(self._session.model_parts, step))


def _batches(job: RankJob, session: Session, data: Data, step: int) -> list[Batch]:
    # Each rank takes consecutive samples, so those of a step are the same for any number of ranks
    # and micro-batches.
    size = job.training.micro_batch_size
    first = (step - 1) * job.global_batch + session.data_rank * size * job.accumulation
    return [data.batch(first + part * size, size) for part in range(job.accumulation)]


def _sizes(batches: list[Batch]) -> dict[str, int]:
    return {
        "seq_len": length_of(batches[0]),
        "local_batch_size": len(next(iter(batches[0].values()))),
        "accumulation_steps": len(batches),
    }


def _witness(job: RankJob, session: Session) -> Witness:
    examined = job.examined
    if not job.blocks:
        examined = ()
    witness = Witness(
        job.output,
        session.model_parts,
        session.data_rank,
        examined=examined,
        source=session,
    )
    witness.first_weights(job.first_step - 1)
    return witness


def _show(witness: Witness, batches: list[Batch]) -> None:
    for batch in batches:
        parts = dict(batch)
        parts.pop("ends", None)  # the reference finds documents by their positions
        if "input_ids" in parts:
            parts = {"inputs": parts.pop("input_ids"), **parts}
        witness.batch(**parts)


def _prove_checkpoint(job: RankJob, step: int, session: Session, witness: Witness) -> None:
    """Save a checkpoint, erase all that was trained, and load it. Later steps show what is lost."""
    folder = checkpoint.save(job.output / "cache", step, session, job.identity)
    witness.erase()
    checkpoint.load(folder, session)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    witness.loaded()
