"""When the lines of a run's steps reach its launcher: a second clock beside the one that the run reports by."""

from __future__ import annotations

import time

from primus.training import logs


class Clock:
    """Notes the arrival of each step's first line, in seconds of a monotonic clock, in ``arrivals``."""

    def __init__(self) -> None:
        self.arrivals: dict[int, float] = {}

    def line(self, text: str) -> None:
        """Take a line of the job's log."""
        step = logs.step_in(text)
        if step is not None:
            self.arrivals.setdefault(step.step, time.monotonic())
