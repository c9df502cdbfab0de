"""What a person watching sees while long work runs. Work reports here; how it looks is one class's business."""

from __future__ import annotations

import sys
from typing import Protocol, TextIO

__all__ = ["PlainProgress", "Progress", "QuietProgress"]


class Progress(Protocol):
    """Where long work reports. ``key`` names one piece of work; amounts are in ``unit`` ("bytes", "files", "steps").

    Methods may be called from several threads at once.
    """

    def start(self, key: str, label: str, total: int | None = None, unit: str = "bytes") -> None:
        """A piece of work begins; ``total`` is None when it is not known."""

    def advance(self, key: str, amount: int) -> None:
        """``amount`` more is done."""

    def finish(self, key: str, note: str = "") -> None:
        """The piece is done; ``note`` is a few words on the outcome."""

    def say(self, text: str) -> None:
        """One line that stays on the screen."""


class QuietProgress:
    """Reports nothing (``--json``, no-op builds, tests)."""

    def start(self, key: str, label: str, total: int | None = None, unit: str = "bytes") -> None:
        """Do nothing."""

    def advance(self, key: str, amount: int) -> None:
        """Do nothing."""

    def finish(self, key: str, note: str = "") -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""


class PlainProgress:
    """One line per finished piece, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._labels: dict[str, str] = {}

    def start(self, key: str, label: str, total: int | None = None, unit: str = "bytes") -> None:
        """Remember the label."""
        self._labels[key] = label

    def advance(self, key: str, amount: int) -> None:
        """Do nothing: a log wants no bars."""

    def finish(self, key: str, note: str = "") -> None:
        """Print the label and the note."""
        self.say(f"✓ {self._labels.pop(key, key)}" + (f"  {note}" if note else ""))

    def say(self, text: str) -> None:
        """Print the line."""
        print(text, file=self._stream, flush=True)
