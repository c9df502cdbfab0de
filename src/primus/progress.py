"""Reporting the progress of long work. The work calls a Progress, whose class determines the display."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

# Short enough to show that a build is alive, long enough for the log of a build that takes an hour.
HEARTBEAT_S = 30.0


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
    """Reports nothing (``--json``, no-op builds, tests)."""

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


class PlainProgress:
    """Progress for logs and pipes: one line per finished task, and a heartbeat.

    Every ``HEARTBEAT_S``, the heartbeat prints a line per running task with its elapsed time, its amount, and the
    last line of its tool. :meth:`close` stops it.
    """

    def __init__(self, stream: TextIO | None = None, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._stream = stream or sys.stderr
        self._every = heartbeat_s
        self._running: dict[str, _Piece] = {}
        self._guard = threading.Lock()
        self._closed = threading.Event()
        self._heart: threading.Thread | None = None

    def start(self, key: str, label: str, total: int | None = None, unit: str = "bytes") -> None:
        """Record the task. The heartbeat starts with the first one."""
        with self._guard:
            before = self._running.get(key)
            began = before.began if before else time.monotonic()
            self._running[key] = _Piece(label, total, began, log=before.log if before else None)
            if self._heart is None:
                self._heart = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
                self._heart.start()

    def advance(self, key: str, amount: int) -> None:
        """Record the amount, for the heartbeat."""
        with self._guard:
            if piece := self._running.get(key):
                piece.done += amount

    def follow(self, key: str, log: Path) -> None:
        """Record the log, for the heartbeat."""
        with self._guard:
            if piece := self._running.get(key):
                piece.log = log

    def finish(self, key: str, note: str = "") -> None:
        """Print the label and the note."""
        with self._guard:
            piece = self._running.pop(key, None)
        self.say(f"✓ {piece.label if piece else key}" + (f"  {note}" if note else ""))

    def say(self, text: str) -> None:
        """Print the line."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Stop the heartbeat."""
        self._closed.set()

    def _beat(self) -> None:
        while not self._closed.wait(self._every):
            now = time.monotonic()
            with self._guard:
                pieces = [one for one in self._running.values() if now - one.began >= self._every / 2]
            for piece in pieces:
                self.say(piece.line(now))


@dataclass
class _Piece:
    label: str
    total: int | None
    began: float
    done: int = 0
    log: Path | None = None

    def line(self, now: float) -> str:
        words = [f"… {self.label}", clock(now - self.began)]
        if self.total:
            words.append(f"{min(100, 100 * self.done // self.total)} %")
        if self.log and (last := last_line(self.log)):
            words.append(last)
        return "  ".join(words)


def clock(seconds: float) -> str:
    """Format seconds as ``2:05`` or ``1:02:05``."""
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def last_line(log: Path, most: int = 100) -> str:
    """Return the last non-empty line of a tool's log, without escape sequences, cut to ``most`` characters."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 4096))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    text = re.sub(r"\033(?:\[[0-9;?]*[A-Za-z]|.)", "", text)
    lines = ["".join(c for c in line if c.isprintable()).strip() for line in re.split(r"[\r\n]+", text)]
    line = next((line for line in reversed(lines) if line), "")
    return line if len(line) <= most else line[: most - 1] + "…"
