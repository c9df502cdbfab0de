"""Offload bundles, in which clang stores GPU code for several architectures.

They are read, and reduced to one architecture.

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
_MAGIC = re.compile(PLAIN + b"|" + COMPRESSED)
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
    """A bundle of ``length`` bytes at ``offset`` of a stream.

    ``version`` is 0 for an uncompressed one; a compressed one contains ``unpacked`` bytes.
    """

    offset: int
    length: int
    parts: tuple[Part, ...]
    version: int = 0
    method: int = 0
    unpacked: int = 0


def bundles_in(stream: IO[bytes], offset: int, size: int) -> Iterator[Bundle]:
    """Yield the bundles in this part of the stream.

    Only their lists of entries are read, so the part may be large. Raises ValueError if a bundle is
    damaged.
    """
    end = offset + size
    at = _next_magic(stream, offset, end)
    while at is not None:
        stream.seek(at)
        if stream.read(len(COMPRESSED)) == COMPRESSED:
            bundle = _compressed(stream, at)
        else:
            stream.seek(at)
            parts, length = _parts_of(stream.read(min(_LIST_SIZE, end - at)))
            bundle = Bundle(at, length, parts)
        if bundle is None:
            # The same four letters in the middle of code are not a bundle.
            at += len(COMPRESSED)
        else:
            yield bundle
            at += bundle.length
        at = _next_magic(stream, at, end)


def _next_magic(stream: IO[bytes], at: int, end: int) -> int | None:
    while at < end:
        stream.seek(at)
        data = stream.read(min(_CHUNK, end - at))
        match = _MAGIC.search(data)
        if match:
            return at + match.start()
        # The magic may lie across two pieces.
        at += max(1, len(data) - len(PLAIN) + 1)
    return None


def _parts_of(data: bytes) -> tuple[tuple[Part, ...], int]:
    """Return the entries of an uncompressed bundle that begins with ``data``, and its length."""
    at = len(PLAIN)
    parts = []
    length = at + 8
    try:
        (count,) = struct.unpack_from("<Q", data, at)
        at += 8
        for _ in range(count):
            offset, size, id_size = struct.unpack_from("<QQQ", data, at)
            at += 24
            if at + id_size > len(data):
                raise ValueError("an offload bundle is cut short")
            id_ = data[at : at + id_size].decode("ascii", "replace")
            parts.append(Part(id_, offset, size))
            at += id_size
            length = max(length, at, offset + size)
    except struct.error:
        raise ValueError("an offload bundle is cut short") from None
    return tuple(parts), length


def _compressed(stream: IO[bytes], at: int) -> Bundle | None:
    stream.seek(at)
    head = stream.read(struct.calcsize(_HEADS[3]))
    try:
        _, version, method = struct.unpack_from("<4sHH", head)
        form = _HEADS[version]
        *_, length, unpacked, _ = struct.unpack_from(form, head)
    except (struct.error, KeyError):
        return None
    if length <= struct.calcsize(form):
        return None
    bundle = Bundle(at, length, (), version, method, unpacked)
    data = _Inflated(stream, bundle).read_all(_LIST_SIZE)
    if not data.startswith(PLAIN):
        raise ValueError("a compressed offload bundle holds something else")
    parts, _ = _parts_of(data)
    return bundle._replace(parts=parts)


class _Inflated:
    def __init__(self, stream: IO[bytes], bundle: Bundle) -> None:
        if bundle.method not in _DECODERS:
            method = f"an unknown method {bundle.method}"
            raise ValueError(f"an offload bundle is compressed by {method}")
        self._stream = stream
        self._decoder = _DECODERS[bundle.method]()
        self._at = bundle.offset + struct.calcsize(_HEADS[bundle.version])
        self._end = bundle.offset + bundle.length
        self._remaining = bundle.unpacked
        self._data = memoryview(b"")

    def read(self, amount: int, /) -> bytes:
        amount = min(amount, self._remaining)
        if amount:
            self._fill()
        data = bytes(self._data[:amount])
        self._data = self._data[amount:]
        self._remaining -= len(data)
        return data

    def read_all(self, most: int) -> bytes:
        data = b""
        chunk = self.read(most)
        while chunk and len(data) < most:
            data += chunk
            chunk = self.read(most)
        return data

    def _fill(self) -> None:
        while not self._data and self._at < self._end and not self._decoder.eof:
            self._stream.seek(self._at)
            compressed = self._stream.read(min(_COMPRESSED_CHUNK, self._end - self._at))
            if not compressed:
                self._at = self._end
            self._at += len(compressed)
            try:
                self._data = memoryview(self._decoder.decompress(compressed))
            except (zlib.error, zstandard.ZstdError) as error:
                raise ValueError(f"a compressed offload bundle is damaged: {error}") from None


def keep_only(arch: str, source: IO[bytes], size: int, out: IO[bytes]) -> bool:
    """Copy an ELF file or a bundle without the code that does not run on ``arch``.

    ``source`` has ``size`` bytes, and the file ``out`` is empty. Nothing moves: each bundle is
    rewritten, shorter, at its old offset, and zeros follow up to its old end. A compressed bundle
    is compressed again, by zstd, in the same version; it stays unchanged if it would become larger.

    Returns False, and copies nothing, if the file has no offload bundles. Raises ValueError if the
    file or one of its bundles is damaged.
    """
    offset, length = _place_of_bundles(source, size)
    bundles = list(bundles_in(source, offset, length))
    if not bundles:
        return False
    at = 0
    for bundle in bundles:
        if bundle.offset < at or bundle.offset + bundle.length > offset + length:
            raise ValueError("an offload bundle reaches beyond its place")
        remaining = [part for part in bundle.parts if _runs(part, arch)]
        if not any(part.size for part in bundle.parts if part not in remaining):
            continue
        _copy(source, at, bundle.offset - at, out)
        at = bundle.offset
        if not bundle.version:
            _write_plain(source, bundle, remaining, out)
        elif not _write_compressed(source, bundle, remaining, out):
            continue
        at += bundle.length
    _copy(source, at, size - at, out)
    out.truncate(size)
    return True


def _place_of_bundles(source: IO[bytes], size: int) -> tuple[int, int]:
    source.seek(0)
    head = source.read(len(PLAIN))
    if head.startswith(b"\x7fELF"):
        return read_elf(source).places().get(".hip_fatbin", (0, 0))
    if head.startswith((PLAIN, COMPRESSED)):
        return 0, size
    return 0, 0


def _runs(part: Part, arch: str) -> bool:
    """Whether an entry is the host's, or code for ``arch``."""
    target = in_entry_id(part.id)
    return target is None or runs_on([target], arch)


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
    data = PLAIN + struct.pack("<Q", len(parts))
    for part in parts:
        data += struct.pack("<QQQ", part.offset, part.size, len(part.id))
        data += part.id.encode()
    return data


def _write_plain(
    source: IO[bytes], bundle: Bundle, remaining: Sequence[Part], out: IO[bytes]
) -> None:
    out.seek(bundle.offset)
    out.write(_list_of(remaining))
    for part in remaining:
        _copy(source, bundle.offset + part.offset, part.size, out)


def _write_compressed(
    source: IO[bytes], bundle: Bundle, remaining: Sequence[Part], out: IO[bytes]
) -> bool:
    """Write the entries, each moved up to the next page.

    Returns False, and a part of them is written, if they need more bytes than before.
    """
    moved = []
    end = len(_list_of(remaining))
    for part in remaining:
        start = end + -end % _PAGE
        moved.append(Part(part.id, start, part.size))
        end = start + part.size
    form = _HEADS[bundle.version]
    # By zstd, whose version is pinned. What zlib writes depends on the machine's zlib.
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compressobj(size=end)
    digest = hashlib.md5(usedforsecurity=False)
    length = struct.calcsize(form)
    out.seek(bundle.offset + length)
    for data in chain(_laid_out(_Inflated(source, bundle), remaining, moved), (None,)):
        if data is None:
            small = compressor.flush()
        else:
            digest.update(data)
            small = compressor.compress(data)
        length += len(small)
        if length > bundle.length:
            return False
        out.write(small)
    head = struct.pack(form, COMPRESSED, bundle.version, 1, length, end, digest.digest()[:8])
    out.seek(bundle.offset)
    out.write(head)
    return True


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
