"""The store that a job's ranks share, also for a torch that was built without libuv."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# A store ends when its object is deleted.
_KEPT: list[Any] = []


def choose_store(folder: Path) -> None:
    """Choose the kind and port of the store. Call it before the process groups are created.

    If torch has no libuv, as Debian's, the store does without it. If all ranks are on this machine, rank 0 opens the
    store at a free port, and the others read its number from the job's ``folder``.
    """
    from torch.distributed import TCPStore

    try:
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        os.environ["USE_LIBUV"] = "0"
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        _open(folder)


def _open(folder: Path) -> None:
    """Open the store before anything else can take its port.

    torchrun chooses a free port and does not reserve it. Of 20 jobs that start together, one in 40 failed because
    another process had taken its port.
    """
    from torch.distributed import FileStore, TCPStore

    size = int(os.environ["WORLD_SIZE"])
    notes = FileStore(str(folder / "cache" / "store"), size)
    # Different in each attempt, because the file of an attempt that was killed stays.
    key = f"{os.getppid()} {os.environ['MASTER_PORT']}"
    if os.environ["RANK"] == "0":
        libuv = os.environ.get("USE_LIBUV", "1") == "1"
        # With multi_tenant, init_process_group finds this server in place of starting its own.
        store = TCPStore(
            os.environ["MASTER_ADDR"], 0, size, is_master=True, wait_for_workers=False, multi_tenant=True,
            use_libuv=libuv,
        )  # fmt: skip
        _KEPT.append(store)
        notes.set(key, str(store.port))
    _KEPT.append(notes)
    os.environ["MASTER_PORT"] = notes.get(key).decode()
