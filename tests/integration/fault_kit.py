"""The faults that the checks must catch, each with its backend, the job that it breaks, and the check that must name
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training_kit import train

from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.training import checks, outcome
from primus.training.checks import Verdict
from primus.training.job import Job
from primus.training.outcome import Outcome

STEPS = 10
# The step at which torchtitan's base saves the checkpoint that a resumed run starts from.
KEPT = 8
# Backend → recipe and arguments of the job that each fault breaks, small enough to end within seconds.
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
    """One fault in one backend. ``name`` is that of ``faults/sitecustomize.py``; ``words`` replace arguments of the
    base's job.
    """

    fault: str
    backend: str
    name: str
    check: str
    words: tuple[str, ...] = ()
    precision: str = "fp32"

    @property
    def compared(self) -> bool:
        """Whether its check compares the run with the base."""
        return self.check in _COMPARING

    def job(self, output: Path, base: Path | None = None) -> Job:
        """Return the job, with or without the fault. A resumed job starts from the checkpoint in ``base``."""
        recipe, words = BASES[self.backend]
        choices = Choices(backend=self.backend, gpu="cpu", proxy=True, precision=self.precision)
        more = _SPLIT[self.backend] if self.check == "accumulation" else self.words
        kept = base / "checkpoint" / f"step-{KEPT}" if base is not None and self.check == "resume" else None
        # A case's words replace those of its base.
        settings = {word.partition("=")[0]: word for word in (*words, *more)}
        return Job(name="fault", recipe=resolve(recipe, [*settings.values()], choices), output=output, resume_from=kept)


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
    Case(fault="resume loses its place", backend="torchtitan", name="forgets_its_place", check="resume"),
    Case(fault="another seed than asked", backend="torchtitan", name="other_seed", check="same result again"),
    *_cases("fsdp", "loop_"),
    # FLUX has its own schedule and optimizer; the rest is the loop's.
    Case(
        fault="dropped micro-batch gradients", backend="megatron", name="megatron_lost_micro_batch",
        check="accumulation",
    ),
)  # fmt: skip


def base(python: list[str], backend: str, output: Path) -> Outcome:
    """Run the healthy job that the runs of ``backend`` are compared with."""
    recipe, words = BASES[backend]
    choices = Choices(backend=backend, gpu="cpu", proxy=True, precision="fp32")
    words += (f"checkpoint={KEPT}",) if backend == "torchtitan" else ()
    return outcome_of(python, Job(name="base", recipe=resolve(recipe, words, choices), output=output))


def outcome_of(python: list[str], job: Job, fault: str = "") -> Outcome:
    """Run ``job``, with ``fault`` if it is not empty, and read its outcome."""
    return outcome.read(job, train(python, job, fault))


def judged(left: Outcome, healthy: Outcome, check: str = "") -> tuple[Verdict, ...]:
    """Return the verdicts on a run: those for any run, those that its length allows, and ``check`` if it compares
    runs.
    """
    recipe, verdicts = left.job.recipe, list(outcome.basic_verdicts(left))
    if len(range(left.job.first_step, recipe.steps + 1)) >= STEPS:
        verdicts.append(checks.loss_falls(left.series, recipe.get("validation.loss_drop", float)))
    if check in _COMPARING:
        key, compare = _COMPARING[check]
        tolerance = recipe.get(f"validation.{key}_tolerance", float)
        verdicts.append(compare(healthy.series, left.series, tolerance))
    return tuple(verdicts)


# Check → the recipe's key of its tolerance, and the function that compares.
_COMPARING = {
    "accumulation": ("accumulation", checks.accumulation),
    "resume": ("resume", lambda base, other, tolerance: checks.resume(base, other, KEPT + 1, tolerance)),
    "same result again": ("repeat", checks.reproducible),
}
