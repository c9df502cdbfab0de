"""Try cases one after another, so that a failed one does not hide the others."""

import contextlib
import io
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from primus_images.training.backends.finetune import objections

Check = Callable[[str, Path], None]


def try_all(checks: Iterable[tuple[Check, Sequence[str]]]) -> None:
    """Call each check with each of its names and an empty folder. Raises AssertionError if one of
    them raised.
    """
    every = [(check, name) for check, names in checks for name in names]
    failed = 0
    for check, name in every:
        with TemporaryDirectory() as folder:
            try:
                check(name, Path(folder))
            except Exception:  # noqa: BLE001, every case is tried
                failed += 1
                print(
                    f"{check.__name__}: {name}\n{traceback.format_exc(limit=-3)[-1500:]}",
                    file=sys.stderr,
                )
    print(f"{len(every)} cases, {failed} failed")
    assert not failed, f"{failed} of {len(every)} cases failed"


def here(command: list[str], **_: Any) -> SimpleNamespace:
    """Check weights in this process instead of one of its own, as importing torch each time would
    take minutes.
    """
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        objections.main(*command[-3:])
    return SimpleNamespace(stdout=printed.getvalue(), stderr="", returncode=0)
