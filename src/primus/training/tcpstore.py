"""The store that a job's ranks share, also for a torch that was built without libuv."""

from __future__ import annotations

import os


def choose_store() -> None:
    """Use a store without libuv if torch has none, as Debian's. Call it before the process groups are created."""
    from torch.distributed import TCPStore

    try:
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        os.environ["USE_LIBUV"] = "0"
