"""Search data for several short texts in one pass, at several gigabytes per second and without the GIL."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from functools import cache

import hyperscan


class Needles:
    """A search for ``texts``. Threads may share it."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
        self._database.compile(
            expressions=[re.escape(text) for text in texts],
            ids=range(len(texts)),
            elements=len(texts),
            flags=[hyperscan.HS_FLAG_SINGLEMATCH] * len(texts),
        )
        self._texts = tuple(texts)
        self._of_thread = threading.local()

    def found_in(self, data: bytes) -> frozenset[bytes]:
        """Return the texts that ``data`` contains."""
        if (scratch := getattr(self._of_thread, "scratch", None)) is None:
            scratch = self._of_thread.scratch = hyperscan.Scratch(self._database)
        found: list[int] = []
        self._database.scan(data, match_event_handler=lambda place, *_: found.append(place), scratch=scratch)
        return frozenset(self._texts[place] for place in found)


@cache
def needles(*texts: bytes) -> Needles:
    """Return the search for ``texts``. It is cached, because compiling it takes milliseconds."""
    return Needles(texts)
