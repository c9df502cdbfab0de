"""Layer blobs as uncompressed byte streams whose digests are checked while they are read."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from primus.errors import HostError
from primus.sandbox.model import LayerRef

__all__ = ["BlobReader", "damaged"]

_CHUNK = 1 << 20


def damaged(layer: LayerRef, path: Path, found: str) -> HostError:
    """The error for a blob whose bytes are not what its name says."""
    return HostError(
        f"blob {layer.digest} is damaged: {found} ({path})",
        hint="delete that file and build the image again; nothing of it was kept",
    )


class BlobReader:
    """The plain tar inside one layer blob; ``read`` hands it out, ``finish`` proves both digests.

    A blob that does not decompress or that has the wrong bytes raises HostError naming it.
    """

    def __init__(self, layer: LayerRef, path: Path) -> None:
        self._layer = layer
        self._path = path
        try:
            self._raw: IO[bytes] = path.open("rb", buffering=0)
        except OSError as error:
            raise HostError(
                f"blob {layer.digest} of the image cannot be read: {error.strerror} ({path})",
                hint="build the image again",
            ) from error
        self._blob_hash = hashlib.sha256()
        self._plain_hash = hashlib.sha256()
        self._compressed = not layer.media_type.endswith("tar")
        self._pending = b""
        self._chunks = self._plain()

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def _raw_chunks(self) -> Iterator[bytes]:
        while chunk := self._raw.read(_CHUNK):
            self._blob_hash.update(chunk)
            yield chunk

    def _plain(self) -> Iterator[bytes]:
        if not self._compressed:
            yield from self._raw_chunks()
            return
        decode = _gunzip if self._layer.media_type.endswith("gzip") else _unzstd
        try:
            for chunk in decode(self._raw_chunks()):
                self._plain_hash.update(chunk)
                yield chunk
        except (zlib.error, ValueError) as error:
            self._drain_raw()
            raise damaged(self._layer, self._path, f"it does not decompress ({error})") from error

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes, fewer only at the end."""
        if len(self._pending) < size:
            parts = [self._pending]
            have = len(self._pending)
            while have < size and (chunk := next(self._chunks, b"")):
                parts.append(chunk)
                have += len(chunk)
            self._pending = b"".join(parts)
        out, self._pending = self._pending[:size], self._pending[size:]
        return out

    def _drain_raw(self) -> None:
        for _ in self._raw_chunks():
            pass

    def finish(self) -> None:
        """Read what is left and compare both digests; HostError when one differs."""
        for _ in self._chunks:
            pass
        self._drain_raw()
        found = "sha256:" + self._blob_hash.hexdigest()
        if found != self._layer.digest:
            raise damaged(self._layer, self._path, f"its bytes hash to {found}")
        plain = found if not self._compressed else "sha256:" + self._plain_hash.hexdigest()
        if plain != self._layer.diff_id:
            raise damaged(
                self._layer,
                self._path,
                f"its content hashes to {plain}, the config says {self._layer.diff_id}",
            )


def _gunzip(chunks: Iterator[bytes]) -> Iterator[bytes]:
    decoder = zlib.decompressobj(31)
    for chunk in chunks:
        data = chunk
        while data:
            plain = decoder.decompress(data)
            if plain:
                yield plain
            data = decoder.unused_data
            # gzip files may be several members one after the other.
            if decoder.eof:
                decoder = zlib.decompressobj(31)


def _unzstd(chunks: Iterator[bytes]) -> Iterator[bytes]:
    import zstandard

    factory = zstandard.ZstdDecompressor()
    decoder: Any = factory.decompressobj()
    try:
        for chunk in chunks:
            data = chunk
            while data:
                if decoder.eof:
                    decoder = factory.decompressobj()
                plain = decoder.decompress(data)
                if plain:
                    yield plain
                data = decoder.unused_data if decoder.eof else b""
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
