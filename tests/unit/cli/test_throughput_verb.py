"""The time limit of a whole search, with made results."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from primus.cli.main import main
from primus.errors import CheckFailed
from primus.recipes.recipe import Recipe
from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.tuning import trial
from primus.tuning.throughput import Point
from primus.tuning.trial import Result, Search


@dataclass
class MadeTrials:
    """Every run takes 10 s of ``clock``; later points are faster."""

    clock: list[float]
    folder: Path = Path("made")
    runs: list[tuple[int, int]] = field(default_factory=list)

    def known(self, recipe: Recipe, number: int) -> Result | None:
        return None

    def run(self, recipe: Recipe, number: int) -> Result:
        self.clock[0] += 10
        self.runs.append((recipe.local_batch, number))
        return Result(tokens_per_second=recipe.local_batch, memory_gib=1, losses=(7.0,), reason="", seconds=10)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(trial.time, "monotonic", lambda: now[0])
    return now


def rows(clock: list[float], total: int | None) -> tuple[Search, list[Point], MadeTrials]:
    choices = Choices(gpu="cpu")
    words = ("validation.accumulation=1", "torchtitan.training.local_batch_size={}")
    points = [
        Point(
            turbo="off",
            checkpointing="none",
            batch=size,
            recipe=resolve("llama3-proxy", (), choices, [word.format(size) for word in words]),
        )
        for size in (1, 2, 4)
    ]
    trials = MadeTrials(clock)
    search = Search(points, trials, pairs=3, total_limit=total, say=lambda _: None)  # type: ignore[arg-type]
    return search, points, trials


def test_the_search_leaves_time_for_the_final_runs(clock: list[float]) -> None:
    search, points, trials = rows(clock, 85)
    # 10 s for the start, 10 s for the next; a third and six final runs would end after 90 s.
    assert [search.measure(point) for point in points] == [1, 2, None]
    assert search.rows[2][1].reason == "not tried: --total-limit"
    search.pairs(points[1])
    assert clock == [80]
    assert trials.runs[2:] == [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3)]


def test_no_limit_tries_everything(clock: list[float]) -> None:
    search, points, _ = rows(clock, None)
    assert [search.measure(point) for point in points] == [1, 2, 4]


def test_final_runs_without_time_are_refused(clock: list[float]) -> None:
    search, points, _ = rows(clock, 90)
    search.measure(points[0])
    clock[0] = 85
    with pytest.raises(CheckFailed, match="no time is left for the final runs"):
        search.pairs(points[1])


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("tuned.txt", "tuned.txt does not end with .yaml", "choose another --output"),
        ("new/tuned.yaml", "new does not exist", "create it: mkdir -p "),
        ("file/tuned.yaml", "file is not a folder", "choose another --output"),
    ],
)
def test_an_output_that_cannot_be_a_recipe_file_is_refused_before_the_search(
    name: str, message: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["tune", "throughput", "llama3-proxy", "--gpu=cpu", "--output", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert hint in error
