"""The job of a rank: ``job.json`` of its output folder, as a dataclass."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from primus.recipes.architecture import Architecture, built, rebuilt
from primus.recipes.setting import Value
from primus.training.loop.config import LoopConfig

Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """One job as its ranks see it. The fields are those of :func:`primus.training.ranks.job_file`.

    ``config`` is the backend's section of the recipe with dotted keys. ``training`` is the part of it that all our
    backends share. ``turbo`` are the optimizations to enable.
    """

    output: Path
    backend: str
    mode: str
    precision: str
    model: Architecture
    assets: Mapping[str, str]
    column: str | None
    config: Mapping[str, Value]
    training: LoopConfig
    first_step: int
    last_step: int
    resume_from: Path | None
    identity: Mapping[str, Any]
    world_size: int
    data_parallel: int
    accumulation: int
    threads: int
    witness: bool
    examined: Sequence[int]
    blocks: bool
    turbo: tuple[str, ...]

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.training.micro_batch_size * self.data_parallel * self.accumulation

    def section(self, kind: type[Section], under: str = "") -> Section:
        """Return the keys below ``under`` as the frozen dataclass ``kind``. Missing keys have their defaults."""
        head = f"{under}." if under else ""
        inner = {key.removeprefix(head): value for key, value in self.config.items() if key.startswith(head)}
        return built(kind, inner)


def read(folder: Path) -> RankJob:
    """Read the job of an output folder."""
    job: dict[str, Any] = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    config = job["config"]
    resume_from = job["resume_from"]
    return RankJob(
        output=Path(job["output"]),
        model=rebuilt(job["model"]),
        training=built(LoopConfig, {key.removeprefix("training."): config[key] for key in config}),
        resume_from=Path(resume_from) if resume_from else None,
        turbo=tuple(job.get("turbo", ())),
        **{
            key: job[key]
            for key in (
                "backend", "mode", "precision", "assets", "column", "identity", "config", "first_step", "last_step",
                "world_size", "data_parallel", "accumulation", "threads", "witness", "examined", "blocks",
            )
        },
    )  # fmt: skip
