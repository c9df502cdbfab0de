"""What a person watching sees while long work runs. Work reports here; how it looks is one class's business."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

# Often enough to see that a build lives, seldom enough for the log of a build that takes an hour.
HEARTBEAT_S = 30.0


class Progress(Protocol):
    """Where long work reports. ``key`` names one piece of work; amounts are in ``unit`` ("bytes", "files", "steps").

    Methods may be called from several threads at once.
    """

    def start(self, key: str, label: str, total: int | None = None, unit: str = "bytes") -> None:
        """A piece of work begins; ``total`` is None when it is not known."""

    def advance(self, key: str, amount: int) -> None:
        """``amount`` more is done."""

    def follow(self, key: str, log: Path) -> None:
        """The piece's tool writes its output to ``log``; its last line tells what it is doing."""

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

    def follow(self, key: str, log: Path) -> None:
        """Do nothing."""

    def finish(self, key: str, note: str = "") -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""


class PlainProgress:
    """For logs and pipes: one line per finished piece, and every ``HEARTBEAT_S`` one per piece that is still running,
    with its elapsed time, how far it is, and the last line of its tool. :meth:`close` ends the heartbeat.
    """

    def __init__(self, stream: TextIO | None = None, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._stream = stream or sys.stderr
        self._every = heartbeat_s
        self._running: dict[str, _Piece] = {}
        self._guard = threading.Lock()
        self._closed = threading.Event()
        self._heart: threading.Thread | None = None

    def start(self, key: str, label: str, total: int | None = None, unit: str = "bytes") -> None:
        """Remember the piece; the heartbeat begins with the first one."""
        with self._guard:
            before = self._running.get(key)
            began = before.began if before else time.monotonic()
            self._running[key] = _Piece(label, total, began, log=before.log if before else None)
            if self._heart is None:
                self._heart = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
                self._heart.start()

    def advance(self, key: str, amount: int) -> None:
        """Count, for the heartbeat."""
        with self._guard:
            if piece := self._running.get(key):
                piece.done += amount

    def follow(self, key: str, log: Path) -> None:
        """Remember the log, for the heartbeat."""
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
        """End the heartbeat."""
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
    """``2:05`` or ``1:02:05``."""
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def last_line(log: Path, most: int = 100) -> str:
    """The last line of a tool's log that says anything, without escape sequences and cut to ``most`` characters."""
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
