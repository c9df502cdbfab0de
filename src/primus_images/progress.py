"""Progress of long work: bars with amounts on a terminal, lines in a log or pipe."""

import re
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Self

from rich import progress as bars
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from primus_images.files import text_if_readable
from primus_images.terminal import Screen


class Progress:
    """Shows running tasks, and one line per finished task.

    It is a context manager; any thread can call its methods. On a terminal, each running task has a
    bar. In a log or pipe, a heartbeat prints a line per running task every ``heartbeat_s``, with
    its elapsed time, its amount, and the last line of its tool. Without a ``console``, nothing is
    shown. ``key`` identifies one task; amounts are in ``unit`` ("bytes", "files", "steps").
    """

    def __init__(self, console: Console | None = None, *, heartbeat_s: float = 30.0) -> None:
        self._console = console or Console(quiet=True)
        self._live = self._console.is_terminal and not self._console.quiet
        self._bars = bars.Progress(
            bars.SpinnerColumn(),
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(bar_width=24),
            bars.TimeElapsedColumn(),
            _State(),
            console=self._console,
            transient=True,
            disable=not self._live,
        )
        self._tasks: dict[str, bars.TaskID] = {}
        self._guard = threading.Lock()
        self._heartbeat_s = heartbeat_s
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        self._bars.start()
        if not self._live and not self._console.quiet:
            threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._bars.stop()

    def start(self, key: str, label: str, total: int | None = None, unit: str = "bytes") -> None:
        """Start a task, or start it again; its bar pulses if ``total`` is unknown."""
        with self._guard:
            if key in self._tasks:
                self._bars.update(
                    self._tasks[key], description=label, total=total, completed=0, unit=unit
                )
            else:
                self._tasks[key] = self._bars.add_task(label, total=total, unit=unit, log=None)

    def advance(self, key: str, amount: int) -> None:
        """Report that ``amount`` more is done.

        A negative amount takes back work that has to be repeated.
        """
        with self._guard:
            if key in self._tasks:
                self._bars.advance(self._tasks[key], amount)

    def follow(self, key: str, log: Path) -> None:
        """Name the ``log`` to which the task's tool writes; its last line is shown."""
        with self._guard:
            if key in self._tasks:
                self._bars.update(self._tasks[key], log=log)

    def finish(self, key: str, note: str = "") -> None:
        """Replace the task by one line; ``note`` describes the result in a few words."""
        line = f"✓ {key}"
        with self._guard:
            task_id = self._tasks.pop(key, None)
            for task in self._bars.tasks:
                if task.id == task_id:
                    line = f"✓ {task.description}"
                    self._bars.remove_task(task.id)
        if note:
            line += f"  {note}"
        self.say(line)

    def say(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self._console.print(Text(text), soft_wrap=True)

    def _beat(self) -> None:
        while not self._closed.wait(self._heartbeat_s):
            for task in self._bars.tasks:
                seconds = task.elapsed or 0
                if seconds < self._heartbeat_s / 2:
                    continue
                words = [f"… {task.description}", str(timedelta(seconds=int(seconds)))]
                if task.total:
                    words.append(f"{int(task.percentage)} %")
                words.append(last_line(task.fields["log"]))
                self.say("  ".join(words).rstrip())


def choose_progress(json: bool = False) -> Progress:
    """Return the display of this command.

    It has bars on a terminal with color, otherwise lines; nothing with ``--json``.
    """
    if json:
        return Progress()
    return Progress(Console(stderr=True, force_terminal=Screen.of(sys.stderr).colour))


class _State(bars.ProgressColumn):
    """The amount, the remaining time, and the last line of the task's tool."""

    def render(self, task: bars.Task) -> Text:
        words = []
        if task.total is not None:
            words.append(f"{_amount(task.completed, task)}/{_amount(task.total, task)}")
        elif task.completed:
            words.append(_amount(task.completed, task))
        if task.time_remaining is not None:
            words.append(f"{timedelta(seconds=int(task.time_remaining))} left")
        words.append(last_line(task.fields["log"]))
        return Text("  ".join(words), no_wrap=True, overflow="ellipsis")


def _amount(number: float, task: bars.Task) -> str:
    if task.fields["unit"] == "bytes":
        return decimal(int(number))
    return str(int(number))


def last_line(log: Path | None) -> str:
    """Return the last non-empty line of a tool's log, without escape sequences.

    It is cut to 100 characters.
    """
    if log is None:
        return ""
    text = re.sub(r"\033(?:\[[0-9;?]*[A-Za-z]|.)", "", text_if_readable(log, 4096))
    for line in reversed(re.split(r"[\r\n]+", text)):
        printable = "".join(c for c in line if c.isprintable()).strip()
        if len(printable) > 100:
            return printable[:99] + "…"
        if printable:
            return printable
    return ""
