"""The launcher's own clock for a run's steps, independent of the one that the run reports."""

from __future__ import annotations

import time

from primus.training import logs


class Clock:
    """Records in ``arrivals`` when the first line of each step arrives, in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.arrivals: dict[int, float] = {}

    def line(self, text: str) -> None:
        """Handle a line of the job's log."""
        step = logs.step_in(text)
        if step is not None:
            self.arrivals.setdefault(step.step, time.monotonic())
