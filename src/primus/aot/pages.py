"""Releasing memory of mapped files that a process only read, because the system can read it again."""

from __future__ import annotations

import ctypes
import importlib
import mmap
from collections.abc import Iterator
from pathlib import Path


def load(*libraries: str) -> None:
    """Import modules whose initialization reads a hundred megabytes of code, and release most of that memory again."""
    for name in libraries:
        importlib.import_module(name)
        forget_files()


def forget_files() -> None:
    """Release every page of a mapped file that this process did not change, such as code that ran once, and constants.

    A page that is used again is read from the system's page cache.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for start, end in _unchanged(Path("/proc/self/smaps").read_text(encoding="utf-8")):
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise")


def _unchanged(smaps: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each private file mapping in which no page was changed."""
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
        # Changed pages, such as relocated addresses, in memory or swapped out, cannot be read again from the file.
        elif name in ("Anonymous:", "Swap:", "Locked:"):
            own += int(values[0])
    if place and not own:
        yield place
