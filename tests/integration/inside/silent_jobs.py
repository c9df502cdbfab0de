"""Small judged jobs, healthy or with a silent fault, in processes forked from one that has imported everything.

A job's folder then holds what ``primus train --judge`` leaves: log, figures, witness, proof. The reference runs in a
process that never saw the fault. Each run is recorded as one JSON line when it ends.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# In the image the faults are mounted at /faults.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "faults"), "/faults"]
from forks import forked
from silent import SILENT

from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.training import outcome, ranks
from primus.training.backend import backend_of
from primus.training.job import Job

Row = dict[str, Any]
# Seconds after which a run counts as one that does not end.
LIMIT = 600


def job_of(folder: Path, backend: str, words: tuple[str, ...] = ()) -> Job:
    """A job of six steps of ``backend`` in ``folder``; words ``--recipe=``, ``--mode=``, ``--precision=`` choose."""
    chosen = dict(word.removeprefix("--").split("=") for word in words if word.startswith("--"))
    settings = [word for word in words if not word.startswith("--")]
    if not any(word.startswith("steps=") for word in settings):
        settings.append("steps=6")
    name = chosen.get("recipe", "flux.1-dev" if backend == "flux" else "llama3.1-8b")
    if name.startswith("llama"):
        settings.append("model.layers=2")
    mode = chosen.get("mode", "full" if backend == "finetune" else "pretrain")
    choices = Choices(backend=backend, mode=mode, gpu="cpu", proxy=True, precision=chosen.get("precision", "fp32"))
    return Job(name="base", recipe=resolve(name, settings, choices), output=folder, judged=True)


def put(fault: str, *, in_ranks: bool) -> None:
    """Put the faults that ``fault`` joins by ``+`` in place, those of the ranks or those of tokens; "-": none."""
    for name in fault.split("+") if fault != "-" else ():
        module = SILENT[name].module
        if in_ranks or module == "primus.training.tokens":
            SILENT[name].change(importlib.import_module(module))


def write(job: Job, fault: str) -> None:
    """Make the job's folder with the files that its ranks read. Faults of tokens take effect here."""
    put(fault, in_ranks=False)
    (job.output / "cache").mkdir(parents=True)
    backend_of(job.recipe).tokenize(job, lambda _: None)
    for file, text in ranks.files(job).items():
        (job.output / file).write_text(text, encoding="utf-8")


def failed(job: Job) -> list[str]:
    """The checks that the run did not pass."""
    result = outcome.read(job, 0)
    return [verdict.name for verdict in outcome.basic_verdicts(result) if not verdict.passed]


def rank(folder: Path, job: dict[str, Any], number: int, port: int, fault: str) -> None:
    """One rank of the job, with the fault in place."""
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(job["world_size"]),
        "LOCAL_WORLD_SIZE": str(job["world_size"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_COLOR": "1",
        "HF_HOME": str(folder / "cache" / "hf"), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    put(fault, in_ranks=True)
    name = f"primus.training.{job['backend']}.entry"
    words = ["--job.config_file", str(folder / "torchtitan.toml")] if job["backend"] == "torchtitan" else [str(folder)]
    sys.argv = [name, *words]
    if job["backend"] == "torchtitan":
        from torchtitan.config import ConfigManager

        # Its default is the command line as it was when the module was imported.
        ConfigManager.parse_args.__defaults__ = (words,)
    runpy.run_module(name, run_name="__main__", alter_sys=False)


def train(folder: Path, fault: str, port: int) -> None:
    """All ranks of the job in ``folder``, then the reference."""
    from primus.training.logs import Clock

    job = json.loads((folder / "job.json").read_text())
    (folder / "cache").mkdir(exist_ok=True)
    began, clock = time.monotonic(), Clock()
    reader, writer = os.pipe()
    children = [forked(partial(rank, folder, job, n, port, fault), writer) for n in range(job["world_size"])]
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as lines, (folder / "log.txt").open("w") as log:
        for line in lines:
            clock.line(line)
            log.write(line)
    ended = [os.wait4(child, 0) for child in children]
    codes = [os.waitstatus_to_exitcode(status) for _, status, _ in ended]
    peak = max(used.ru_maxrss for _, _, used in ended) / 2**20
    seconds = time.monotonic() - began
    result = {"exit_code": max(codes, key=abs), "seconds": seconds, "host_memory_gib": peak, "argv": []}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "clock.json").write_text(json.dumps(clock.arrivals))
    if result["exit_code"] == 0:
        from primus.training.reference.replay import replay

        (folder / "proof.json").write_text(json.dumps(replay(folder)))


def prepare(*, on_cpu: bool = True) -> None:
    """Import everything that the forked processes need."""
    import torch

    from primus.training.torchtitan import cpu

    if on_cpu:
        # torchtitan chooses its device when it is imported.
        cpu.apply()
    torch.set_num_threads(1)
    for name in ("torchtitan.train", "primus.training.torchtitan.entry", "primus.training.loop.train",
                 "primus.training.fsdp.entry", "primus.training.finetune.entry", "transformers", "peft",
                 "primus.training.reference.replay"):  # fmt: skip
        importlib.import_module(name)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The options of both programs."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--together", type=int, default=1, help="runs side by side; each has two processes")
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
        os.waitpid(forked(partial(write, job, fault)), 0)
        with log.open("w") as file:
            child = forked(partial(train, job.output, fault, port), file.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        judgement, fine = judge(job, code)
        row |= judgement
        if not fine:
            logs = (log, job.output / "log.txt")
            row["log"] = [file.read_text(errors="replace")[-2000:] for file in logs if file.exists()]
    except Exception as error:  # noqa: BLE001 - a run that breaks is a result
        row |= broken(f"the harness failed: {type(error).__name__}: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def together(waiting: list[partial[None]], count: int, seconds: float) -> None:
    """Call each of ``waiting`` with a port in a process of its own, ``count`` at a time. When the time is over, end the
    runs in progress, which are not recorded.
    """
    until = time.monotonic() + seconds
    running: dict[int, float] = {}
    number = 0
    while (waiting or running) and time.monotonic() < until:
        while waiting and len(running) < count:
            number += 1
            port = 20000 + (os.getpid() * 7 + number) % 20000
            child = forked(partial(_alone, partial(waiting.pop(0), port)))
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
