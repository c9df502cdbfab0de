"""A part of a file as a stream."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO


class _Part(io.RawIOBase):
    def __init__(self, path: Path, offset: int, size: int) -> None:
        self._file = path.open("rb")
        self._file.seek(offset)
        self._left = size

    def read(self, amount: int = -1) -> bytes:
        data = self._file.read(self._left if amount < 0 else min(amount, self._left))
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


def open_part(path: Path, offset: int, size: int) -> BinaryIO:
    """The ``size`` bytes of the file from ``offset`` on."""
    return _Part(path, offset, size)  # type: ignore[return-value]
