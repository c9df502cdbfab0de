"""The benchmark of starts: what counts as one, and what is judged. Training itself is not started here."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from primus.errors import CheckFailed

ROOT = Path(__file__).parents[3]
LINE = "[titan] {} - root - INFO - Starting job: a recipe"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import launcher, starts

    return launcher, starts


def after(seconds: float) -> str:
    when = time.time() + seconds
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) + f",{round(when % 1 * 1000) % 1000:03d}"


def test_a_start_ends_with_the_last_rank_and_the_command_is_ended(bench: Any, tmp_path: Path) -> None:
    lines = [LINE.format(after(2.0)), "[titan] noise - root - INFO - Starting", LINE.format(after(3.0))]
    script = f"import time; print({chr(10).join(lines)!r}, flush=True); time.sleep(600)"
    log = tmp_path / "log.txt"
    began = time.monotonic()
    found = bench[1]._seconds([sys.executable, "-c", script], log, log, 2)
    assert 1.5 < found < 3.1  # the line's own time, not when it was read
    assert time.monotonic() - began < 60


def test_a_command_that_ends_without_its_mark_is_an_error(bench: Any, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    script = f"print({LINE.format(after(0))!r}); print('boom')"
    with pytest.raises(CheckFailed, match=r"did not start training:\n(.|\n)*boom"):
        bench[1]._seconds([sys.executable, "-c", script], log, log, 2)


def test_the_difference_of_each_turn_is_judged(bench: Any) -> None:
    pairs = [{"ours": 5.0, "bare": 4.5}, {"ours": 9.0, "bare": 4.0}, {"ours": 4.0, "bare": 4.2}]
    commands = {"plan": "primus plan", "show": "primus show"}
    found = {"commands": commands, "pairs": {"1": pairs}, "plan": [0.1], "show": [0.2, 0.16, 0.1]}
    start, plan, show = bench[0]._rows(found)
    assert start["overhead"]["samples"] == [0.5, 5.0, -0.2]
    assert (start["overhead"]["median"], start["met"]) == (0.5, True)
    assert "met" not in plan
    assert (show["ours"]["median"], show["bar"], show["met"]) == (0.16, {"seconds": 0.15}, False)
