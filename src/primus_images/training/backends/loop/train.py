"""The training loop, from the first step to the last, for any model."""

import gc
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from primus_images.training.backends.loop import checkpoint
from primus_images.training.backends.loop.config import RankJob, learning_rate
from primus_images.training.backends.loop.evaluation import Evaluation
from primus_images.training.backends.loop.report import Report
from primus_images.training.backends.loop.session import Batch, Data, Session, length_of, terms_of
from primus_images.training.judge.witness import Witness
from primus_images.training.run import facts, recompute
from primus_images.turbo.optimizations import active

# Python's automatic garbage collection runs at different times on each rank, and makes all other
# ranks wait.
_COLLECT_EVERY = 50


def run(
    job: RankJob,
    device: torch.device,
    session: Session,
    data: Data,
    evaluation: Evaluation | None = None,
) -> None:
    """Train all steps of the job, and write log, facts and checkpoints to the output folder."""
    loop = _Loop(job, device, session, data)
    gc.collect()
    gc.disable()
    for step in range(job.first_step, job.last_step + 1):
        loop.train(step)
        loop.prove(step)
        loop.save(step)
        if evaluation and evaluation.due(step) and loop.evaluate(evaluation, step):
            break
        if step % _COLLECT_EVERY == 0:
            gc.collect()
    loop.end(step)


class _Loop:
    """The stages of each step, and what they share."""

    def __init__(self, job: RankJob, device: torch.device, session: Session, data: Data) -> None:
        self._job = job
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
        self._batches = _batches(job, session, data, job.first_step)

    def train(self, step: int) -> None:
        """Train one step, and report it."""
        batches = self._batches
        if self._witness:
            _show(self._witness, batches)
        rate = learning_rate(self._job.training, step)
        with self._watched(step) as kernels:
            loss = _mean_loss(self._device, self._session, batches)
            # The CPU collects them while the GPU computes.
            self._batches = _batches(self._job, self._session, self._data, step + 1)
            norm = self._session.step(rate)
        # The loss has arrived: `step` waited for the gradients, which are computed after it.
        self._report.step(step, loss.item(), norm, rate)
        if step == self._job.first_step:
            with self._report.off_the_clock():
                self._write_facts(kernels | _sizes(batches))

    def _watched(self, step: int) -> AbstractContextManager[dict[str, Any]]:
        """Record the kernels of the first step, and everything of the one that is profiled."""
        first = step == self._job.first_step
        trace = None
        if step == self._job.training.profile_step and dist.get_rank() == 0:
            trace = self._job.output / "profile.json"
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
        """Record what a judge compares after ``step``, and compute a micro-batch again."""
        job = self._job
        if self._witness:
            with self._report.off_the_clock():
                self._witness.step(step)
                if step == (job.first_step + job.last_step) // 2:
                    with self._witness.busy(step):
                        _prove_checkpoint(job, step, self._session, self._witness)
        if job.verify_steps and step % job.verify_steps == 0:
            compute = partial(self._session.forward_backward, self._batches[:1], 1)
            with self._report.off_the_clock():
                recompute.compare(self._session.model_parts, step, compute)

    def save(self, step: int) -> None:
        """Save a checkpoint after ``step``, if it is due."""
        interval = self._job.training.checkpoint_interval
        if interval and (step % interval == 0 or step == self._job.last_step):
            with self._report.off_the_clock():
                checkpoint.save_if_new(self._job, step, self._session, self._report)

    def evaluate(self, evaluation: Evaluation, step: int) -> bool:
        """Evaluate after ``step``. Returns whether the run is to end."""
        evidence: AbstractContextManager[None] = nullcontext()
        if self._witness:
            evidence = self._witness.busy(step)
        with self._report.off_the_clock(), evidence:
            return evaluation.run(step, self._report)

    def end(self, step: int) -> None:
        """End the record of the run, whose last step was ``step``."""
        self._report.end()
        self._write_facts(facts.final(self._session.model_parts, step))


def _mean_loss(device: torch.device, session: Session, batches: list[Batch]) -> torch.Tensor:
    """Add up the gradients of ``batches``. Return the mean loss, on its way to the CPU."""
    terms = sum(terms_of(batch) for batch in batches)
    if dist.get_world_size() > 1:
        terms_of_rank = torch.tensor(terms, dtype=torch.float64, device=device)
        terms = round(session.total(terms_of_rank).item())
    loss = session.forward_backward(batches, terms)
    mean_loss = session.total(loss.to(torch.float64)) / terms
    return mean_loss.to("cpu", non_blocking=True)


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
