"""Train healthy jobs of every recipe, backend, mode and precision with many seeds; write which checks failed.

    python healthy.py OUT --seconds 600 --seeds 20 --together 8

OUT gets one JSON line per run as it ends. Runs that OUT already holds are skipped. A run that does not end normally is
a line as well. When the time is over, the runs in progress are ended and not written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from many import forked, prepare, train
from silent_jobs import write

from primus.recipes.catalogue import entries
from primus.recipes.setting import Asked
from primus.training import outcome, suite
from primus.training.hang import stacks
from primus.training.job import Job, JobResult

Cell = tuple[str, str, str, str]
KEYS = ("recipe", "backend", "mode", "precision")
# Seconds after which a run counts as one that does not end.
LIMIT = 600


def cells() -> list[Cell]:
    """Recipe, backend, mode and precision of everything that the proxies train on a CPU."""
    return [(e.recipe, e.backend, e.mode, precision) for e in entries() for precision in e.proxy]


def job_of(cell: Cell, seed: int, steps: int, folder: Path) -> Job:
    """The job that the quick suite of this cell runs, with another seed."""
    recipe, backend, mode, precision = cell
    asked = Asked(backend=backend, mode=mode, gpu="cpu", proxy=True, precision=precision)
    words = [f"seed={seed}", *([f"steps={steps}"] if steps else [])]
    return suite.plan(recipe, folder, words, asked, level="quick")[0]


def one(cell: Cell, seed: int, steps: int, out: Path, port: int) -> None:
    """Train and judge one run, and append its line to ``out``."""
    row: dict[str, Any] = dict(zip(KEYS, cell, strict=True)) | {"seed": seed}
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="healthy-"))
    log = folder / "reference.txt"
    try:
        job = job_of(cell, seed, steps, folder)
        write(job)
        with log.open("w") as file:
            child = forked(partial(train, job.output, "-", port), file.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        left = outcome.read(job, JobResult(exit_code=code, output=job.output))
        found = suite.judge([job], {"base": left})
        row |= {
            "steps": job.recipe.steps,
            "judged": job.judged,
            "checks": len(found),
            "failed": [f"{v.name}: {v.reason} ({v.measured}, {v.limit})" for v in found if not v.passed],
            "torch": left.facts.get("versions", {}).get("torch", ""),
        }
        if code or row["failed"]:
            tail = [file.read_text(errors="replace")[-2000:] for file in (log, job.output / "log.txt") if file.exists()]
            row["log"] = tail
            row["stacks"] = {rank: text[:4000] for rank, text in stacks(job.output).items()}
    except Exception as error:  # noqa: BLE001 - a run that breaks is a result
        row |= {"failed": [f"the harness failed: {type(error).__name__}: {error}"]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row["seconds"] = round(time.monotonic() - began, 1)
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="0: the recipe's own")
    parser.add_argument("--together", type=int, default=1, help="runs side by side; each has two processes")
    parser.add_argument("--only", default="", help="regular expression on RECIPE BACKEND MODE PRECISION")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds

    prepare()
    done = set()
    if options.out.exists():
        rows = map(json.loads, options.out.read_text(encoding="utf-8").splitlines())
        done = {(*(row[key] for key in KEYS), row["seed"]) for row in rows}
    wanted = [cell for cell in cells() if re.search(options.only, " ".join(cell))]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    left = [(cell, seed) for seed in seeds for cell in wanted if (*cell, seed) not in done]
    print(f"{len(wanted)} cells, {len(left)} runs", flush=True)
    together([partial(one, cell, seed, options.steps, options.out) for cell, seed in left], options.together, until)


def together(left: list[partial[None]], count: int, until: float) -> None:
    """Call each of ``left`` with a port in a process of its own, ``count`` at a time; end those that ``until`` cuts."""
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


if __name__ == "__main__":
    main()
