"""Memory that the C library keeps although nothing uses it, asked back. Where it is not glibc nothing happens."""

from __future__ import annotations

import ctypes

# malloc.h
_M_ARENA_MAX = -8


def share() -> None:
    """Let threads allocate from the main thread's heap, as far as they have none yet.

    Each would get its own, and the last free piece of those, tens of megabytes, is never given back.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Return what was freed to the system: a layer's buffers, once per thread."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
