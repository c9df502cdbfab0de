"""Which rank is named as slow, from what ranks measured of themselves; and which differences are none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from primus.training.straggler import Work, find, read

Own = dict[int, dict[int, Work]]


def run(ranks: int, steps: int, of: Callable[[int, int], Work]) -> Own:
    return {rank: {step: of(rank, step) for step in range(2, steps + 1)} for rank in range(ranks)}


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("first", [2, 9])
def test_a_slow_rank_is_named_from_its_first_slow_step(ranks: int, first: int) -> None:
    slow = find(run(ranks, 20, lambda rank, step: Work(busy=0.1, idle=0.05 * (rank == 1 and step >= first))))
    assert slow is not None
    assert (slow.rank, slow.first, slow.last) == (1, first, 20)
    assert "rank 1 is slow, 1.5 times as long as the others: 150 ms" in str(slow)


def test_some_milliseconds_of_sleep_are_seen_where_as_much_computing_is_not() -> None:
    assert find(run(2, 12, lambda rank, _: Work(busy=0.1, idle=0.006 * rank))) is not None
    assert find(run(2, 12, lambda rank, _: Work(busy=0.1 + 0.006 * rank, idle=0.0))) is None


def test_noise_names_nobody() -> None:
    noise = random.Random(7)
    for _ in range(200):
        assert find(run(8, 20, lambda *_: Work(busy=0.1 * noise.gauss(1, 0.08), idle=0.0))) is None


def test_a_rank_that_is_slow_now_and_then_is_none() -> None:
    assert find(run(2, 20, lambda rank, step: Work(busy=0.1, idle=0.3 * (rank == 1 and step % 3 == 0)))) is None
    assert find(run(2, 20, lambda rank, step: Work(busy=0.1, idle=0.3 * (rank == 1 and step < 5)))) is None


def test_one_rank_or_few_steps_name_nobody() -> None:
    assert find({}) is None
    assert find(run(1, 20, lambda *_: Work(busy=0.1, idle=0.9))) is None
    assert find(run(2, 4, lambda rank, _: Work(busy=0.1, idle=0.9 * rank))) is None


def test_damaged_lines_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "pace").mkdir()
    line = json.dumps({"step": 2, "busy": 0.1, "idle": 0.0})
    (tmp_path / "pace" / "0.jsonl").write_text(f"{line}\n{{")
    (tmp_path / "pace" / "strange.jsonl").write_text(line)
    assert read(tmp_path) == {0: {2: Work(busy=0.1, idle=0.0)}}
    assert read(tmp_path / "none") == {}
