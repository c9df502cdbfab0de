"""Reduce a library or bundle with GPU code for many architectures to the code of one.

Nothing moves: each offload bundle is rewritten, shorter, at its old offset, and zeros follow up to its old end.
Addresses in the library stay the same, and the zeros compress to nothing. A compressed bundle is compressed again as
clang does, in the same version of the format: the HIP runtime reads its length from its header and passes it to comgr,
which reads it as LLVM does.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import IO, Protocol

from primus.gpucode.archs import runs_on
from primus.gpucode.bundles import COMPRESSED, HEADS, PAGE, PLAIN, Bundle, Part, Reader, bundles_in, inflated
from primus.gpucode.elf import read_elf

# Part of the keys. Increase it whenever the same input would give other bytes.
FORMAT = 1
_CHUNK = 1 << 20
_ZSTD_LEVEL = 3
_ZLIB_LEVEL = 6


@dataclass(kw_only=True)
class Removed:
    """What was removed from a file: number of code objects, their bytes, and the targets they were for."""

    objects: int = 0
    size: int = 0
    targets: list[str] = field(default_factory=list)


def keep_only(arch: str, source: IO[bytes], size: int, out: IO[bytes]) -> Removed | None:
    """Copy ``source``, an ELF file or a bundle of ``size`` bytes, to the empty file ``out``, without code that does
    not run on ``arch``.

    Returns None, and copies nothing, if the file has no offload bundles. A compressed bundle stays unchanged if the
    new one would be larger, which may happen to a few bytes of well-compressed code.

    Raises ValueError if the file or one of its bundles is damaged.
    """
    source.seek(0)
    head = source.read(len(PLAIN))
    if head.startswith(b"\x7fELF"):
        place = read_elf(source).places().get(".hip_fatbin")
    else:
        place = (0, size) if head.startswith((PLAIN, COMPRESSED)) else None
    bundles = list(bundles_in(source, *place)) if place else []
    if not bundles:
        return None
    removed, at, end = Removed(), 0, sum(place or ())
    for bundle in bundles:
        if bundle.offset < at or bundle.offset + bundle.length > end:
            raise ValueError("an offload bundle reaches beyond its place")
        idle = [p for p in bundle.parts if p.target is not None and not runs_on([p.target], arch)]
        if not any(p.size for p in idle):
            continue
        _copy(source, at, bundle.offset - at, out)
        at = bundle.offset
        kept = tuple(p for p in bundle.parts if p not in idle)
        write = _write_compressed if bundle.version else _write_plain
        if (length := write(source, bundle, kept, out)) is None:
            continue
        removed.objects += sum(p.size > 0 for p in idle)
        removed.size += bundle.length - length if bundle.version else sum(p.size for p in idle)
        removed.targets += [str(p.target) for p in idle if p.size and p.target not in removed.targets]
        at += bundle.length
    _copy(source, at, size - at, out)
    out.truncate(size)
    return removed


def _copy(source: IO[bytes], at: int, amount: int, out: IO[bytes]) -> None:
    """Copy bytes to the same offset; skipped parts of ``out`` read as zeros."""
    source.seek(at)
    out.seek(at)
    for chunk in _exactly(source, amount):
        out.write(chunk)


def _exactly(source: Reader, amount: int) -> Iterator[bytes]:
    while amount:
        data = source.read(min(_CHUNK, amount))
        if not data:
            raise ValueError("an offload bundle is cut short")
        amount -= len(data)
        yield data


def _list_of(parts: Sequence[Part]) -> bytes:
    rows = (struct.pack("<QQQ", p.offset, p.size, len(p.id)) + p.id.encode() for p in parts)
    return PLAIN + struct.pack("<Q", len(parts)) + b"".join(rows)


def _write_plain(source: IO[bytes], bundle: Bundle, kept: Sequence[Part], out: IO[bytes]) -> int:
    """Write the bundle with the kept entries at their old offsets, and return its length."""
    head = _list_of(kept)
    out.seek(bundle.offset)
    out.write(head)
    for part in kept:
        _copy(source, bundle.offset + part.offset, part.size, out)
    return max(len(head), *(p.offset + p.size for p in kept)) if kept else len(head)


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


def _write_compressed(source: IO[bytes], bundle: Bundle, kept: Sequence[Part], out: IO[bytes]) -> int | None:
    """Write the kept entries, each moved up to the next page, compressed like the original bundle. Returns the
    length, or None if the result is larger than the original.
    """
    moved, end = [], len(_list_of(kept))
    for part in kept:
        start = end + -end % PAGE
        moved.append(Part(id=part.id, offset=start, size=part.size))
        end = start + part.size
    form = HEADS[bundle.version]
    compressor, digest = _compressor(bundle.method, end), hashlib.md5(usedforsecurity=False)
    length = struct.calcsize(form)
    for data in chain(_laid_out(inflated(source, bundle), kept, moved), (None,)):
        if data is not None:
            digest.update(data)
        small = compressor.flush() if data is None else compressor.compress(data)
        if length + len(small) > bundle.length:
            return None
        out.seek(bundle.offset + length)
        out.write(small)
        length += len(small)
    total = () if bundle.version == 1 else (length,)
    out.seek(bundle.offset)
    out.write(struct.pack(form, COMPRESSED, bundle.version, bundle.method, *total, end, digest.digest()[:8]))
    return length


def _laid_out(plain: Reader, kept: Sequence[Part], moved: Sequence[Part]) -> Iterator[bytes]:
    """Yield the bytes of the new bundle. ``plain`` is read once from its start, because it may be larger than the
    memory.
    """
    head, done, at = _list_of(moved), 0, 0
    yield head
    at = len(head)
    for part, new in zip(kept, moved, strict=True):
        yield bytes(new.offset - at)
        if part.size:
            if part.offset < done:
                raise ValueError("an offload bundle's code objects overlap or are out of order")
            for _ in _exactly(plain, part.offset - done):
                pass
            yield from _exactly(plain, part.size)
            done = part.offset + part.size
        at = new.offset + new.size


def _compressor(method: int, size: int) -> _Compressor:
    if method == 0:
        return zlib.compressobj(_ZLIB_LEVEL)
    import zstandard

    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compressobj(size=size)
