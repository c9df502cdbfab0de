"""Writing figures for TensorBoard and Weights & Biases to the output folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from primus.training.loop.rank_job import RankJob


class Tracker(Protocol):
    """A writer of the figures of each step."""

    def step(self, figures: Mapping[str, float], step: int) -> None:
        """Record the figures of a step."""

    def end(self) -> None:
        """Flush and close."""


def trackers(given: RankJob) -> list[Tracker]:
    """Return the trackers that the recipe requests. Raises SystemExit if their library is not installed."""
    made: list[Tracker] = []
    try:
        if given.training.tensorboard:
            made.append(_TensorBoard(given.output / "tensorboard"))
        if given.training.wandb:
            made.append(_WeightsAndBiases(given))
    except ImportError as error:
        raise SystemExit(f"training.tensorboard or training.wandb: {error.name} is not installed") from error
    return made


class _TensorBoard(Tracker):
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def step(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self) -> None:
        self._writer.close()


class _WeightsAndBiases(Tracker):
    """Weights & Biases, offline unless WANDB_MODE is set. The key comes from the environment or the user's login."""

    def __init__(self, given: RankJob) -> None:
        import wandb

        self._run: Any = wandb.init(
            project="primus",
            name=given.output.name,
            dir=str(given.output),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dict(given.config),
        )

    def step(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def end(self) -> None:
        self._run.finish()
