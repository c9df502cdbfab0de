"""Try cases one after another, so that a failed one does not hide the others."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

Check = Callable[[str, Path], None]


def try_all(checks: Iterable[tuple[Check, Sequence[str]]]) -> None:
    """Call each check with each of its names and an empty folder. Raises AssertionError if one of them raised."""
    every = [(check, name) for check, names in checks for name in names]
    failed = 0
    for check, name in every:
        with TemporaryDirectory() as folder:
            try:
                check(name, Path(folder))
            except Exception:  # noqa: BLE001, every case is tried
                failed += 1
                print(f"{check.__name__}: {name}\n{traceback.format_exc(limit=-3)[-1500:]}", file=sys.stderr)
    print(f"{len(every)} cases, {failed} failed")
    assert not failed, f"{failed} of {len(every)} cases failed"
