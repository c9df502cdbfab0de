"""Offload bundles, in which clang stores GPU code for several architectures, uncompressed or compressed.

The ``.hip_fatbin`` section of a host library contains several, each at the start of a page. Sources: clang's
ClangOffloadBundler documentation, LLVM's OffloadBundle, and the HIP runtime's fat binaries (ROCm/clr).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Protocol, cast

from primus.gpucode.archs import in_entry_id

PLAIN = b"__CLANG_OFFLOAD_BUNDLE__"
COMPRESSED = b"CCOB"
# In a section, bundles begin at multiples of this page size.
PAGE = 4096
# The limit for a bundle's list of entries. A library has a few entries, each id well below 100 bytes.
LIST_SIZE = 1 << 20
# Version of a compressed bundle → format of its header after the magic: version, method (0: zlib, 1: zstd), total
# length (not in version 1), uncompressed length, first half of the uncompressed bundle's MD5.
HEADS = {1: "<4sHHI8s", 2: "<4sHHII8s", 3: "<4sHHQQ8s"}


class Reader(Protocol):
    """A source of bytes."""

    def read(self, amount: int, /) -> bytes:
        """Return at most ``amount`` bytes; none at the end."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One entry of a bundle: its id, and the position of its bytes in the uncompressed bundle."""

    id: str
    offset: int
    size: int

    @property
    def target(self) -> str | None:
        """The target that its code is for; None for the host's entry."""
        return in_entry_id(self.id)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle of ``length`` bytes at ``offset`` of a stream. ``version`` is 0 for an uncompressed one. A
    compressed one contains ``unpacked`` bytes; in version 1 it does not state its length, and extends to the next
    bundle or the end.
    """

    offset: int
    length: int
    parts: tuple[Part, ...]
    version: int = 0
    method: int = 0
    unpacked: int = 0


def bundles_in(stream: IO[bytes], offset: int, size: int) -> Iterator[Bundle]:
    """Yield the bundles in this part of the stream. Reads only their lists of entries, so the part may be large.

    Raises ValueError if a bundle is damaged.
    """
    at, end = offset, offset + size
    while (at := next_magic(stream, at, end, (PLAIN, COMPRESSED))) >= 0:
        stream.seek(at)
        if stream.read(len(COMPRESSED)) != COMPRESSED:
            stream.seek(at)
            parts, length = parts_of(stream.read(min(LIST_SIZE, end - at)))
            yield Bundle(offset=at, length=length, parts=parts)
        elif (found := _compressed(stream, at, offset, end)) is not None:
            yield found
            length = found.length
        else:
            # The same four letters in the middle of code are not a bundle.
            length = len(COMPRESSED)
        at += length


def next_magic(stream: IO[bytes], at: int, end: int, magics: Sequence[bytes]) -> int:
    """Return the position of the next of ``magics``, or -1."""
    overlap = max(map(len, magics)) - 1
    while at < end:
        stream.seek(at)
        data = stream.read(min(1 << 20, end - at))
        if not data:
            return -1
        hits = [hit for magic in magics if (hit := data.find(magic)) >= 0]
        if hits:
            return at + min(hits)
        at += len(data) if at + len(data) >= end else max(1, len(data) - overlap)
    return -1


def parts_of(data: bytes) -> tuple[tuple[Part, ...], int]:
    """Return the entries of the uncompressed bundle that begins with ``data``, and its length. Raises ValueError if
    it is truncated.
    """
    at = len(PLAIN)
    parts, length = [], at + 8
    try:
        (count,) = struct.unpack_from("<Q", data, at)
        at += 8
        for _ in range(count):
            start, amount, name = struct.unpack_from("<QQQ", data, at)
            at += 24
            if at + name > len(data):
                raise ValueError("an offload bundle is cut short")
            parts.append(Part(id=data[at : at + name].decode("ascii", "replace"), offset=start, size=amount))
            at += name
            length = max(length, at, start + amount)
    except struct.error:
        raise ValueError("an offload bundle is cut short") from None
    return tuple(parts), length


def _compressed(stream: IO[bytes], at: int, begin: int, end: int) -> Bundle | None:
    """Return the compressed bundle at ``at``, or None if there is none."""
    stream.seek(at)
    head = stream.read(struct.calcsize(HEADS[3]))
    try:
        _, version, method = struct.unpack_from("<4sHH", head)
        fields = struct.unpack_from(HEADS[version], head)
    except (struct.error, KeyError):
        return None
    length = _to_next(stream, at, begin, end) if version == 1 else fields[3]
    if length <= struct.calcsize(HEADS[version]):
        return None
    found = Bundle(offset=at, length=length, parts=(), version=version, method=method, unpacked=fields[-2])
    data = _read(inflated(stream, found), LIST_SIZE)
    if not data.startswith(PLAIN):
        raise ValueError("a compressed offload bundle holds something else")
    return replace(found, parts=parts_of(data)[0])


def _to_next(stream: IO[bytes], at: int, begin: int, end: int) -> int:
    """Return the bytes from the bundle at ``at`` to the next bundle on a page, counted from ``begin``."""
    after = at + 1
    while (after := next_magic(stream, after, end, (PLAIN, COMPRESSED))) >= 0 and (after - begin) % PAGE:
        after += 1
    return (after if after >= 0 else end) - at


def _read(source: Reader, amount: int) -> bytes:
    parts: list[bytes] = []
    while amount and (data := source.read(amount)):
        parts.append(data)
        amount -= len(data)
    return b"".join(parts)


def inflated(stream: IO[bytes], bundle: Bundle) -> Reader:
    """Return a reader of the uncompressed contents. Raises ValueError, now or while reading, if the bundle is
    damaged.
    """
    head = struct.calcsize(HEADS[bundle.version])
    stream.seek(bundle.offset + head)
    # After the last byte there may be padding, which is not compressed data.
    if bundle.method == 0:
        return _Limited(_Zlib(_Limited(stream, bundle.length - head)), bundle.unpacked)
    if bundle.method == 1:
        return _Limited(_Zstd(_Limited(stream, bundle.length - head)), bundle.unpacked)
    raise ValueError(f"an offload bundle is compressed by an unknown method {bundle.method}")


class _Limited:
    """Reads at most a given number of bytes."""

    def __init__(self, source: Reader, left: int) -> None:
        self._source, self._left = source, left

    def read(self, amount: int, /) -> bytes:
        data = self._source.read(min(amount, self._left)) if self._left else b""
        self._left -= len(data)
        return data


class _Zlib:
    def __init__(self, source: Reader) -> None:
        self._source, self._decoder = source, zlib.decompressobj()

    def read(self, amount: int, /) -> bytes:
        try:
            while not self._decoder.eof:
                data = self._decoder.unconsumed_tail or self._source.read(1 << 16)
                if (found := self._decoder.decompress(data, amount)) or not data:
                    return found
        except zlib.error as error:
            raise ValueError(f"a compressed offload bundle is damaged: {error}") from None
        return b""


class _Zstd:
    def __init__(self, source: Reader) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        # Compilers may look back any distance: RCCL's bundle needs a window of 128 MiB.
        decoder = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._reader = decoder.stream_reader(cast("IO[bytes]", source), closefd=False)

    def read(self, amount: int, /) -> bytes:
        try:
            return self._reader.read(amount)
        except self._error as error:
            raise ValueError(f"a compressed offload bundle is damaged: {error}") from None
