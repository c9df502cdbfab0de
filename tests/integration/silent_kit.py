"""Jobs for the silent faults, and their verdicts."""

from __future__ import annotations

import sys
from pathlib import Path

from primus.recipes.model import Asked
from primus.recipes.resolve import resolve
from primus.training import outcome, ranks
from primus.training.job import Job, JobResult

sys.path.insert(0, str(Path(__file__).with_name("faults")))
from silent import SILENT

__all__ = ["SILENT", "failed", "prepared"]

_WORDS = ("steps=6",)


def prepared(folder: Path, backend: str, words: tuple[str, ...] = ()) -> Job:
    """A small job of ``backend`` in ``folder``, its files written; ``--recipe``, ``--mode``, ``--precision`` choose."""
    chosen = dict(word.removeprefix("--").split("=") for word in words if word.startswith("--"))
    settings = [*_WORDS, *(word for word in words if not word.startswith("--"))]
    name = chosen.get("recipe", "llama3.1-8b")
    if name.startswith("llama"):
        settings.append("model.layers=2")
    mode = chosen.get("mode", "full" if backend == "finetune" else "pretrain")
    asked = Asked(backend=backend, mode=mode, gpu="cpu", proxy=True, precision=chosen.get("precision", "fp32"))
    job = Job(name="base", recipe=resolve(name, settings, asked), output=folder, judged=True)
    folder.mkdir(parents=True)
    for file, text in ranks.files(job).items():
        (folder / file).write_text(text, encoding="utf-8")
    return job


def failed(job: Job) -> list[str]:
    """The checks that the run did not pass."""
    left = outcome.read(job, JobResult(exit_code=0, output=job.output))
    return [verdict.name for verdict in outcome.basic_verdicts(left) if not verdict.passed]
