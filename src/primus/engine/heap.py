"""Return freed memory that the C library holds on to. Does nothing on systems without glibc."""

from __future__ import annotations

import ctypes

# malloc.h
_M_ARENA_MAX = -8


def share() -> None:
    """Make threads that have no heap yet allocate from the main thread's heap.

    Otherwise each thread gets its own heap, whose last free block, tens of megabytes, is never returned.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Return freed memory to the system, such as the layer buffers of finished threads."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
