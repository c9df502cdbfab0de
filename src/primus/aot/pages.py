"""Memory that a process need not hold: what it only read of its files, which the system can read again."""

from __future__ import annotations

import ctypes
import importlib
import mmap
from collections.abc import Iterator
from pathlib import Path

__all__ = ["forget_files", "load"]


def load(*libraries: str) -> None:
    """Import modules whose start reads a hundred megabytes of their own code, nearly all of it for the last time."""
    for name in libraries:
        importlib.import_module(name)
        forget_files()


def forget_files() -> None:
    """Let go of every page of a mapped file that this process did not change: code that ran once, constants.

    What is touched again comes back from the system's cache.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for start, end in _unchanged(Path("/proc/self/smaps").read_text(encoding="utf-8")):
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise")


def _unchanged(smaps: str) -> Iterator[tuple[int, int]]:
    """First and last address of each private mapping of a file that holds no page but the file's own."""
    place, own = None, 0
    for line in smaps.splitlines():
        name, *values = line.split(None, 5)
        if not name.endswith(":"):
            # ADDRESS-ADDRESS rwxp OFFSET DEVICE INODE [PATH]
            if place and not own:
                yield place
            place, own = None, 0
            if len(values) == 5 and values[4].startswith("/") and values[0][1] == "-" and values[0][3] == "p":
                start, _, end = name.partition("-")
                place = int(start, 16), int(end, 16)
        # Pages that were written to, in memory or swapped out, are lost for good: relocated addresses, for one.
        elif name in ("Anonymous:", "Swap:", "Locked:"):
            own += int(values[0])
    if place and not own:
        yield place
