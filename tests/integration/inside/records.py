"""Training runs in processes of their own, several side by side, each recorded as one JSON line when it ends."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from many import forked, train
from silent_jobs import write

from primus.training.job import Job

Row = dict[str, Any]
# Seconds after which a run counts as one that does not end.
LIMIT = 600


def arguments(doc: str | None, only: str) -> argparse.ArgumentParser:
    """The options that every such program has; ``only`` says what --only is matched with."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--together", type=int, default=1, help="runs side by side; each has two processes")
    parser.add_argument("--only", default="", help=f"regular expression on {only}")
    return parser


def rows(out: Path) -> list[Row]:
    """The runs that ``out`` holds."""
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


def record(
    row: Row,
    fault: str,
    make: Callable[[Path], Job],
    judge: Callable[[Job, int], tuple[Row, bool]],
    broken: Callable[[str], Row],
    out: Path,
    port: int,
) -> None:
    """Train the job of ``make`` with ``fault`` ("-": none) and append ``row``, with what ``judge`` adds, to ``out``.

    ``judge`` gets the job and its exit code. The end of its logs is kept where it says that the run is not as it should
    be. ``broken`` makes the row of a run that could not be judged, from a sentence.
    """
    folder = Path(tempfile.mkdtemp(prefix="run-"))
    log = folder / "reference.txt"
    try:
        job = make(folder / "job")
        write(job)
        with log.open("w") as file:
            child = forked(partial(train, job.output, fault, port), file.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found, fine = judge(job, code)
        row |= found
        if not fine:
            logs = (log, job.output / "log.txt")
            row["log"] = [file.read_text(errors="replace")[-2000:] for file in logs if file.exists()]
    except Exception as error:  # noqa: BLE001 - a run that breaks is a result
        row |= broken(f"the harness failed: {type(error).__name__}: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def together(left: list[partial[None]], count: int, seconds: float) -> None:
    """Call each of ``left`` with a port in a process of its own, ``count`` at a time; end those left over in time."""
    until = time.monotonic() + seconds
    running: dict[int, float] = {}
    number = 0
    while (left or running) and time.monotonic() < until:
        while left and len(running) < count:
            number += 1
            port = 20000 + (os.getpid() * 7 + number) % 20000
            child = forked(partial(_alone, partial(left.pop(0), port)))
            running[child] = time.monotonic()
        ended, _ = os.waitpid(-1, os.WNOHANG)
        if ended:
            running.pop(ended, None)
        else:
            time.sleep(0.1)
        for child, began in running.items():
            if time.monotonic() - began > LIMIT:
                _end(child)
    for child in running:
        _end(child)


def _alone(work: partial[None]) -> None:
    """Do ``work`` in a process group of its own, so that all its processes can be ended together."""
    os.setsid()
    work()


def _end(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
