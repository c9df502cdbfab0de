"""The progress display that fits where standard error leads to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from primus.progress import PlainProgress, Progress, QuietProgress


@contextmanager
def choose_progress(json: bool = False) -> Iterator[Progress]:
    """The right Progress for this run: bars on a terminal, lines in a log or pipe, nothing with ``--json``."""
    if json:
        yield QuietProgress()
    elif not sys.stderr.isatty():
        plain = PlainProgress()
        try:
            yield plain
        finally:
            plain.close()
    else:
        # Seam "terminal": rich costs 60 ms, and a log or pipe has no use for it.
        from primus.bars import RichProgress

        with RichProgress() as progress:
            yield progress
