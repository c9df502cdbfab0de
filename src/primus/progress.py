"""Progress of long work: bars with speed and remaining time on a terminal, lines in a log or pipe."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

# Short enough to show that a build is alive, long enough for the log of a build that takes an hour.
HEARTBEAT_S = 30.0


class Progress:
    """Takes reports about tasks, from any thread, and shows nothing.

    ``key`` identifies one task; amounts are in ``unit`` ("bytes", "files", "steps").
    """

    def start(self, key: str, label: str, total: int | None = None, unit: str = "bytes") -> None:
        """Start a task, or start it again; ``total`` is None if it is unknown."""

    def advance(self, key: str, amount: int) -> None:
        """Report that ``amount`` more is done. A negative amount takes back work that has to be repeated."""

    def follow(self, key: str, log: Path) -> None:
        """Name the ``log`` to which the task's tool writes. Its last line shows what the tool is doing."""

    def finish(self, key: str, note: str = "") -> None:
        """Finish a task; ``note`` describes the result in a few words."""

    def say(self, text: str) -> None:
        """Print a line that stays on the screen."""


@contextmanager
def choose_progress(json: bool = False) -> Iterator[Progress]:
    """Yield the display of this command: bars on a terminal, lines in a log or pipe, nothing with ``--json``."""
    if json:
        yield Progress()
        return
    with RichProgress() as progress:
        yield progress


class RichProgress(Progress):
    """Shows running tasks, and one line per finished task. A context manager.

    On a terminal, each running task has a bar. In a log or pipe, a heartbeat prints a line per running task every
    ``heartbeat_s``, with its elapsed time, its amount, and the last line of its tool.
    """

    def __init__(self, console: Console | None = None, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            _Amount(),
            _LastLine(),
            console=self._console,
            transient=True,
            refresh_per_second=8,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._guard = threading.Lock()
        self._heartbeat_s = heartbeat_s
        self._closed = threading.Event()

    def __enter__(self) -> RichProgress:
        self._bars.start()
        if not self._console.is_terminal:
            threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._bars.stop()

    def start(self, key: str, label: str, total: int | None = None, unit: str = "bytes") -> None:
        """Show the task; its bar pulses if ``total`` is unknown."""
        with self._guard:
            if key in self._tasks:
                self._bars.update(self._tasks[key], description=label, total=total, completed=0, unit=unit)
            else:
                self._tasks[key] = self._bars.add_task(label, total=total, unit=unit, log=None)

    def advance(self, key: str, amount: int) -> None:
        """Move the bar."""
        with self._guard:
            if key in self._tasks:
                self._bars.advance(self._tasks[key], amount)

    def follow(self, key: str, log: Path) -> None:
        """Show the last line of the log next to the task."""
        with self._guard:
            if key in self._tasks:
                self._bars.update(self._tasks[key], log=log)

    def finish(self, key: str, note: str = "") -> None:
        """Replace the task by one line."""
        label = key
        with self._guard:
            if (task := self._tasks.pop(key, None)) is not None:
                label = next(row.description for row in self._bars.tasks if row.id == task)
                self._bars.remove_task(task)
        self.say(f"✓ {label}" + (f"  {note}" if note else ""))

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    def _beat(self) -> None:
        while not self._closed.wait(self._heartbeat_s):
            for task in self._bars.tasks:
                if (task.elapsed or 0) >= self._heartbeat_s / 2:
                    self.say(_heartbeat_line(task))


class _LastLine(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_last_line(task), style="dim", no_wrap=True, overflow="ellipsis")


class _Amount(ProgressColumn):
    def render(self, task: Task) -> Text:
        done, total = int(task.completed), task.total
        if task.fields["unit"] != "bytes":
            return Text(f"{done}/{int(total)}" if total is not None else (str(done) if done else ""))
        if total is None and not done:
            return Text("")
        words = [decimal(done) + (f"/{decimal(int(total))}" if total is not None else "")]
        if task.speed:
            words.append(f"{decimal(int(task.speed))}/s")
        if task.time_remaining is not None:
            words.append(f"{clock(task.time_remaining)} left")
        return Text("  ".join(words))


def _heartbeat_line(task: Task) -> str:
    share = f"{int(task.percentage)} %" if task.total else ""
    return "  ".join(filter(None, (f"… {task.description}", clock(task.elapsed or 0), share, _last_line(task))))


def _last_line(task: Task) -> str:
    return last_line(task.fields["log"]) if task.fields["log"] else ""


def clock(seconds: float) -> str:
    """Format seconds as ``2:05`` or ``1:02:05``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
