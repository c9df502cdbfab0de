"""Small judged jobs, healthy or with a silent fault: ``primus train`` in forks of a process that
has imported torch.

The reference runs in a process that never saw the fault. Each run is recorded as one JSON line when
it ends.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from forks import forked

from primus_images.recipes.resolve import resolve
from primus_images.recipes.setting import Choices
from primus_images.training.run import outcome
from primus_images.training.run.job import Job
from primus_images.training.run.outcome import Outcome

Row = dict[str, Any]
# Seconds after which a run counts as one that does not end.
LIMIT = 600


def job_of(folder: Path, backend: str, words: tuple[str, ...] = ()) -> Job:
    """A job of six steps of ``backend`` in ``folder``; words ``--recipe=``, ``--mode=``,
    ``--precision=`` choose.
    """
    chosen = dict(word.removeprefix("--").split("=") for word in words if word.startswith("--"))
    settings = [word for word in words if not word.startswith("--")]
    if not any(word.startswith("steps=") for word in settings):
        settings.append("steps=6")
    name = chosen.get("recipe", "flux.1-dev" if backend == "flux" else "llama3.1-8b")
    if name.startswith("llama"):
        settings.append("model.layers=2")
    mode = chosen.get("mode", "full" if backend == "finetune" else "pretrain")
    choices = Choices(
        backend=backend, mode=mode, gpu="cpu", proxy=True, precision=chosen.get("precision", "fp32")
    )
    return Job(name="base", recipe=resolve(name, settings, choices), output=folder, judged=True)


def ended(job: Job) -> Outcome:
    """What the run left."""
    return outcome.read(job, outcome.read_result(job.output).exit_code)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The options of both programs."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument(
        "--together", type=int, default=1, help="runs side by side; each has two processes"
    )
    return parser


def rows(out: Path) -> list[Row]:
    """The runs that ``out`` holds."""
    return (
        [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        if out.exists()
        else []
    )


def record(
    row: Row,
    fault: str,
    make: Callable[[Path], Job],
    judge: Callable[[Job], tuple[Row, bool]],
    out: Path,
) -> None:
    """Train the job of ``make`` with ``fault`` ("": none) and append ``row``, with what ``judge``
    adds, to ``out``.

    The end of the logs is kept where the run is not as it should be: ``judge`` says so, or ``row``
    as it is given.
    """
    fine, logs = False, []
    with tempfile.TemporaryDirectory(prefix="run-", ignore_cleanup_errors=True) as folder:
        try:
            job = make(Path(folder) / "job")
            command = [sys.executable, "-m", "primus_images.cli.main", *job.arguments()]
            variables = os.environ | {"PRIMUS_FAULT": fault}
            run = subprocess.run(
                command, env=variables, capture_output=True, text=True, check=False, timeout=LIMIT
            )
            logs = [
                run.stderr,
                *(file.read_text(errors="replace") for file in job.output.glob("*.txt")),
            ]
            judgement, fine = judge(job)
            row |= judgement
        except Exception as error:  # noqa: BLE001 - a run that breaks is a result
            logs.insert(0, f"{type(error).__name__}: {error}")
    if not fine:
        row["log"] = [text[-2000:] for text in logs]
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def together(waiting: list[partial[None]], count: int, seconds: float) -> None:
    """Call each of ``waiting`` in a process of its own, ``count`` at a time. When the time is over,
    end the runs in progress, which are not recorded.
    """
    until = time.monotonic() + seconds
    running = set[int]()
    while (waiting or running) and time.monotonic() < until:
        while waiting and len(running) < count:
            running.add(forked(partial(_alone, waiting.pop(0))))
        ended, _ = os.waitpid(-1, os.WNOHANG)
        running.discard(ended)
        if not ended:
            time.sleep(0.1)
    for child in running:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)


def _alone(work: partial[None]) -> None:
    """Do ``work`` in a new process group, so that all its processes can be ended together."""
    os.setsid()
    work()
