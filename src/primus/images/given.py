"""Layers that come finished, from an image of a registry: their bytes enter the store as they are."""

from __future__ import annotations

import hashlib
import tarfile
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, cast

from primus.errors import HostError
from primus.images.store import LAYER_TYPES, Blob, Layer, Store, storage_error

__all__ = ["adopt_layer", "stacked"]

_KINDS = {tarfile.LNKTYPE: "hardlink", tarfile.SYMTYPE: "symlink", tarfile.DIRTYPE: "dir"}
_WHITEOUT = ".wh."


class _Plain:
    """The tar inside a gzip file, hashed as it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._gzip = zlib.decompressobj(31)
        self._left = b""
        self.digest = hashlib.sha256()
        self.size = 0

    def read(self, amount: int) -> bytes:
        while len(self._left) < amount and (block := self._file.read(1 << 18)):
            while block:
                data = self._gzip.decompress(block)
                self.digest.update(data)
                self.size += len(data)
                self._left += data
                block = self._gzip.unused_data
                if self._gzip.eof:
                    self._gzip = zlib.decompressobj(31)
                    continue
                break
        data, self._left = self._left[:amount], self._left[amount:]
        return data


def adopt_layer(store: Store, path: Path, sha256: str) -> Layer:
    """Take the gzip layer at ``path``, whose bytes hash to ``sha256``, into the store, unchanged.

    Raises HostError when it is no layer or the disk is full.
    """
    begin = time.monotonic()
    try:
        with path.open("rb") as file, store.temporary() as out:
            plain = _Plain(file)
            lines = sorted(_lines(plain))
            while plain.read(1 << 20):
                pass
            file.seek(0)
            while block := file.read(1 << 20):
                out.write(block)
            out.flush()
            blob = Blob(digest=f"sha256:{sha256}", media_type=LAYER_TYPES["gzip"], size=path.stat().st_size)
            store.adopt(Path(out.name), blob)
    except (tarfile.TarError, zlib.error) as error:
        raise HostError(f"layer sha256:{sha256} is no gzip tar: {error}", hint="choose another image") from None
    except OSError as error:
        raise storage_error(error, path) from None
    return Layer(
        blob=blob,
        diff_id=f"sha256:{plain.digest.hexdigest()}",
        unpacked=plain.size,
        paths=store.put("\n".join(lines).encode(), "text/plain").digest,
        seconds=round(time.monotonic() - begin, 3),
    )


def _lines(plain: _Plain) -> Iterable[str]:
    with tarfile.open(fileobj=cast("Any", plain), mode="r|", bufsize=1 << 16) as archive:
        for member in archive:
            path = member.name.removeprefix("./").strip("/")
            if path and path != ".":
                kind = _KINDS.get(member.type, "file")
                yield f"{kind} {member.mode:o} {member.uid}:{member.gid} {path}"


def stacked(layers: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The paths of an image's own layers, lowest first, as one: an upper layer may replace and remove."""
    result: dict[str, str] = {}
    for layer in layers:
        for path in layer:
            folder, _, name = path.rpartition("/")
            if name.startswith(_WHITEOUT):
                gone = f"{folder}/{name.removeprefix(_WHITEOUT)}".lstrip("/") if name != ".wh..wh..opq" else folder
                keep = name == ".wh..wh..opq"
                result = {p: m for p, m in result.items() if not p.startswith(gone + "/") and (keep or p != gone)}
        result |= {path: meta for path, meta in layer.items() if not path.rpartition("/")[2].startswith(_WHITEOUT)}
    return result
