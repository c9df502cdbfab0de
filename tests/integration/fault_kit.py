"""The faults that the checks must catch: each with its backend, the job it breaks, and the one check meant for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training_kit import train

from primus.recipes.model import Asked
from primus.recipes.resolve import resolve
from primus.training import checks, outcome
from primus.training.checks import Verdict
from primus.training.job import Job
from primus.training.outcome import Outcome

__all__ = ["BASES", "CASES", "Case", "base", "judged", "outcome_of"]

STEPS = 10
# Backend → recipe and words of the job that each fault breaks, small enough to end in seconds.
BASES = {
    "torchtitan": ("llama3.1-8b", ("torchtitan.training.steps=10",)),
    "fsdp": ("llama3.1-8b", ("fsdp.training.steps=10", "fsdp.training.lr=0.01")),
    "megatron": ("llama3.1-8b", ("megatron.training.steps=2", "model.layers=2")),
}
_SPLIT = {
    "torchtitan": ("torchtitan.training.steps=1", "torchtitan.training.local_batch_size=2"),
    "fsdp": ("fsdp.training.steps=1", "fsdp.training.micro_batch_size=2"),
    "megatron": ("megatron.training.steps=1", "megatron.training.micro_batch_size=2"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault in one backend. ``name`` is that of ``faults/sitecustomize.py``, ``words`` shorten the base's job."""

    fault: str
    backend: str
    name: str
    check: str
    words: tuple[str, ...] = ()
    precision: str = "fp32"

    @property
    def split(self) -> bool:
        """Whether the job cuts the base's batch into more micro-batches, and is compared with the base."""
        return self.check == "accumulation"

    def job(self, output: Path) -> Job:
        """The job, as it is with and without the fault."""
        recipe, words = BASES[self.backend]
        asked = Asked(backend=self.backend, gpu="cpu", proxy=True, precision=self.precision)
        more = _SPLIT[self.backend] if self.split else self.words
        return Job(name="fault", recipe=resolve(recipe, [*words, *more], asked), output=output)


def _cases(backend: str, prefix: str) -> tuple[Case, ...]:
    def case(fault: str, name: str, check: str, steps: int = STEPS, precision: str = "fp32") -> Case:
        words = (f"{backend}.training.steps={steps}",)
        return Case(fault=fault, backend=backend, name=name, check=check, words=words, precision=precision)

    return (
        case("NaN at step 3", "nan", "finite", 3),
        case("loss not falling", "no_updates", "loss falls"),
        case("dropped micro-batch gradients", f"{prefix}lost_micro_batch", "accumulation"),
        case("FP8 silently BF16", "no_fp8", "precision", 1, "fp8"),
        case("early exit with code 0", f"{prefix}early_stop", "steps logged", 3),
        case("wrong sequence length", f"{prefix}short_sequences", "configuration", 1),
        case("wrong world size", "one_rank", "configuration", 1),
    )


CASES = (
    *_cases("torchtitan", ""),
    *_cases("fsdp", "loop_"),
    # Its schedule and optimizer are its own; the rest is the loop's.
    Case(
        fault="dropped micro-batch gradients", backend="megatron", name="megatron_lost_micro_batch",
        check="accumulation",
    ),
)  # fmt: skip


def base(python: list[str], backend: str, output: Path) -> Outcome:
    """The healthy run that those of the backend are compared with."""
    recipe, words = BASES[backend]
    asked = Asked(backend=backend, gpu="cpu", proxy=True, precision="fp32")
    return outcome_of(python, Job(name="base", recipe=resolve(recipe, words, asked), output=output))


def outcome_of(python: list[str], job: Job, fault: str = "") -> Outcome:
    """What ``job`` left, with a fault when one is named."""
    return outcome.read(job, train(python, job, fault))


def judged(left: Outcome, healthy: Outcome, *, split: bool = False) -> tuple[Verdict, ...]:
    """The verdicts on a run: those of any run, and what its length or its split batch allow besides."""
    recipe, verdicts = left.job.recipe, list(outcome.basic_verdicts(left))
    if recipe.steps >= STEPS:
        verdicts.append(checks.loss_falls(left.series, recipe.get("validation.loss_drop", float)))
    if split:
        tolerance = recipe.get("validation.accumulation_tolerance", float)
        verdicts.append(checks.accumulation(healthy.series, left.series, tolerance))
    return tuple(verdicts)
