"""The store that a job's ranks share, on a torch that was built without libuv too."""

from __future__ import annotations

import os


def choose_store() -> None:
    """Let the ranks' store do without libuv where torch has none, as Debian's. Call it before the groups are made."""
    from torch.distributed import TCPStore

    try:
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        os.environ["USE_LIBUV"] = "0"
