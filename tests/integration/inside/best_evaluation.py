"""A resumed run goes on with the best evaluation and the patience of the run before it."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from primus_images.training.backends.loop import checkpoint, evaluation
from primus_images.training.backends.loop.evaluation import Evaluation

SAID: list[str] = []
REPORT: Any = SimpleNamespace(say=SAID.append, track=lambda *_: None)


class Writer(checkpoint.Writer):
    """What a writer leaves that matters here."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def save(self, step: int, standing: Any = None) -> None:
        folder = checkpoint.folder_of(self._output, step)
        folder.mkdir(parents=True)
        (folder / "evaluation.json").write_text(json.dumps(standing))

    def then(self, work: Callable[[], None]) -> None:
        work()


def evaluated(
    output: Path,
    losses: dict[int, float],
    resume_from: Path | None = None,
    text: str = "held out",
) -> tuple[Evaluation, list[int]]:
    """Evaluate with ``losses``; return the evaluation, and the steps after which the run ends."""
    (output / "cache").mkdir(parents=True)
    (output / "cache/eval.tokens").write_text(text)
    job: Any = SimpleNamespace(
        output=output,
        resume_from=resume_from,
        evaluation={"every": 1, "patience": 2},
        training=SimpleNamespace(checkpoint_interval=0),
    )
    data: Any = SimpleNamespace(by_corpus=dict)
    made = Evaluation(job, None, data)  # type: ignore[arg-type]
    ends = []
    for step, loss in losses.items():
        with patch.object(made, "loss", return_value=loss):
            if made.run(step, REPORT, Writer(output)):
                ends.append(step)
    return made, ends


with (
    tempfile.TemporaryDirectory() as name,
    patch.object(evaluation.dist, "get_rank", return_value=0),
):
    folder = Path(name)
    first, ends = evaluated(folder / "first", {1: 3.0, 2: 2.0, 3: 2.5})
    best = folder / "first/checkpoint/step-2"
    assert (first.best, ends) == (best, [])
    assert not (folder / "first/checkpoint/step-1").exists()
    Writer(folder / "first").save(3, first.standing)
    last = folder / "first/checkpoint/step-3"

    worse, ends = evaluated(folder / "worse", {4: 2.4}, last)
    assert (worse.best, ends) == (best, [4])
    better, ends = evaluated(folder / "better", {4: 1.9, 5: 2.0}, last)
    assert (better.best, ends) == (folder / "better/checkpoint/step-4", [])
    assert best.is_dir()

    other, ends = evaluated(folder / "other", {4: 2.4, 5: 2.5, 6: 2.5}, last, "other text")
    assert (other.best, ends) == (folder / "other/checkpoint/step-4", [6])
    assert "on other text, so they count for nothing" in "".join(SAID)

    best.rename(folder / "moved")
    lost, ends = evaluated(folder / "lost", {4: 2.4}, last)
    assert (lost.best, ends) == (folder / "lost/checkpoint/step-4", [])
    assert "is not there, so the best is looked for anew" in "".join(SAID)
