"""The content of text that is compressed by gzip, bzip2, xz or zstd."""

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Mapping
from typing import IO, Any, TypeAlias

Stream: TypeAlias = "io.BufferedReader[Any]"
DAMAGE = (OSError, EOFError, lzma.LZMAError, zlib.error)

# Bytes that are read at once.
_BLOCK = 1 << 20
# A frame of zstd. Programs that compress in parallel, as pzstd does, write one before it to skip.
_ZSTD = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")
# Unpacked bytes of zstd that are lost before what is damaged: it is found in so many at once.
_LOST = 1 << 16
_CUT = "the file ends within its compressed data"


class _Members(io.RawIOBase):
    """The content of a file of several members, one after the other, perhaps with zeros between.

    Python's own readers take a member for the end of the file if its first bytes are damaged.
    """

    def __init__(self, file: IO[bytes], begin: Callable[[], Any]) -> None:
        self._file = file
        self._begin = begin
        self._member = begin()

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` with what comes next, and return how many bytes that is."""
        content = b""
        while not content:
            block = self._next()
            if block is None:
                return 0
            content = self._member.decompress(block, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _next(self) -> bytes | None:
        """Return what the member needs next; None after the last one. Raises EOFError if cut."""
        if not self._member.eof:
            if not self._member.needs_input:
                return b""
            block = self._file.read(_BLOCK)
            if not block:
                raise EOFError(_CUT)
            return block
        rest: bytes = self._member.unused_data.lstrip(b"\0")
        while not rest:
            block = self._file.read(_BLOCK)
            if not block:
                return None
            rest = block.lstrip(b"\0")
        self._member = self._begin()
        return rest


def _of_members(begin: Callable[[], Any]) -> Callable[[Stream], Any]:
    return lambda file: io.BufferedReader(_Members(file, begin), _BLOCK)


# How a file begins, and what unpacks it.
_OPENERS: Mapping[bytes, Callable[[Stream], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": _of_members(bz2.BZ2Decompressor),
    b"\xfd7zXZ": _of_members(lzma.LZMADecompressor),
}


def unpacked(file: Stream, head: bytes) -> Stream:
    """Return the content of an open file that begins with ``head``, without its compression."""
    if _ZSTD.match(head):
        from pyarrow import input_stream

        return io.BufferedReader(input_stream(file, compression="zstd"), _LOST)
    for magic, opener in _OPENERS.items():
        if head.startswith(magic):
            content: Stream = opener(file)
            return content
    return file


def remedy_of(error: Exception) -> str:
    """Return what to do about a file whose content cannot be unpacked."""
    if "too much memory" in str(error):
        return "compress it again without --long: zstd -dc --long=31 OLD | zstd > NEW"
    return "the file is damaged or incomplete: copy the file again, or compress it again"
