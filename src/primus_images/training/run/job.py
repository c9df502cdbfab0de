"""One run of a resolved recipe: what is requested."""

import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from primus_images.recipes.recipe import Recipe
from primus_images.turbo.optimizations import chosen
from primus_images.turbo.trial import Trial

_EXAMINED = 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to start.

    ``output`` is its own folder; ``resume_from`` is a checkpoint folder ``…/step-N``. The reference
    repeats a ``judged`` run. ``compiled`` is a folder of compiled kernels that runs share.
    ``trial`` says which optimizations passed their self-tests on this machine. ``wrap`` is a
    command before the Python of each rank. Gradients are verified every ``judge_every`` steps (0:
    never). In a container, paths are the container's.
    """

    name: str
    recipe: Recipe
    output: Path
    resume_from: Path | None = None
    judged: bool = False
    compiled: Path | None = None
    trial: Trial | None = None
    wrap: tuple[str, ...] = ()
    judge_every: int = 0

    @property
    def turbo(self) -> tuple[str, ...]:
        """The optimizations that the ranks use; before the self-tests, those of the recipe."""
        if self.trial is None:
            return chosen(self.recipe)
        return self.trial.names

    @property
    def first_step(self) -> int:
        """The first step: 1, or the one after its checkpoint."""
        if self.resume_from is None:
            return 1
        return step_of(self.resume_from) + 1

    @property
    def last_step(self) -> int:
        """The last step of this run."""
        return self.recipe.steps

    @property
    def examined(self) -> list[int]:
        """The steps at which the reference compares a judged run block by block.

        They are four, spread over the run. In FP32, these are the first and the last, because
        gradients already show what a block computes wrongly.
        """
        first = self.first_step
        last = self.last_step
        if self.recipe.precision == "fp32":
            return sorted({first, last})
        steps = set()
        for number in range(_EXAMINED):
            steps.add(first + number * (last - first) // (_EXAMINED - 1))
        return sorted(steps)

    def arguments(self) -> list[str]:
        """Return the arguments after ``primus`` that start this job from a shell."""
        words = ["train", self.recipe.name, *self.recipe.choices.words()]
        words += ["--output", str(self.output)]
        if self.resume_from:
            words += ["--resume-from", str(self.resume_from)]
        if self.judged:
            words.append("--judge")
        if self.wrap:
            words += ["--wrap", shlex.join(self.wrap)]
        if self.judge_every:
            words += ["--judge-every", str(self.judge_every)]
        return [*words, *self.recipe.overrides]


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint folder (``step-10`` → 10). ValueError: another name."""
    match = re.fullmatch(r"step-(0|[1-9][0-9]{0,17})", checkpoint.name)
    if not match:
        raise ValueError(f"{checkpoint} is not named step-N")
    return int(match[1])


def steps(folder: Path) -> list[Path]:
    """Return the checkpoints ``step-N`` in ``folder``, oldest first."""
    numbered = []
    for path in folder.glob("step-*"):
        with suppress(ValueError):
            numbered.append((step_of(path), path))
    return [path for _, path in sorted(numbered)]
