"""One run of a resolved recipe: what is asked, and what is left of it afterwards."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from primus.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to start. ``output`` is a folder of its own; ``resume_from`` is a checkpoint folder ``…/step-N``.

    A ``judged`` run leaves its batches, gradients and weights, and the reference then repeats it. ``compiled`` is a
    folder of compiled kernels that runs share; without it, each run compiles its own.

    Paths are those the job itself sees: inside a container they are the container's.
    """

    name: str
    recipe: Recipe
    output: Path
    resume_from: Path | None = None
    judged: bool = False
    compiled: Path | None = None

    @property
    def first_step(self) -> int:
        """The first step this run logs: 1, or the one after its checkpoint."""
        return 1 if self.resume_from is None else step_of(self.resume_from) + 1

    @property
    def last_step(self) -> int:
        """The last step this run logs."""
        return self.recipe.steps

    def arguments(self) -> list[str]:
        """The words after ``primus`` that start this job from a shell."""
        resume = ["--resume-from", str(self.resume_from)] if self.resume_from else []
        choices = self.recipe.asked.words()
        judged = ["--judge"] if self.judged else []
        words = ["train", self.recipe.name, *choices, "--output", str(self.output), *resume, *judged]
        return [*words, *self.recipe.overrides]


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A run that ended: the exit code of ``primus train``, and where this process sees the job's folder.

    ``said`` is what the command gave as its reason, where it was heard and the job's folder may not tell.
    """

    exit_code: int
    output: Path
    said: str = ""


def step_of(checkpoint: Path) -> int:
    """The step a checkpoint folder holds (``step-10`` → 10). ValueError when the name does not tell."""
    match = re.fullmatch(r"step-(0|[1-9][0-9]{0,17})", checkpoint.name)
    if not match:
        raise ValueError(f"{checkpoint} is not named step-N")
    return int(match[1])


def steps(folder: Path) -> list[Path]:
    """The checkpoints ``step-N`` in ``folder``, oldest step first."""
    found = []
    for path in folder.glob("step-*"):
        with suppress(ValueError):
            found.append((step_of(path), path))
    return [path for _, path in sorted(found)]
