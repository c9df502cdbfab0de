"""Finding the rank that the others wait for, by comparing how long each rank works on its own in a step.

All ranks report the same duration of a step, because they wait for each other in every collective. A rank's own work is
the step without that waiting, and without the time in which no core was available to the rank.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

from primus.patch import replace

_FOLDER = "pace"
# A rank is slow in a step if its own work exceeds the median of the others by this share and by these seconds.
# Computing times vary with the load of the machine: by up to 10 % between the ranks of healthy runs on two cores with
# five times as many processes. The time in which a rank neither computes nor waits is exact: below 1.5 ms there.
_COMPUTING, _IDLE = 0.25, 0.03
_SECONDS = 0.002
# A rank is a straggler if it is slow in at least this many steps, and in this share of the steps from the first one on.
_STEPS = 4
_PERSISTS = 0.75


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """``seconds`` of own work in the median step since ``first``, and ``others``, the same of the other ranks."""

    rank: int
    first: int
    last: int
    seconds: float
    others: float

    def __str__(self) -> str:
        times = f", {self.seconds / self.others:.3g} times as long as the others" if self.others > 0 else ""
        return (
            f"rank {self.rank} is slow{times}: {1e3 * self.seconds:.3g} ms of own work in a step, the others take "
            f"{1e3 * self.others:.3g} ms (steps {self.first}–{self.last})"
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """One rank's own work in a step, in seconds: ``busy`` on a core, ``idle`` asleep or waiting for a disk."""

    busy: float
    idle: float

    @property
    def seconds(self) -> float:
        """The sum of both."""
        return self.busy + self.idle


class Pace:
    """Measures one rank's own work, and writes a line per step to ``OUTPUT/pace/RANK.jsonl``.

    Works only on CPUs, where a rank is blocked while it waits. On GPUs, and with one rank, it does nothing. Call it
    in the thread that trains.
    """

    def __init__(self, output: Path, device: str) -> None:
        import torch.distributed as dist

        self._measures = device == "cpu" and dist.get_world_size() > 1
        if not self._measures:
            return
        folder = output / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{dist.get_rank()}.jsonl").open("w", encoding="utf-8", buffering=1)
        self._waits = _waits()
        self.start()

    def start(self) -> None:
        """Start measuring. The time before belongs to no step."""
        if self._measures:
            self._at = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        waits = self._waits
        busy, delayed = time.thread_time() - waits.busy, _delayed() - waits.delayed
        return time.perf_counter(), busy, delayed, waits.seconds

    def step(self, step: int) -> None:
        """End a step, which began when the last one ended or at :meth:`start`."""
        if not self._measures:
            return
        began, self._at = self._at, self._now()
        wall, busy, delayed, waited = (now - before for now, before in zip(self._at, began, strict=True))
        idle = max(0.0, wall - busy - delayed - waited)
        line = {"step": step, "busy": round(busy, 6), "idle": round(idle, 6), "seconds": round(wall, 6)}
        # Ignore a full disk here. What the job itself cannot save will end it.
        with suppress(OSError):
            self._file.write(json.dumps(line) + "\n")


def read(output: Path) -> dict[int, dict[int, Work]]:
    """Return rank → step → own work, from the files of the run in ``output``."""
    paces: dict[int, dict[int, Work]] = {}
    for file in (output / _FOLDER).glob("*.jsonl"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            lines = file.read_text(encoding="utf-8").splitlines()
            rows = paces.setdefault(int(file.stem), {})
            for row in map(json.loads, lines):
                rows[int(row["step"])] = Work(busy=float(row["busy"]), idle=float(row["idle"]))
    return paces


def find(work: Mapping[int, Mapping[int, Work]]) -> Straggler | None:
    """Return the slowest straggler, or None. ``work``: rank → step → own work."""
    steps = sorted(set.intersection(*(set(rows) for rows in work.values()))) if len(work) > 1 else []
    stragglers = [straggler for rank in work if (straggler := _of_rank(rank, work, steps))]
    return max(stragglers, key=lambda straggler: straggler.seconds - straggler.others, default=None)


def _of_rank(rank: int, work: Mapping[int, Mapping[int, Work]], steps: Sequence[int]) -> Straggler | None:
    rest = [rows for other, rows in work.items() if other != rank]
    others = {step: statistics.median(rows[step].seconds for rows in rest) for step in steps}
    slow = [step for step in steps if _is_slow(work[rank][step], [rows[step] for rows in rest], others[step])]
    while len(slow) >= _STEPS:
        if len(slow) >= _PERSISTS * sum(step >= slow[0] for step in steps):
            mine = statistics.median(work[rank][step].seconds for step in slow)
            theirs = statistics.median(others[step] for step in slow)
            return Straggler(rank=rank, first=slow[0], last=slow[-1], seconds=mine, others=theirs)
        # A step that was slow by chance can precede the first slow one.
        slow = slow[1:]
    return None


def _is_slow(mine: Work, rest: Sequence[Work], usual: float) -> bool:
    more, idle = mine.seconds - usual, mine.idle - statistics.median(work.idle for work in rest)
    return more > max(_COMPUTING * usual, _SECONDS) or min(more, idle) > max(_IDLE * usual, _SECONDS)


class _Waits:
    """How long this process's training thread waited for other ranks: ``seconds``, of which ``busy`` on a core, and
    ``delayed`` without a core although the wait was over.
    """

    def __init__(self) -> None:
        self.seconds = self.busy = self.delayed = 0.0
        self._thread = threading.get_ident()
        self._inside = False

    def around(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        @wraps(wait)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread or torch.compiler.is_compiling():
                return wait(*arguments, **named)
            self._inside = True
            began = time.perf_counter(), time.thread_time(), _delayed()
            try:
                return wait(*arguments, **named)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - began[0]
                self.busy += time.thread_time() - began[1]
                self.delayed += _delayed() - began[2]

        return timed


def _waits() -> _Waits:
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    waits = _Waits()
    replace(dist.Work, "wait", waits.around(dist.Work.wait))
    replace(functional, "wait_tensor", waits.around(functional.wait_tensor), takes="tensor")
    return waits


def _delayed() -> float:
    file = _schedule(threading.get_ident())
    return int(os.pread(file, 64, 0).split()[1]) / 1e9 if file >= 0 else 0.0


@cache
def _schedule(_thread: int) -> int:
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        int(os.pread(file, 64, 0).split()[1])
    except (OSError, ValueError, IndexError):
        return -1
    return file
