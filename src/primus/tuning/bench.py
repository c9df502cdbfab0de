"""Measure shapes with hipblaslt-bench on all GPUs at once. Finished measurements survive an interruption."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import queue
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from primus.errors import CheckFailed, HostError
from primus.tuning.shapes import Shape

# As in the documents' offline tuning: rotating buffers of 512 MB, 20 timed calls, and no further calls of a solution
# that is slow at first.
_COMMON = ("--rotating", "512", "--iters", "20", "--cold_iters", "5")
_DEFAULT = ("--algo_method", "heuristic", "--requested_solution", "1")
_SEARCH = ("--algo_method", "all", "--requested_solution", "-1", "--skip_slow_solution_ratio", "0.7")
# $0 is hipblaslt-bench. Both logs are renamed last, so that a result is complete or absent. The shell renames them even
# if the process that started it has ended.
_SCRIPT = """\
set -e
eval "$DEFAULT" > "$OUT.default.part" 2>&1
eval "$SEARCH" > "$OUT.search.part" 2>&1
mv "$OUT.default.part" "$OUT.default.txt"
mv "$OUT.search.part" "$OUT.search.txt"
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The times of one shape per call in microseconds: of hipBLASLt's default solution, and of the best one.

    ``tuned`` are the lines for hipBLASLt's override file, starting with the header.
    """

    shape: Shape
    default: float
    best: float
    tuned: tuple[str, ...]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the folder while the context is open. Raises HostError if another process holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise HostError(
                f"another process tunes in {folder}", hint="wait for it, or choose another --folder"
            ) from error
        yield


def _done(folder: Path, shape: Shape) -> bool:
    # This file is renamed last.
    return (folder / f"{shape.key}.search.txt").is_file()


def measure(
    shapes: Sequence[Shape],
    folder: Path,
    bench: str,
    gpus: Sequence[str],
    *,
    on_done: Callable[[Shape], None] = lambda _shape: None,
) -> None:
    """Measure every shape that has no result in ``folder`` yet, one at a time on each of ``gpus``.

    If a process of an earlier command still measures a shape, wait for it instead of starting it again. Raises
    CheckFailed for shapes that could not be measured, after all others are done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting: queue.SimpleQueue[Shape] = queue.SimpleQueue()
    for shape in shapes:
        if not _done(folder, shape):
            waiting.put(shape)
    stop, failed = threading.Event(), queue.SimpleQueue[tuple[Shape, str]]()
    running: dict[int, subprocess.Popen[bytes]] = {}

    def work(gpu: str) -> None:
        while not stop.is_set():
            try:
                shape = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                reason = _one(shape, folder, bench, gpu, running)
            except OSError as error:
                reason = f"{bench}: {(error.strerror or '').lower()}"
            if reason and not stop.is_set():
                failed.put((shape, reason))
            elif not reason:
                on_done(shape)

    threads = [threading.Thread(target=work, args=(gpu,), daemon=True) for gpu in gpus]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(timeout=0.5)
    except BaseException:
        stop.set()
        for process in list(running.values()):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
        raise
    if not failed.empty():
        count, (shape, reason) = failed.qsize(), failed.get()
        raise CheckFailed(
            f"{count} of {len(shapes)} shapes could not be measured; the first: {shape.title}: {reason}",
            hint="the others are kept; run it again to try these once more",
        )


def _one(shape: Shape, folder: Path, bench: str, gpu: str, running: dict[int, subprocess.Popen[bytes]]) -> str:
    """Measure one shape. Returns the reason for a failure, or an empty string."""
    out = folder / shape.key
    with out.with_suffix(".lock").open("a") as lock:
        # The measuring process inherits the lock and holds it until it ends, even if this process ends first.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _done(folder, shape):
            return ""
        out.with_suffix(".tune").unlink(missing_ok=True)
        environment = {
            **os.environ,
            "HIP_VISIBLE_DEVICES": gpu,
            "OUT": str(out),
            "DEFAULT": shlex.join([bench, *shape.words, *_COMMON, *_DEFAULT]),
            # Only the search may write the file of tuned solutions.
            "SEARCH": f"HIPBLASLT_TUNING_FILE={shlex.quote(str(out))}.tune "
            + shlex.join([bench, *shape.words, *_COMMON, *_SEARCH]),
        }
        for name in ("HIPBLASLT_LOG_MASK", "HIPBLASLT_LOG_FILE", "HIPBLASLT_TUNING_OVERRIDE_FILE"):
            environment.pop(name, None)
        process = subprocess.Popen(
            ["sh", "-c", _SCRIPT], env=environment, stdin=subprocess.DEVNULL, pass_fds=(lock.fileno(),),
            start_new_session=True,
        )  # fmt: skip
        running[process.pid] = process
        code = process.wait()
        running.pop(process.pid, None)
    if code == 0:
        return ""
    lines = [line for part in ("search", "default") for line in _lines(folder / f"{shape.key}.{part}.part")]
    return f"exit code {code}" + (f", {lines[-1][:200]}" if lines else "")


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def microseconds(text: str) -> float | None:
    """Return the shortest time per call in hipblaslt-bench's output (column ``us``); None without that column."""
    column, found = None, []
    for line in text.splitlines():
        row = next(csv.reader([line.partition(":")[2] if line.lstrip().startswith("[") else line.strip()]), [])
        cells = [cell.strip() for cell in row]
        if "us" in cells:
            column = cells.index("us")
        elif column is not None and len(cells) > column:
            with suppress(ValueError):
                found.append(float(cells[column]))
    positive = [one for one in found if one > 0]
    return min(positive, default=None)


def results(shapes: Sequence[Shape], folder: Path) -> tuple[list[Measured], list[Shape]]:
    """Return the measurements in the order of ``shapes``, and the shapes without a usable result."""
    done, missing = [], []
    for shape in shapes:
        default, best = (
            microseconds("\n".join(_lines(folder / f"{shape.key}.{part}.txt"))) for part in ("default", "search")
        )
        tuned = tuple(_lines(folder / f"{shape.key}.tune"))
        if default is None or best is None or len(tuned) < 2:
            missing.append(shape)
        else:
            done.append(Measured(shape=shape, default=default, best=best, tuned=tuned))
    return done, missing


def times(measured: Sequence[Measured]) -> str:
    """Return the times as a JSON document, for comparison with a later measurement."""
    rows = [
        {"shape": " ".join(one.shape.words), "count": one.shape.count, "default_us": one.default, "best_us": one.best}
        for one in measured
    ]
    return json.dumps(rows, indent=1) + "\n"
