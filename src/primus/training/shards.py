"""Verification of the tensor files of a checkpoint."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from zlib import error as ZlibError

_FAULTS = (zipfile.BadZipFile, ZlibError, OSError, EOFError, ValueError, NotImplementedError, RuntimeError)


def verify(folder: Path) -> None:
    """Compare every tensor in ``folder`` with the CRC-32 that torch.save wrote beside it. The ranks share the work.

    torch itself does not verify it. Raises SystemExit if a tensor differs.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    items = sorted(
        (place.relative_path, place.offset, place.length, index.fqn)
        for index, place in dcp.FileSystemReader(folder).read_metadata().storage_data.items()
    )
    for file, offset, length, name in items[dist.get_rank() :: dist.get_world_size()]:
        try:
            with (folder / Path(file).name).open("rb") as whole, zipfile.ZipFile(_Part(whole, offset, length)) as kept:
                damaged = kept.testzip() is not None
        except _FAULTS:
            damaged = True
        if damaged:
            raise SystemExit(
                f"{folder}: the checkpoint is damaged: {name} in {file} does not match its checksum "
                "(resume from another checkpoint)"
            )


class _Part(io.RawIOBase):
    """A range of an open file, ``length`` bytes from ``offset``, as a file object."""

    def __init__(self, whole: io.BufferedIOBase, offset: int, length: int) -> None:
        self._whole, self._offset, self._length = whole, offset, length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._length - self._at, 0)
        self._whole.seek(self._offset + self._at)
        data = self._whole.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data
