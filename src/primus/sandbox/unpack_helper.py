"""The process that unpacks layers inside an ordinary user's namespace, where it may set owners."""

from __future__ import annotations

from pathlib import Path

from primus.errors import PrimusError
from primus.sandbox import channel
from primus.sandbox.model import LayerRef
from primus.sandbox.unpack import unpack_layer

__all__ = ["main"]


def main(args: list[str]) -> int:
    """``args``: job descriptor, report descriptor. Unpacks every layer of the job."""
    job = channel.unpack(int(args[0]))
    try:
        for entry in job["layers"]:
            unpack_layer(LayerRef(**entry["layer"]), Path(entry["blob"]), Path(job["cache"]), user_namespace=True)
    except (PrimusError, OSError) as error:
        channel.report(int(args[1]), error)
        return 1
    return 0
