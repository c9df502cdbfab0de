"""Selecting the progress display that suits standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from primus.progress import PlainProgress, Progress, QuietProgress


@contextmanager
def choose_progress(json: bool = False) -> Iterator[Progress]:
    """Yield the display of this command: bars on a terminal, lines in a log or pipe, nothing with ``--json``."""
    if json:
        yield QuietProgress()
    elif not sys.stderr.isatty():
        plain = PlainProgress()
        try:
            yield plain
        finally:
            plain.close()
    else:
        # Seam "terminal": importing rich takes 60 ms, and a log or pipe does not need it.
        from primus.bars import RichProgress

        with RichProgress() as progress:
            yield progress
