"""Records of validations for tests."""

from dataclasses import replace
from typing import Any

from primus_images.training.judge.checks import Verdict
from primus_images.training.judge.record import (
    Record,
    RecordedImage,
    RecordedJob,
    RecordedRecipe,
    RecordedSuite,
)

RUNS = ("base", "repeat", "resume", "accumulation")


def recipe(**changes: Any) -> RecordedRecipe:
    """A recipe called `one`, as it trains on a CPU."""
    return replace(
        RecordedRecipe(
            name="one",
            backend="megatron",
            mode="pretrain",
            precision="fp32",
            gpu="cpu",
            sha256="abc",
            assets={},
            settings={},
        ),
        **changes,
    )


def jobs(*names: str, without: str = "") -> tuple[RecordedJob, ...]:
    """Jobs that all ran but the one called ``without``."""
    return tuple(RecordedJob(name=name, ran=name != without) for name in names)


def verdicts(*names: str, failed: tuple[str, ...] = ()) -> tuple[Verdict, ...]:
    """Verdicts that all passed but ``failed``."""
    return tuple(Verdict(name, name not in failed, "why") for name in names)


def record(**changes: Any) -> Record:
    """A validation on a CPU that passed."""
    return replace(
        Record(
            format=1,
            made="2026-11-20T20:00:00Z",
            passed=True,
            target="cpu",
            image=RecordedImage(content="sha256:1"),
            gpu="none",
            recipe=recipe(),
            suite=RecordedSuite(sha256="def", format=6, reference="0"),
            versions={},
            facts={"loaded": ["torch"]},
            measurements={},
            verdicts=verdicts("loss falls"),
            jobs=jobs(*RUNS),
        ),
        **changes,
    )
