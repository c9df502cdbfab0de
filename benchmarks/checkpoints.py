"""10,000 checkpoints saved, sealed and purged under load: ``python -m benchmarks.checkpoints``.

It needs an image's Python packages. Several jobs at once save as torchtitan's ranks do: PyTorch
writes a checkpoint, torchtitan's own code finds the old ones and deletes them in its thread, and
``identity.seal_newest`` seals the new ones before and after. Meanwhile other processes look for the
newest complete checkpoint, as ``--resume-from`` does, and keep the processors busy. A job is lost
if its process ends with an error, or if its last checkpoint cannot be resumed from.
"""

import json
import os
import sys
import time
from multiprocessing import Event, Process
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.components import checkpoint

from primus_images.training.run import identity
from primus_images.training.run.job import steps

RESULT = Path(__file__).parent / "results/checkpoints.json"
JOBS, CHECKPOINTS, KEPT = 4, 2500, 2


def job(folder: Path) -> None:
    """Save, seal and purge. Raises whatever a rank of torchtitan would end with."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stale: Queue[Any] = Queue()
    manager: Any = SimpleNamespace(
        keep_latest_k=KEPT,
        folder=str(folder),
        purge_queue=stale,
        enable_ft_dataloader_checkpoints=False,
    )
    manager.purge_thread = Thread(target=checkpoint.purge_thread, args=(stale,))
    manager.purge_thread.start()
    state = {f"layers.{number}.weight": torch.randn(64, 64) for number in range(8)}
    try:
        for step in range(1, CHECKPOINTS + 1):
            identity.seal_newest(folder, {"seed": 1}, KEPT)
            dcp.save(state, checkpoint_id=folder / f"step-{step}", no_dist=True)
            checkpoint.CheckpointManager._purge_stale_checkpoints(manager)
            identity.seal_newest(folder, {"seed": 1}, KEPT)
    finally:
        stale.put(checkpoint.Terminate())
        manager.purge_thread.join()
        dist.destroy_process_group()


def watch(root: Path, over: Any) -> None:
    """Look for checkpoints to resume from, without a pause."""
    while not over.is_set():
        for folder in root.iterdir():
            any(identity.complete(step) for step in reversed(steps(folder)))


def main() -> int:
    """Run all jobs, and write the result. Returns 1 if one is lost."""
    began, over = time.perf_counter(), Event()
    with TemporaryDirectory() as name:
        folders = [Path(name) / f"job-{number}" for number in range(JOBS)]
        for folder in folders:
            folder.mkdir()
        watchers = [
            Process(target=watch, args=(Path(name), over)) for _ in range(os.cpu_count() or 1)
        ]
        jobs = [Process(target=job, args=(folder,)) for folder in folders]
        for process in (*watchers, *jobs):
            process.start()
        for process in jobs:
            process.join()
        over.set()
        for process in watchers:
            process.join()
        kept = [
            [step.name for step in steps(folder) if identity.complete(step)] for folder in folders
        ]
    lost = sum(
        process.exitcode != 0 or f"step-{CHECKPOINTS}" not in names
        for process, names in zip(jobs, kept, strict=True)
    )
    document = {
        "generated": "by `python -m benchmarks.checkpoints`; do not edit",
        "checkpoints": JOBS * CHECKPOINTS,
        "jobs": JOBS,
        "kept_by_each": KEPT,
        "watchers": len(watchers),
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[1], 1),
        "seconds": round(time.perf_counter() - began),
        "jobs_lost": lost,
        "watchers_lost": sum(process.exitcode != 0 for process in watchers),
        "complete_in_the_end": kept,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1))
    return 1 if lost or document["watchers_lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
