"""The process that unpacks an image's layers, as root or as root of a regular user's namespace."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from primus.errors import PrimusError
from primus.sandbox import channel, syscalls
from primus.sandbox.container import LayerRef
from primus.sandbox.unpack import unpack_layer

_MOST_WORKERS = 4


def main(args: list[str]) -> int:
    """Run with the arguments job descriptor, report descriptor, PID of the runner. Unpacks every layer of the job."""
    job = channel.unpack(int(args[0]))
    try:
        syscalls.die_with_parent(int(args[2]))
        _all(job["layers"], Path(job["cache"]), bool(job["user_namespace"]))
    except (PrimusError, OSError) as error:
        channel.report(int(args[1]), error)
        return 1
    return 0


def _all(layers: list[dict[str, dict[str, str | int]]], cache: Path, user_namespace: bool) -> None:
    # Most of the time is spent in the kernel creating files, where threads do not block each other.
    with ThreadPoolExecutor(min(_MOST_WORKERS, os.cpu_count() or 1)) as pool:
        tasks = [
            pool.submit(
                unpack_layer,
                LayerRef(**entry["layer"]),  # type: ignore[arg-type]
                Path(str(entry["blob"])),
                cache,
                user_namespace=user_namespace,
            )
            for entry in layers
        ]
        try:
            for task in as_completed(tasks):
                task.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
