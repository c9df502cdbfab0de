"""Reading layer blobs as uncompressed byte streams, and checking their digests on the way."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from primus.errors import HostError
from primus.sandbox.container import LayerRef

_CHUNK = 1 << 20
# What tarfile raises for bytes that are no tar: ValueError is for the numbers of a sparse file, RecursionError for
# thousands of extended headers in a row.
NO_TAR = (tarfile.TarError, ValueError, RecursionError)


def damaged(layer: LayerRef, path: Path, found: str) -> HostError:
    """Return the error for a blob whose bytes do not match its name."""
    return HostError(
        f"blob {layer.digest} is damaged: {found} ({path})",
        hint="delete that file and build the image again; nothing of it was kept",
    )


class BlobReader:
    """The tar inside one layer blob. ``read`` returns its bytes; ``finish`` checks both digests.

    Raises HostError, with the blob, if it does not decompress or has other bytes.
    """

    def __init__(self, layer: LayerRef, path: Path) -> None:
        self._layer = layer
        self._path = path
        try:
            self._file: IO[bytes] = path.open("rb", buffering=0)
        except OSError as error:
            raise HostError(
                f"blob {layer.digest} of the image cannot be read: {error.strerror} ({path})",
                hint="build the image again",
            ) from error
        self._raw = _Raw(self._file)
        self._plain_hash = hashlib.sha256()
        self._compressed = not layer.media_type.endswith("tar")
        self._pending = memoryview(b"")
        self._chunks = self._plain()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _plain(self) -> Iterator[bytes]:
        if not self._compressed:
            yield from _copied(self._raw)
            return
        decode = _gunzip if self._layer.media_type.endswith("gzip") else _unzstd
        try:
            for chunk in decode(self._raw):
                self._plain_hash.update(chunk)
                yield chunk
        except (zlib.error, ValueError) as error:
            raise damaged(self._layer, self._path, f"it does not decompress ({error})") from error

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes, fewer only at the end."""
        # Slices of a memoryview copy nothing; a tar is read in pieces of 512 bytes.
        parts = [self._pending[:size]]
        have = len(parts[0])
        self._pending = self._pending[size:]
        while have < size and (chunk := next(self._chunks, b"")):
            view = memoryview(chunk)
            parts.append(view[: size - have])
            self._pending = view[size - have :]
            have += len(parts[-1])
        return b"".join(parts)

    def finish(self) -> None:
        """Read the rest and compare both digests. Raises HostError if one differs."""
        for _ in self._chunks:
            pass
        for _ in _copied(self._raw):
            pass
        found = "sha256:" + self._raw.hash.hexdigest()
        if found != self._layer.digest:
            raise damaged(self._layer, self._path, f"its bytes hash to {found}")
        plain = found if not self._compressed else "sha256:" + self._plain_hash.hexdigest()
        if plain != self._layer.diff_id:
            raise damaged(
                self._layer,
                self._path,
                f"its content hashes to {plain}, the config says {self._layer.diff_id}",
            )


class _Raw:
    """The blob's bytes, all of which are hashed as they are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.hash.update(data)
        return data


def _copied(raw: _Raw) -> Iterator[bytes]:
    while chunk := raw.read(_CHUNK):
        yield chunk


def _gunzip(raw: _Raw) -> Iterator[bytes]:
    decoder = zlib.decompressobj(31)
    data = b""
    while data or (data := raw.read(_CHUNK)):
        # Bound the output, because a few kilobytes can decompress to gigabytes of zeros.
        plain = decoder.decompress(data, _CHUNK)
        if plain:
            yield plain
        data = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
        # A gzip file may consist of several members.
        if decoder.eof:
            decoder = zlib.decompressobj(31)


def _unzstd(raw: _Raw) -> Iterator[bytes]:
    import zstandard

    reader = zstandard.ZstdDecompressor().stream_reader(
        cast("Any", raw), read_size=_CHUNK, read_across_frames=True, closefd=False
    )
    try:
        while chunk := reader.read(_CHUNK):
            yield chunk
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
