"""Why a job hangs: the rank that the others wait for, as the stacks of all ranks show."""

import os
import re
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from primus_images.training.run.failure import PATTERNS, note, stack_file
from primus_images.training.run.processes import processes

# States of a process as in /proc, and what such a process does.
_STUCK = {
    "T": "stopped (SIGSTOP, or a debugger)",
    "t": "stopped (SIGSTOP, or a debugger)",
    "D": "waiting for a disk or a device",
}


def end_ranks(launcher: int, output: Path, seconds: float) -> set[int]:
    """End all ranks below the process ``launcher`` with SIGABRT, on which Python prints the stack.

    A rank that is stopped, or waits for a device, cannot print: it is noted as hung. Returns the
    other ranks.
    """
    able = set()
    for pid, (parent, state) in processes().items():
        rank = _rank(pid)
        if parent != launcher or rank is None:
            continue
        if state in _STUCK:
            why = f"its process is {_STUCK[state]}"
            note(output, rank, f"hung: no progress for {seconds:g} s; {why}")
        else:
            able.add(rank)
        number = signal.SIGABRT
        if state in "Tt":
            number = signal.SIGKILL
        with suppress(OSError):  # it has just ended
            os.kill(pid, number)
    return able


def _rank(pid: int) -> int | None:
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes()
        match = re.search(rb"(?:^|\0)RANK=(\d+)\0", variables)
        if match:
            return int(match[1])
    return None


def stacks(output: Path) -> dict[int, str]:
    """Return rank → the stack that it wrote when a fatal signal ended it, innermost frame first."""
    texts = {}
    for file in stack_file(output, 0).parent.glob("rank-*.txt"):
        with suppress(OSError, ValueError):
            text = file.read_text(encoding="utf-8", errors="replace")
            if text:
                texts[int(file.stem.removeprefix("rank-"))] = text
    return dict(sorted(texts.items()))


def name_hung(output: Path, seconds: float, ended: Collection[int]) -> list[int]:
    """Return the ranks that did not wait for others, and record each in the job's folder.

    If no stack shows one, these are the ranks without a stack, of those that were ``ended``.
    """
    written = stacks(output)
    places = {}
    for rank, text in written.items():
        place = _place(text)
        if place:
            places[rank] = f"it is in {place}"
    if not places:
        for rank in sorted(set(ended) - written.keys()):
            places[rank] = "it left no stack"
    for rank, place in places.items():
        note(output, rank, f"hung: no progress for {seconds:g} s; {place}")
    return list(places)


def _place(stack: str) -> str:
    """Return the function that a rank is in; empty if it waits for others."""
    # Other threads can come first. The main thread is the one that receives the signal.
    main_thread = stack.partition("Current thread 0x")[2].partition("\n\n")[0]
    frames = list(PATTERNS["frame"].finditer(main_thread))
    if not frames or any(PATTERNS["waiting"].search(frame["file"]) for frame in frames):
        return ""
    innermost = frames[0]
    return f"{innermost['function']} ({Path(innermost['file']).name}:{innermost['line']})"
