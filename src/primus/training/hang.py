"""Ending a job that hangs. Every rank prints its stack, and the rank that the others wait for is reported."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from primus.training import failure

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
# Functions in which a rank waits for the others. Backward passes enter collectives from C++, below autograd's frame.
_WAITING = re.compile(r"torch/distributed/|_engine_run_backward|torch/autograd/graph\.py")


def end_ranks(launcher: int, output: Path, seconds: float) -> None:
    """End all ranks below the process ``launcher`` with SIGABRT, on which Python prints the stack.

    A stopped rank cannot print. It is recorded as hung in the job's folder, and killed.
    """
    for pid, rank in _ranks(launcher).items():
        state = _state(pid)
        if state in "TtD":
            what = "stopped (SIGSTOP, or a debugger)" if state in "Tt" else "waiting for a disk or a device"
            failure.note(output, rank, f"hung: no progress for {seconds:g} s; its process is {what}")
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL if state in "Tt" else signal.SIGABRT)


def stacks(output: Path) -> dict[int, str]:
    """Return rank → the stack that it wrote when a fatal signal ended it, innermost frame first."""
    found = {}
    for file in failure.stack_file(output, 0).parent.glob("rank-*.txt"):
        with suppress(OSError, ValueError):
            if text := file.read_text(encoding="utf-8", errors="replace"):
                found[int(file.stem.removeprefix("rank-"))] = text
    return dict(sorted(found.items()))


def name_hung(output: Path, seconds: float) -> list[int]:
    """Return the ranks whose stacks show that they did not wait for others, and record each in the job's folder."""
    hung = []
    for rank, text in stacks(output).items():
        # Other threads can come first. The main thread is the one that receives the signal.
        frames = list(_FRAME.finditer(text.partition("Current thread 0x")[2].partition("\n\n")[0]))
        if frames and not any(_WAITING.search(frame["file"]) for frame in frames):
            top = frames[0]
            place = f"{top['function']} ({Path(top['file']).name}:{top['line']})"
            failure.note(output, rank, f"hung: no progress for {seconds:g} s; it is in {place}")
            hung.append(rank)
    return hung


def _ranks(launcher: int) -> dict[int, int]:
    """Return process → rank for the launcher's children: only the ranks, not the processes that they start."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError, KeyError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == launcher:
                    words = (entry / "environ").read_bytes().split(b"\0")
                    given = dict(word.split(b"=", 1) for word in words if b"=" in word)
                    found[int(entry.name)] = int(given[b"RANK"])
    return found


def _state(pid: int) -> str:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"
