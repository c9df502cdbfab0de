"""A reader for the part of MessagePack that ROCm's kernel packs use. See
https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

import struct
from typing import Any

_FIXED = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_LENGTHS = {0: ">B", 1: ">H", 2: ">I"}


def unpack(data: bytes) -> Any:
    """Return the first value in ``data``; padding may follow it. Raises ValueError if it is truncated or of an
    unknown type.
    """
    try:
        return _Reader(data).value()
    except (struct.error, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"not MessagePack: {error}") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def value(self) -> Any:
        tag = self._data[self._at]
        self._at += 1
        if tag < 0x80:
            return tag
        if tag < 0x90:
            return self._map(tag & 15)
        if tag < 0xA0:
            return self._list(tag & 15)
        if tag < 0xC0:
            return self._text(tag & 31)
        if tag >= 0xE0:
            return tag - 256
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in _FIXED:
            return self._number(_FIXED[tag])
        if 0xC4 <= tag <= 0xC6:
            return self._take(self._number(_LENGTHS[tag - 0xC4]))
        if 0xD9 <= tag <= 0xDB:
            return self._text(self._number(_LENGTHS[tag - 0xD9]))
        if tag in (0xDC, 0xDD):
            return self._list(self._number(">H" if tag == 0xDC else ">I"))
        if tag in (0xDE, 0xDF):
            return self._map(self._number(">H" if tag == 0xDE else ">I"))
        raise ValueError(f"not MessagePack: unknown type {tag:#x}")

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return number

    def _take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise ValueError("not MessagePack: cut short")
        self._at += size
        return self._data[self._at - size : self._at]

    def _text(self, size: int) -> str:
        return self._take(size).decode("utf-8", "replace")

    def _list(self, size: int) -> list[Any]:
        return [self.value() for _ in range(size)]

    def _map(self, size: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(size)}
