"""The training loop, from the first step to the last, for any model: the report of each step, and
evaluations.
"""

import gc
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from primus_images.training.backends.loop.config import RankJob, learning_rate
from primus_images.training.backends.loop.data import Documents
from primus_images.training.backends.loop.process import peak_memory
from primus_images.training.backends.loop.session import Batch, Data, Session, Sharded, terms_of
from primus_images.training.judge.witness import Witness
from primus_images.training.run import facts, identity, recompute
from primus_images.training.run.failure import text_of
from primus_images.training.run.job import step_of
from primus_images.training.run.metrics import of_recipe_unit, perplexity
from primus_images.turbo.optimizations import active


def save_checkpoint(output: Path, step: int, session: Session, fields: Mapping[str, Any]) -> Path:
    """Save model, optimizer and random states after ``step``, with the run's identity. Returns the
    whole folder.
    """
    folder = output / "checkpoint" / f"step-{step}"
    unfinished = folder.with_name(f".{folder.name}")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    dcp.save({**session.state_dict(), **_random_states()}, checkpoint_id=unfinished)
    dist.barrier()
    if dist.get_rank() == 0:
        identity.seal(unfinished, fields)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    dist.barrier()
    return folder


def load_checkpoint(folder: Path, session: Session) -> None:
    """Load the checkpoint in ``folder``. Raises SystemExit if it is damaged.

    Random states belong to ranks, so they are not loaded if the number of ranks differs.
    """
    state = session.state_dict()
    try:
        identity.verify_tensors(folder)
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        if sum(name.startswith("random.") for name in metadata) == dist.get_world_size():
            state |= _random_states()
        dcp.load(state, checkpoint_id=folder)
    except (CheckpointException, Exception) as error:
        raise SystemExit(f"{folder}: the checkpoint cannot be read: {text_of(error)}") from error
    random = state.pop(f"random.{dist.get_rank()}", None)
    if random is not None:
        _set_random_state(random)
    session.load_state_dict(state)


def _prove_checkpoint(job: RankJob, step: int, session: Session, witness: Witness) -> None:
    """Save a checkpoint, erase everything that was trained, and load it. Later steps show what is
    lost.
    """
    folder = save_checkpoint(job.output / "cache", step, session, job.identity)
    witness.erase()
    load_checkpoint(folder, session)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    witness.loaded()


def _random_states() -> dict[str, Any]:
    states = [
        torch.get_rng_state(),
        *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else []),
    ]
    return {f"random.{dist.get_rank()}": torch.cat(states)}


def _set_random_state(state: torch.Tensor) -> None:
    host = torch.get_rng_state().numel()
    torch.set_rng_state(state[:host])
    if torch.cuda.is_available() and state.numel() > host:
        torch.cuda.set_rng_state(state[host:])


def _trackers(
    job: RankJob,
) -> Iterator[tuple[Callable[[Mapping[str, float], int], object], Callable[[], object]]]:
    """Yield what records the figures of a step, and what ends it, of each tracker that the job asks
    for.
    """
    if job.training.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(job.output / "tensorboard"))
        yield partial(_add_to, board), board.close
    if job.training.wandb:
        import wandb

        run = wandb.init(
            project="primus", name=job.output.name, dir=str(job.output), config=dict(job.config)
        )
        yield lambda figures, step: run.log(dict(figures), step=step), run.finish
    if job.training.mlflow:
        import mlflow

        mlflow.set_experiment("primus")
        mlflow.start_run(run_name=job.output.name)
        mlflow.log_params(dict(job.config))
        yield lambda figures, step: mlflow.log_metrics(dict(figures), step), mlflow.end_run


def _add_to(board: Any, figures: Mapping[str, float], step: int) -> None:
    for name, value in figures.items():
        board.add_scalar(name, value, step)
    board.flush()


class Report:
    """Writes the lines that :mod:`primus_images.training.run.logs` reads; a step's time is that
    since the last call. ``adapters`` is the number of weights that LoRA trains, or None if all
    weights are trained.
    """

    def __init__(self, job: RankJob, device: torch.device, adapters: int | None = None) -> None:
        self._device = device
        # Tensor-parallel ranks share samples. Dividing by all ranks gives a figure per rank for any
        # layout.
        self._tokens = job.global_batch * job.training.seq_len / job.world_size
        if job.model.of_images:
            self._image = job.training.seq_len
        else:
            self._image = 0
        self._exact = job.output / "exact.jsonl"
        if dist.get_rank():
            self._trackers = []
        else:
            self._trackers = [*_trackers(job)]
        self.start()
        # FLOPs of one token or image, if they are known.
        self.per_unit = None
        if job.model.has_formula:
            self.per_unit = of_recipe_unit(job.model, job.training.seq_len, adapters=adapters)

    def start(self) -> None:
        """Restart the clock, so that the time so far does not count for a step."""
        self._since = time.perf_counter()

    def step(self, step: int, loss: float, grad_norm: float, lr: float) -> None:
        """Report a finished step of this rank."""
        now = time.perf_counter()
        seconds = now - self._since
        self._since = now
        memory, share = peak_memory(self._device)
        speed = self._tokens / seconds
        units = speed / (self._image or 1)
        # Like torchtitan, count attention as non-causal, so that the figures of all backends are
        # comparable.
        if self.per_unit:
            rates = self.per_unit.tera(units)
        else:
            rates = {}
        flops = "N/A"
        if rates:
            flops = f"{rates['tflops_non_causal']:,.2f}"
        # A single write, because several ranks write to the same pipe.
        print(
            f"step: {step:2}  loss: {loss:8.5f}  grad_norm: {grad_norm:7.4f}  memory: "
            f"{memory:5.2f}GiB({share:.2f}%)  "
            f"tps: {round(speed):,}  tflops: {flops}  mfu: N/A\n",
            end="",
            flush=True,
        )
        if dist.get_rank():
            return
        with self._exact.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"step": step, "loss": repr(loss), "grad_norm": repr(grad_norm)}) + "\n"
            )
        figures = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_second": speed,
            "memory_gib": memory,
            **rates,
        }
        self.track(figures | ({"images_per_second": units} if self._image else {}), step)

    def track(self, figures: Mapping[str, float], step: int) -> None:
        """Record figures after ``step`` with the trackers."""
        for track, _ in self._trackers:
            track(figures, step)

    def end(self) -> None:
        """End the trackers."""
        for _, end in self._trackers:
            end()

    def say(self, text: str) -> None:
        """Print a line from rank 0."""
        if dist.get_rank() == 0:
            print(f"{text}\n", end="", flush=True)


class Evaluation:
    """Evaluates on ``data``, and keeps the checkpoint with the least loss, which is ``best``."""

    def __init__(self, job: RankJob, session: Sharded, data: Documents) -> None:
        self._job = job
        self._session = session
        self._data = data
        self._least = math.inf
        self._worse = 0
        self.best: Path | None = None

    def due(self, step: int) -> bool:
        """Return whether to evaluate after ``step``: every ``eval.every`` steps, and after the last
        one.
        """
        return step % self._job.evaluation["every"] == 0 or step == self._job.last_step

    def loss(self) -> float:
        """Return the mean loss of all held-out labels. All ranks."""
        session = self._session
        data = self._data
        size = self._job.training.micro_batch_size
        sums = []
        mine = size * session.data_rank
        for start in range(0, data.samples, size * self._job.data_parallel):
            batch = data.batch(start + mine, size)
            # Where a rank has no samples left, it takes others that do not count.
            batch["labels"][max(0, data.samples - start - mine) :] = -100
            loss = session.loss(batch).double()
            sums.append(torch.stack([loss, loss.new_tensor(terms_of(batch))]))
        total, terms = session.total(torch.stack(sums).sum(0)).tolist()
        return float(total / terms)

    def run(self, step: int, report: Report) -> bool:
        """Evaluate after ``step``, save a checkpoint if it is the best, and ``report`` it. All
        ranks.

        Returns whether the run is to end early.
        """
        loss = self.loss()
        job = self._job
        if loss < self._least:
            self._worse = 0
        else:
            self._worse = self._worse + 1
        before = self.best
        if not self._worse:
            self._least, self.best = loss, _save(job, self._session, report, step)
        if dist.get_rank() == 0:
            with (job.output / "eval.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "eval_loss": repr(loss)}) + "\n")
            every = job.training.checkpoint_interval
            if before and before != self.best and not (every and step_of(before) % every == 0):
                shutil.rmtree(before)
        best = ", the best so far"
        if self._worse:
            best = ""
        report.say(
            f"primus: evaluation after step {step}: loss {loss:.5f}, perplexity "
            f"{perplexity(loss):.4g}{best}"
        )
        report.track({"eval_loss": loss, "eval_perplexity": perplexity(loss)}, step)
        over = 0 < job.evaluation["patience"] <= self._worse
        if over:
            report.say(
                f"primus: the last {self._worse} evaluations were no better, so the run ends "
                f"after step {step}"
            )
        return over


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
    config = job.training
    observed = {
        **facts.static(session.model_parts, device.type),
        "seed": config.seed,
        "vocab_size": job.model.vocab_size,
        "mode": job.mode,
    }
    report = Report(job, device, observed["trainable_parameters"] if job.mode == "lora" else None)
    observed |= {"flops_per_unit": report.per_unit.non_causal} if report.per_unit else {}
    if job.resume_from is not None:
        load_checkpoint(job.resume_from, session)
        report.say(f"resumed from {job.resume_from}")
    witness = None
    if job.witness:
        witness = _witness(job, session)
    gc.collect()
    gc.disable()
    batches = _batches(job, session, data, job.first_step)
    for step in range(job.first_step, job.last_step + 1):
        rate = learning_rate(config, step)
        trace = None
        if dist.get_rank() == 0 and step == config.profile_step:
            trace = job.output / "profile.json"
        if witness:
            for batch in batches:
                witness.batch(
                    **{
                        "inputs" if name == "input_ids" else name: part
                        for name, part in batch.items()
                    }
                )
        watched: Any = (
            facts.watching(
                session.model_parts, session.linear_types, compiled=config.compile, trace=trace
            )
            if trace or step == job.first_step
            else nullcontext()
        )
        if step == job.first_step:
            report.start()
        with watched as seen:
            loss, norm, batches = _step(job, device, session, data, batches, step)
        report.step(step, loss, norm, rate)
        if step == job.first_step:
            inputs = batches[0]
            observed |= (
                seen
                | active(job.turbo)
                | {
                    "seq_len": sum(
                        inputs[name].shape[1]
                        for name in ("input_ids", "latents", "text")
                        if name in inputs
                    ),
                    "local_batch_size": len(next(iter(inputs.values()))),
                    "accumulation_steps": len(batches),
                }
            )
            facts.write(job.output / "facts.json", observed)
            report.start()
        if witness:
            witness.step(step)
            if step == (job.first_step + job.last_step) // 2:
                with witness.busy(step):
                    _prove_checkpoint(job, step, session, witness)
            report.start()
        if job.verify_steps and step % job.verify_steps == 0:
            recompute.compare(
                session.model_parts, step, partial(session.forward_backward, batches[:1], 1)
            )
            report.start()
        if config.checkpoint_interval and (
            step % config.checkpoint_interval == 0 or step == job.last_step
        ):
            _save(job, session, report, step)
            report.start()
        if evaluation and evaluation.due(step):
            with witness.busy(step) if witness else nullcontext():
                over = evaluation.run(step, report)
            report.start()
            if over:
                break
        if step % _COLLECT_EVERY == 0:
            gc.collect()
    report.end()
    observed |= facts.final(session.model_parts, step) | active(job.turbo)
    facts.write(job.output / "facts.json", observed)


def _save(job: RankJob, session: Session, report: Report, step: int) -> Path:
    folder = job.output / "checkpoint" / f"step-{step}"
    began = time.perf_counter()
    if not folder.exists():
        save_checkpoint(job.output, step, session, job.identity)
        report.say(f"saved {folder} in {time.perf_counter() - began:.1f} s")
    return folder


def _witness(job: RankJob, session: Session) -> Witness:
    examined = ()
    if job.blocks:
        examined = job.examined
    witness = Witness(
        job.output,
        session.model_parts,
        session.data_rank,
        whole=session.whole,
        taken=session.taken,
        examined=examined,
    )
    witness.first_weights(job.first_step - 1)
    return witness


def _step(
    job: RankJob,
    device: torch.device,
    session: Session,
    data: Data,
    batches: list[Batch],
    step: int,
) -> tuple[float, float, list[Batch]]:
    """Train ``batches``. Return the loss, the gradient norm and the batches of the next step."""
    mine = torch.tensor(sum(map(terms_of, batches)), dtype=torch.float64, device=device)
    terms = round(session.total(mine).item())
    loss = session.forward_backward(batches, terms)
    loss = session.total(loss.to(torch.float64)) / terms
    norm = session.step(learning_rate(job.training, step))
    # The CPU collects them while the GPU computes.
    following = _batches(job, session, data, step + 1)
    return loss.item(), float(norm), following


def _batches(job: RankJob, session: Session, data: Data, step: int) -> list[Batch]:
    # Each rank takes consecutive samples, so those of a step are the same for any number of ranks
    # and micro-batches.
    size = job.training.micro_batch_size
    count = job.accumulation
    first = (step - 1) * job.global_batch + session.data_rank * size * count
    return [data.batch(first + part * size, size) for part in range(count)]
