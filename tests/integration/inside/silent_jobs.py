"""Small judged jobs, healthy or with a silent fault, and what their checks say."""

from __future__ import annotations

import sys
from pathlib import Path

from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.training import outcome, ranks
from primus.training.job import Job, JobResult

# In the image the faults are mounted at /faults.
sys.path += [str(Path(__file__).parents[1] / "faults"), "/faults"]
import silent_eighth  # noqa: F401
import silent_eleventh  # noqa: F401
import silent_fresh  # noqa: F401
import silent_hostile  # noqa: F401
import silent_later  # noqa: F401
import silent_ninth  # noqa: F401
import silent_seventh  # noqa: F401
import silent_slow  # noqa: F401
import silent_small  # noqa: F401
import silent_subtle  # noqa: F401
import silent_tenth  # noqa: F401
import silent_unseen  # noqa: F401
import silent_wide  # noqa: F401
from silent import ESCAPED, SILENT

__all__ = ["ESCAPED", "SILENT", "failed", "job_of", "write"]


def job_of(folder: Path, backend: str, words: tuple[str, ...] = ()) -> Job:
    """A job of six steps of ``backend`` in ``folder``; words ``--recipe=``, ``--mode=``, ``--precision=`` choose."""
    chosen = dict(word.removeprefix("--").split("=") for word in words if word.startswith("--"))
    given = [word for word in words if not word.startswith("--")]
    settings = [*given, *([] if any(word.startswith("steps=") for word in given) else ["steps=6"])]
    name = chosen.get("recipe", "llama3.1-8b")
    if name.startswith("llama"):
        settings.append("model.layers=2")
    mode = chosen.get("mode", "full" if backend == "finetune" else "pretrain")
    choices = Choices(backend=backend, mode=mode, gpu="cpu", proxy=True, precision=chosen.get("precision", "fp32"))
    return Job(name="base", recipe=resolve(name, settings, choices), output=folder, judged=True)


def write(job: Job) -> None:
    """Make the job's folder with the files that its ranks read."""
    job.output.mkdir(parents=True)
    for file, text in ranks.files(job).items():
        (job.output / file).write_text(text, encoding="utf-8")


def failed(job: Job) -> list[str]:
    """The checks that the run did not pass, and ``slow rank`` where its summary names one."""
    left = outcome.read(job, JobResult(exit_code=0, output=job.output))
    names = [verdict.name for verdict in outcome.basic_verdicts(left) if not verdict.passed]
    return [*names, "slow rank"] if left.slow_rank else names
