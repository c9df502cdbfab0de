"""Reporting the progress of long work. The work calls a Progress; what it shows depends on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class Progress(Protocol):
    """The interface for reporting. ``key`` identifies one task; amounts are in ``unit`` ("bytes", "files",
    "steps").

    Methods may be called from several threads at the same time.
    """

    def start(self, key: str, label: str, total: int | None = None, unit: str = "bytes") -> None:
        """Start a task; ``total`` is None if it is unknown."""

    def advance(self, key: str, amount: int) -> None:
        """Report that ``amount`` more is done."""

    def follow(self, key: str, log: Path) -> None:
        """Name the ``log`` to which the task's tool writes. Its last line shows what the tool is doing."""

    def finish(self, key: str, note: str = "") -> None:
        """Finish a task; ``note`` describes the result in a few words."""

    def say(self, text: str) -> None:
        """Print a line that stays on the screen."""


class QuietProgress:
    """Reports nothing."""

    def start(self, key: str, label: str, total: int | None = None, unit: str = "bytes") -> None:
        """Do nothing."""

    def advance(self, key: str, amount: int) -> None:
        """Do nothing."""

    def follow(self, key: str, log: Path) -> None:
        """Do nothing."""

    def finish(self, key: str, note: str = "") -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""


@contextmanager
def choose_progress(json: bool = False) -> Iterator[Progress]:
    """Yield the display of this command: bars on a terminal, lines in a log or pipe, nothing with ``--json``."""
    if json:
        yield QuietProgress()
        return
    # Seam "terminal": importing rich takes as long as a build with nothing to do.
    from primus.bars import RichProgress

    with RichProgress() as progress:
        yield progress
