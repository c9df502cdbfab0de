"""Progress on a terminal: bars with speed and remaining time, counts, and one line per finished task."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from primus.progress import last_line


class RichProgress:
    """Progress bars on a terminal. A context manager; at its end, the bars disappear and printed lines stay."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            _Amount(),
            _LastLine(),
            console=self._console,
            transient=True,
            refresh_per_second=8,
        )
        self._tasks: dict[str, Any] = {}
        self._labels: dict[str, str] = {}
        self._logs: dict[str, Path] = {}
        self._guard = Lock()

    def __enter__(self) -> RichProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start(self, key: str, label: str, total: int | None = None, unit: str = "bytes") -> None:
        """Show a bar (a pulsing one if ``total`` is unknown)."""
        with self._guard:
            if key in self._tasks:
                self._bars.remove_task(self._tasks.pop(key))
            self._labels[key] = label
            log = self._logs.get(key)
            self._tasks[key] = self._bars.add_task(label, total=total, unit=unit, log=log)

    def advance(self, key: str, amount: int) -> None:
        """Move the bar. A negative amount takes back work that has to be repeated."""
        with self._guard:
            if key in self._tasks:
                self._bars.advance(self._tasks[key], amount)

    def follow(self, key: str, log: Path) -> None:
        """Show the last line of the log next to the bar."""
        with self._guard:
            self._logs[key] = log
            if key in self._tasks:
                self._bars.update(self._tasks[key], log=log)

    def finish(self, key: str, note: str = "") -> None:
        """Replace the bar with one line."""
        with self._guard:
            task = self._tasks.pop(key, None)
            if task is not None:
                self._bars.remove_task(task)
            label = self._labels.pop(key, key)
            self._logs.pop(key, None)
        self.say(f"✓ {label}" + (f"  {note}" if note else ""))

    def say(self, text: str) -> None:
        """Print above the bars."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _LastLine(ProgressColumn):
    """The last line of a tool's output."""

    def render(self, task: Task) -> Text:
        """Return the last line of the task's log."""
        log = task.fields.get("log")
        return Text(last_line(log) if log else "", style="dim", no_wrap=True, overflow="ellipsis")


class _Amount(ProgressColumn):
    """The column to the right of the bar."""

    def render(self, task: Task) -> Text:
        """Return the count, or bytes with speed and remaining time."""
        done, total = int(task.completed), task.total
        if task.fields.get("unit") != "bytes":
            return Text(f"{done}/{int(total)}" if total is not None else (str(done) if done else ""))
        if total is None and not done:
            return Text("")
        words = [decimal(done) + (f"/{decimal(int(total))}" if total is not None else "")]
        if task.speed:
            words.append(f"{decimal(int(task.speed))}/s")
        if task.time_remaining is not None:
            minutes, seconds = divmod(int(task.time_remaining), 60)
            words.append(f"{minutes}:{seconds:02d} left")
        return Text("  ".join(words))
