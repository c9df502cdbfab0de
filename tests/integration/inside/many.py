"""Train many small jobs, some with a silent fault, in processes forked from one that has imported everything.

    python many.py LIST

Each line of LIST is ``FOLDER FAULT BACKEND WORD …`` (FAULT ``-``: none; words as in ``silent_jobs``). The folder then
holds what ``primus train --judge`` leaves: log, figures, witness, proof. The reference runs in a process that never saw
the fault.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from silent_jobs import ESCAPED, SILENT, job_of, write


def forked(work: Callable[[], None], into: int | None = None) -> int:
    """Run ``work`` in a child process, its output going to the file descriptor ``into``; the child's id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if into is not None:
            os.dup2(into, 1)
            os.dup2(into, 2)
        work()
        code = 0
    except SystemExit as stop:
        print(stop, flush=True)
    except BaseException:  # noqa: BLE001
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def rank(folder: Path, job: dict[str, Any], number: int, port: int, fault: str) -> None:
    """One rank of the job, with the fault in place."""
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(job["world_size"]),
        "LOCAL_WORLD_SIZE": str(job["world_size"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_COLOR": "1",
        "HF_HOME": str(folder / "cache" / "hf"), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    if fault != "-":
        case = (SILENT | ESCAPED)[fault]
        case.change(importlib.import_module(case.module))
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
    ranks = [forked(partial(rank, folder, job, n, port, fault), writer) for n in range(job["world_size"])]
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as lines, (folder / "log.txt").open("w") as log:
        for line in lines:
            clock.line(line)
            log.write(line)
    ended = [os.wait4(child, 0) for child in ranks]
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
        cpu.apply(1)
    torch.set_num_threads(1)
    for name in ("torchtitan.train", "primus.training.torchtitan.entry", "primus.training.loop.train",
                 "primus.training.fsdp.entry", "primus.training.finetune.entry", "transformers", "peft",
                 "primus.training.reference.replay"):  # fmt: skip
        importlib.import_module(name)


def main() -> None:
    prepare()
    for number, row in enumerate(Path(sys.argv[1]).read_text().splitlines()):
        folder, fault, backend, *words = row.split()
        write(job_of(Path(folder), backend, tuple(words)))
        began = time.monotonic()
        log = (Path(folder) / "reference.txt").open("w")
        port = 20000 + (os.getpid() + number) % 20000
        child = forked(partial(train, Path(folder), fault, port), log.fileno())
        os.waitpid(child, 0)
        print(f"{number} {fault} {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
