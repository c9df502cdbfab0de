"""Checkpoints of a run: ``checkpoint/step-N``, which exists only when it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from primus.training import identity
from primus.training.failure import text_of
from primus.training.loop.session import Session


def save(output: Path, step: int, session: Session, fields: Mapping[str, Any]) -> Path:
    """Save the model, optimizer and random states after ``step``, with the run's identity. Returns the folder.

    The folder is renamed to its final name when all ranks have written their part.
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


def load(folder: Path, session: Session) -> None:
    """Load the checkpoint in ``folder``. The learning rate and the position in the data follow from its step.

    Random states belong to ranks, so they are not loaded if the number of ranks differs. Raises SystemExit if the
    checkpoint is damaged.
    """
    state = session.state_dict()
    try:
        identity.verify_tensors(folder)
        random = _load(folder, state)
    except (CheckpointException, Exception) as error:
        raise SystemExit(f"{folder}: the checkpoint cannot be read: {text_of(error)}") from error
    for name in random:
        if name in state:
            _set_random_state(state.pop(name))
    session.load_state_dict(state)


def prove(output: Path, step: int, session: Session, fields: Mapping[str, Any], erase: Callable[[], None]) -> None:
    """Save a checkpoint, ``erase`` everything that was trained, and load it. Later steps show what is lost."""
    folder = save(output, step, session, fields)
    erase()
    load(folder, session)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def _load(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Fill ``state`` from ``folder``. Returns the random states; ``state`` contains them if the rank count matches."""
    random = _random_states()
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    saved_ranks = sum(name.startswith("random.") for name in metadata)
    if saved_ranks == dist.get_world_size():
        state |= random
    dcp.load(state, checkpoint_id=folder)
    return random


def _random_states() -> dict[str, Any]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return {f"random.{dist.get_rank()}": torch.cat(states)}


def _set_random_state(state: torch.Tensor) -> None:
    host = torch.get_rng_state().numel()
    torch.set_rng_state(state[:host])
    if torch.cuda.is_available() and state.numel() > host:
        torch.cuda.set_rng_state(state[host:])
