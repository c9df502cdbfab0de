"""Checkpoints of the loop: model, optimizer and random states, with the identity of the run."""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from primus_images.files import json_if_readable, write_file
from primus_images.training.backends.loop.config import RankJob
from primus_images.training.backends.loop.report import Report
from primus_images.training.backends.loop.session import Session
from primus_images.training.run import identity
from primus_images.training.run.failure import text_of

# Steps after which the ranks ask whether a checkpoint by time is due.
_ASKED_EVERY = 10
# What a resumed run goes on with besides tensors: the standing of the evaluations.
_EVALUATION = "evaluation.json"


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


def rotate(output: Path, keep: int, spared: Path | None = None) -> None:
    """Remove all but the newest ``keep`` (0: all) complete checkpoints, and the one ``spared``."""
    if not keep:
        return
    for folder in identity.complete_checkpoints(output)[:-keep]:
        if folder != spared:
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
    unfinished = folder.with_name(f".{folder.name}")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    dcp.save({**session.state_dict(), **_random_states()}, checkpoint_id=unfinished)
    dist.barrier()
    if dist.get_rank() == 0:
        if standing is not None:
            write_standing(unfinished, standing)
        identity.seal(unfinished, fields)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    dist.barrier()
    return folder


def write_standing(folder: Path, standing: Mapping[str, Any]) -> None:
    """Write to the checkpoint in ``folder`` what :func:`standing_of` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / _EVALUATION, json.dumps(standing) + "\n")


def standing_of(folder: Path) -> dict[str, Any]:
    """Return the standing of the evaluations at the checkpoint in ``folder``; empty without any."""
    return json_if_readable(folder / _EVALUATION)


def save_if_new(
    job: RankJob,
    step: int,
    session: Session,
    report: Report,
    standing: Mapping[str, Any] | None = None,
) -> Path:
    """Save the checkpoint after ``step`` unless it is there, and return its folder. All ranks."""
    folder = folder_of(job.output, step)
    if not folder.exists():
        began = time.perf_counter()
        save(job.output, step, session, job.identity, standing)
        report.say(f"saved {folder} in {time.perf_counter() - began:.1f} s")
    return folder


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
