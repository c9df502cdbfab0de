"""Checkpoints of the loop: model, optimizer and random states, with the identity of the run."""

import gc
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from primus_images.files import json_if_readable, write_file
from primus_images.training.backends.loop.config import RankJob
from primus_images.training.backends.loop.report import Report
from primus_images.training.backends.loop.session import Session
from primus_images.training.run import identity
from primus_images.training.run.failure import text_of
from primus_images.training.run.machine import host_bytes

# Steps after which the ranks ask whether a checkpoint by time is due.
_ASKED_EVERY = 10
# What a resumed run goes on with besides tensors: the standing of the evaluations.
_EVALUATION = "evaluation.json"
# The share of the host's memory that the copies of all ranks may take.
_SHARE_OF_HOST = 0.25
# A checkpoint has two moments of AdamW for each trained weight.
_SAVED_PER_WEIGHT = 3


class Schedule:
    """When a checkpoint is due: after every ``interval`` steps, or ``seconds``; 0 means never.

    Ranks must agree, so the first one's clock decides, after every few steps.
    """

    def __init__(self, interval: int, seconds: float, device: torch.device) -> None:
        self._interval = interval
        self._seconds = seconds
        self._device = device
        self._saved = time.monotonic()

    def due(self, step: int, *, last: bool) -> bool:
        """Return whether to save after ``step``, which may be the ``last`` one. All ranks."""
        if last:
            return bool(self._interval or self._seconds)
        if self._seconds:
            return step % _ASKED_EVERY == 0 and self._is_time()
        return bool(self._interval) and step % self._interval == 0

    def _is_time(self) -> bool:
        now = time.monotonic()
        due = torch.tensor(int(now - self._saved >= self._seconds), device=self._device)
        dist.broadcast(due, 0)
        if due:
            self._saved = now
        return bool(due)


def rotate(output: Path, keep: int, spared: Collection[Path] = ()) -> None:
    """Remove all but the newest ``keep`` (0: all) complete checkpoints, and those ``spared``."""
    if not keep:
        return
    for folder in identity.complete_checkpoints(output)[:-keep]:
        if folder not in spared:
            shutil.rmtree(folder)


def folder_of(output: Path, step: int) -> Path:
    """Return the folder of the checkpoint after ``step``."""
    return output / "checkpoint" / f"step-{step}"


def save(
    output: Path,
    step: int,
    session: Session,
    fields: Mapping[str, Any],
    standing: Mapping[str, Any] | None = None,
) -> Path:
    """Save a checkpoint after ``step``, and return its folder, which appears whole. All ranks.

    ``fields`` are the run's identity, and ``standing`` that of its evaluations, if there are any.
    """
    folder = folder_of(output, step)
    _clear(folder)
    dcp.save(_state(session), checkpoint_id=_unfinished(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        _finish(folder, fields, standing)
    dist.barrier()
    return folder


def _unfinished(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}")


def _state(session: Session) -> dict[str, Any]:
    return {**session.state_dict(), **_random_states()}


def _clear(folder: Path) -> None:
    """Remove what a killed run left of the checkpoint in ``folder``. All ranks."""
    if dist.get_rank() == 0:
        shutil.rmtree(_unfinished(folder), ignore_errors=True)
    dist.barrier()


def _finish(folder: Path, fields: Mapping[str, Any], standing: Mapping[str, Any] | None) -> None:
    """Let the checkpoint appear in ``folder``, after all ranks have written it. One rank."""
    unfinished = _unfinished(folder)
    if standing is not None:
        write_standing(unfinished, standing)
    identity.seal(unfinished, fields)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def host_has_room(model_parts: Iterable[nn.Module]) -> bool:
    """Return whether the host of every rank has room for a copy of what its ranks save.

    All ranks.
    """
    saved = 0
    device = torch.device("cpu")
    for part in model_parts:
        for parameter in part.parameters():
            device = parameter.device
            if parameter.requires_grad:
                saved += _SAVED_PER_WEIGHT * _bytes_of(parameter)
    ranks_of_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    room = ranks_of_host * saved <= _SHARE_OF_HOST * host_bytes()
    everywhere = torch.tensor(int(room), device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere)


def _bytes_of(parameter: nn.Parameter) -> int:
    """Return the bytes of this rank's part of ``parameter``."""
    local = parameter.data
    if isinstance(local, DTensor):
        local = local.to_local()
    return local.numel() * local.element_size()


class Writer:
    """Saves the checkpoints of a run, one at a time, and lets the run go on meanwhile.

    The ranks wait while their tensors are copied to the memory of the host; a thread of each writes
    its copy. Without room for copies, they wait for the write. All ranks must call the methods in
    the same order.
    """

    def __init__(self, job: RankJob, session: Session, report: Report) -> None:
        self._job = job
        self._session = session
        self._report = report
        self._newest = 0
        # Whether the hosts have room for copies. It is known when the first checkpoint is due.
        self._copies: bool | None = None
        # Threads agree beside the collectives of the steps.
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # What the thread does last, after everything that it was asked for before.
        self._work: Future[None] | None = None

    def save(self, step: int, standing: Mapping[str, Any] | None = None) -> None:
        """Save a checkpoint after ``step``, unless that is done. See :func:`save`."""
        if step == self._newest:
            return
        self._newest = step
        began = time.perf_counter()
        self.wait()
        if self._copies is None:
            self._copies = host_has_room(self._session.model_parts)
        if self._copies:
            self._save_copy(step, standing, began)
            return
        folder = save(self._job.output, step, self._session, self._job.identity, standing)
        self._report.say(f"saved {folder} in {time.perf_counter() - began:.1f} s")

    def _save_copy(self, step: int, standing: Mapping[str, Any] | None, began: float) -> None:
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        folder = folder_of(self._job.output, step)
        _clear(folder)
        # The copy before may be in a cycle of references.
        gc.collect()
        written: Any = dcp.async_save(
            _state(self._session), checkpoint_id=_unfinished(folder), process_group=self._group
        )
        waited = time.perf_counter() - began

        def finish() -> None:
            written.result()
            if dist.get_rank() == 0:
                _finish(folder, self._job.identity, standing)
            seconds = time.perf_counter() - began
            self._report.say(f"saved {folder} in {seconds:.1f} s; the run waited {waited:.1f} s")

        self._work = self._thread.submit(finish)

    def then(self, work: Callable[[], None]) -> None:
        """Let rank 0 do ``work`` once the newest checkpoint is whole; not if that fails."""
        if dist.get_rank() != 0:
            return
        saving = self._work
        if saving is None:
            work()
            return

        def follow() -> None:
            saving.result()
            work()

        self._work = self._thread.submit(follow)

    def raise_failure(self) -> None:
        """Raise what made the newest checkpoint fail, if it has failed by now."""
        if self._work and self._work.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the newest checkpoint. Raises what made it fail."""
        if self._work:
            self._work.result()
            self._work = None


def write_standing(folder: Path, standing: Mapping[str, Any]) -> None:
    """Write to the checkpoint in ``folder`` what :func:`standing_of` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / _EVALUATION, json.dumps(standing) + "\n")


def standing_of(folder: Path) -> dict[str, Any]:
    """Return the standing of the evaluations at the checkpoint in ``folder``; empty without any."""
    return json_if_readable(folder / _EVALUATION)


def load(folder: Path, session: Session) -> None:
    """Load the checkpoint in ``folder``. Raises SystemExit if it is damaged. All ranks.

    Random states belong to ranks, so they are not loaded if the number of ranks differs.
    """
    state = session.state_dict()
    try:
        identity.verify_tensors(folder)
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        saved_ranks = sum(name.startswith("random.") for name in metadata)
        if saved_ranks == dist.get_world_size():
            state |= _random_states()
        dcp.load(state, checkpoint_id=folder)
    except (CheckpointException, Exception) as error:
        raise SystemExit(f"{folder}: the checkpoint cannot be read: {text_of(error)}") from error
    random_state = state.pop(f"random.{dist.get_rank()}", None)
    if random_state is not None:
        _set_random_state(random_state)
    session.load_state_dict(state)


def _random_states() -> dict[str, Any]:
    state = torch.get_rng_state()
    if torch.cuda.is_available():
        state = torch.cat([state, torch.cuda.get_rng_state()])
    return {f"random.{dist.get_rank()}": state}


def _set_random_state(state: torch.Tensor) -> None:
    host = torch.get_rng_state().numel()
    torch.set_rng_state(state[:host])
    if torch.cuda.is_available() and state.numel() > host:
        torch.cuda.set_rng_state(state[host:])
