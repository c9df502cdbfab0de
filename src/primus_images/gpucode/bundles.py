"""Offload bundles, in which clang stores GPU code for several architectures: reading them, and
reducing them to one.

The ``.hip_fatbin`` section of a host library contains several, each at the start of a page.
Sources: clang's ClangOffloadBundler documentation, LLVM's OffloadBundle, and the HIP runtime's fat
binaries (ROCm/clr).
"""

import hashlib
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import IO, Any, NamedTuple

import zstandard

from primus_images.gpucode.elf import in_entry_id, read_elf, runs_on

PLAIN = b"__CLANG_OFFLOAD_BUNDLE__"
COMPRESSED = b"CCOB"
# In a section, bundles begin at multiples of this page size.
_PAGE = 4096
# The limit for a bundle's list of entries. A library has a few entries, each id well below 100
# bytes.
_LIST_SIZE = 1 << 20
# Version of a compressed bundle → format of its header: magic, version, method (0: zlib, 1: zstd),
# total length, uncompressed length, first half of the uncompressed bundle's MD5. Version 1, of
# 2023, has no length.
_HEADS = {2: "<4sHHII8s", 3: "<4sHHQQ8s"}
_CHUNK = 1 << 20
# A few compressed bytes may stand for many.
_COMPRESSED_CHUNK = 1 << 12
_ZSTD_LEVEL = 3
# Method → decoder. Compilers may look back any distance: RCCL's bundle needs a window of 128 MiB.
_DECODERS: dict[int, Callable[[], Any]] = {
    0: zlib.decompressobj,
    1: lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),
}


class Part(NamedTuple):
    """One entry of a bundle: its id, and the position of its bytes in the uncompressed bundle."""

    id: str
    offset: int
    size: int


class Bundle(NamedTuple):
    """A bundle of ``length`` bytes at ``offset`` of a stream. ``version`` is 0 for an uncompressed
    one; a compressed one contains ``unpacked`` bytes.
    """

    offset: int
    length: int
    parts: tuple[Part, ...]
    version: int = 0
    method: int = 0
    unpacked: int = 0


def bundles_in(stream: IO[bytes], offset: int, size: int) -> Iterator[Bundle]:
    """Yield the bundles in this part of the stream. Reads only their lists of entries, so the part
    may be large.

    Raises ValueError if a bundle is damaged.
    """
    at = offset
    end = offset + size
    while (at := _next_magic(stream, at, end)) >= 0:
        stream.seek(at)
        if stream.read(len(COMPRESSED)) != COMPRESSED:
            stream.seek(at)
            parts, length = _parts_of(stream.read(min(_LIST_SIZE, end - at)))
            yield Bundle(offset=at, length=length, parts=parts)
        elif (bundle := _compressed(stream, at)) is not None:
            yield bundle
            length = bundle.length
        else:
            # The same four letters in the middle of code are not a bundle.
            length = len(COMPRESSED)
        at += length


def _next_magic(stream: IO[bytes], at: int, end: int) -> int:
    overlap = len(PLAIN) - 1
    while at < end:
        stream.seek(at)
        data = stream.read(min(1 << 20, end - at))
        if not data:
            return -1
        match = re.search(PLAIN + b"|" + COMPRESSED, data)
        if match:
            return at + match.start()
        at += len(data) if at + len(data) >= end else max(1, len(data) - overlap)
    return -1


def _parts_of(data: bytes) -> tuple[tuple[Part, ...], int]:
    at = len(PLAIN)
    parts = []
    length = at + 8
    try:
        (count,) = struct.unpack_from("<Q", data, at)
        at += 8
        for _ in range(count):
            start, amount, name = struct.unpack_from("<QQQ", data, at)
            at += 24
            if at + name > len(data):
                raise ValueError("an offload bundle is cut short")
            parts.append(
                Part(id=data[at : at + name].decode("ascii", "replace"), offset=start, size=amount)
            )
            at += name
            length = max(length, at, start + amount)
    except struct.error:
        raise ValueError("an offload bundle is cut short") from None
    return tuple(parts), length


def _compressed(stream: IO[bytes], at: int) -> Bundle | None:
    stream.seek(at)
    head = stream.read(struct.calcsize(_HEADS[3]))
    try:
        _, version, method = struct.unpack_from("<4sHH", head)
        *_, length, unpacked, _ = struct.unpack_from(_HEADS[version], head)
    except (struct.error, KeyError):
        return None
    if length <= struct.calcsize(_HEADS[version]):
        return None
    bundle = Bundle(
        offset=at, length=length, parts=(), version=version, method=method, unpacked=unpacked
    )
    contents = _Inflated(stream, bundle)
    data = b""
    while len(data) < _LIST_SIZE and (chunk := contents.read(_LIST_SIZE)):
        data += chunk
    if not data.startswith(PLAIN):
        raise ValueError("a compressed offload bundle holds something else")
    return bundle._replace(parts=_parts_of(data)[0])


class _Inflated:
    def __init__(self, stream: IO[bytes], bundle: Bundle) -> None:
        if bundle.method not in _DECODERS:
            raise ValueError(
                f"an offload bundle is compressed by an unknown method {bundle.method}"
            )
        self._stream, self._decoder = stream, _DECODERS[bundle.method]()
        head = struct.calcsize(_HEADS[bundle.version])
        self._at = bundle.offset + head
        self._end = bundle.offset + bundle.length
        self._remaining, self._data = bundle.unpacked, memoryview(b"")

    def read(self, amount: int, /) -> bytes:
        amount = min(amount, self._remaining)
        while amount and not self._data and self._at < self._end and not self._decoder.eof:
            self._stream.seek(self._at)
            compressed = self._stream.read(min(_COMPRESSED_CHUNK, self._end - self._at))
            if compressed:
                self._at = self._at + len(compressed)
            else:
                self._at = self._end
            try:
                self._data = memoryview(self._decoder.decompress(compressed))
            except (zlib.error, zstandard.ZstdError) as error:
                raise ValueError(f"a compressed offload bundle is damaged: {error}") from None
        data = bytes(self._data[:amount])
        self._data = self._data[amount:]
        self._remaining -= len(data)
        return data


def keep_only(arch: str, source: IO[bytes], size: int, out: IO[bytes]) -> bool:
    """Copy ``source``, an ELF file or a bundle of ``size`` bytes, to the empty file ``out``,
    without code that does not run on ``arch``.

    Nothing moves: each bundle is rewritten, shorter, at its old offset, and zeros follow up to its
    old end. A compressed bundle is compressed again, by zstd, in the same version; it stays
    unchanged if it would become larger.

    Returns False, and copies nothing, if the file has no offload bundles. Raises ValueError if the
    file or one of its bundles is damaged.
    """
    source.seek(0)
    head = source.read(len(PLAIN))
    if head.startswith(b"\x7fELF"):
        place = read_elf(source).places().get(".hip_fatbin")
    else:
        place = None
        if head.startswith((PLAIN, COMPRESSED)):
            place = (0, size)
    if place:
        bundles = list(bundles_in(source, *place))
    else:
        bundles = []
    if not bundles:
        return False
    at = 0
    end = sum(place or ())
    for bundle in bundles:
        if bundle.offset < at or bundle.offset + bundle.length > end:
            raise ValueError("an offload bundle reaches beyond its place")
        idle = [
            p
            for p in bundle.parts
            if (name := in_entry_id(p.id)) is not None and not runs_on([name], arch)
        ]
        if not any(p.size for p in idle):
            continue
        _copy(source, at, bundle.offset - at, out)
        at = bundle.offset
        remaining = tuple(p for p in bundle.parts if p not in idle)
        if bundle.version:
            write = _write_compressed
        else:
            write = _write_plain
        if write(source, bundle, remaining, out):
            at += bundle.length
    _copy(source, at, size - at, out)
    out.truncate(size)
    return True


def _copy(source: IO[bytes], at: int, amount: int, out: IO[bytes]) -> None:
    source.seek(at)
    out.seek(at)
    for chunk in _exactly(source, amount):
        out.write(chunk)


def _exactly(source: IO[bytes] | _Inflated, amount: int) -> Iterator[bytes]:
    while amount:
        data = source.read(min(_CHUNK, amount))
        if not data:
            raise ValueError("an offload bundle is cut short")
        amount -= len(data)
        yield data


def _list_of(parts: Sequence[Part]) -> bytes:
    rows = (struct.pack("<QQQ", p.offset, p.size, len(p.id)) + p.id.encode() for p in parts)
    return PLAIN + struct.pack("<Q", len(parts)) + b"".join(rows)


def _write_plain(
    source: IO[bytes], bundle: Bundle, remaining: Sequence[Part], out: IO[bytes]
) -> int:
    head = _list_of(remaining)
    out.seek(bundle.offset)
    out.write(head)
    for part in remaining:
        _copy(source, bundle.offset + part.offset, part.size, out)
    if remaining:
        return max(len(head), *(p.offset + p.size for p in remaining))
    return len(head)


def _write_compressed(
    source: IO[bytes], bundle: Bundle, remaining: Sequence[Part], out: IO[bytes]
) -> int | None:
    """Write the entries, each moved up to the next page. Returns the length; None if it is larger
    than before.
    """
    moved = []
    end = len(_list_of(remaining))
    for part in remaining:
        start = end + -end % _PAGE
        moved.append(Part(id=part.id, offset=start, size=part.size))
        end = start + part.size
    form = _HEADS[bundle.version]
    # By zstd, whose version is pinned. What zlib writes depends on the machine's zlib.
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compressobj(size=end)
    digest = hashlib.md5(usedforsecurity=False)
    length = struct.calcsize(form)
    for data in chain(_laid_out(_Inflated(source, bundle), remaining, moved), (None,)):
        digest.update(data or b"")
        if data is None:
            small = compressor.flush()
        else:
            small = compressor.compress(data)
        if length + len(small) > bundle.length:
            return None
        out.seek(bundle.offset + length)
        out.write(small)
        length += len(small)
    out.seek(bundle.offset)
    out.write(struct.pack(form, COMPRESSED, bundle.version, 1, length, end, digest.digest()[:8]))
    return length


def _laid_out(
    plain: _Inflated, remaining: Sequence[Part], moved: Sequence[Part]
) -> Iterator[bytes]:
    # The old bundle is read once from its start, because it may be larger than the memory.
    head = _list_of(moved)
    done = 0
    yield head
    at = len(head)
    for part, new in zip(remaining, moved, strict=True):
        yield bytes(new.offset - at)
        if part.size:
            if part.offset < done:
                raise ValueError("an offload bundle's code objects overlap or are out of order")
            for _ in _exactly(plain, part.offset - done):
                pass
            yield from _exactly(plain, part.size)
            done = part.offset + part.size
        at = new.offset + new.size
