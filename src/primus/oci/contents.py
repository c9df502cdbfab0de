"""The contents of a layer blob, read in one pass over the stream. Nothing is unpacked."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from primus.errors import HostError
from primus.oci.tar import Kind
from primus.sandbox.blobs import NO_TAR, BlobReader, damaged
from primus.sandbox.container import LayerRef

KINDS: Mapping[bytes, Kind] = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.LNKTYPE: "hardlink",
    tarfile.SYMTYPE: "symlink",
    tarfile.DIRTYPE: "dir",
}
_MOST_BYTES = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Member:
    """One path of a layer, without a leading slash. ``open`` streams a file's bytes, once, while the file is the
    current member.
    """

    path: str
    kind: Kind | Literal["other"] = "file"
    size: int = 0
    open: Callable[[], IO[bytes]]


def members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the archive's members in order. tarfile itself would keep every member, and a layer may have a million.

    Raises tarfile.ReadError for a member of an impossible size.
    """
    while (member := archive.next()) is not None:
        # tarfile would look for the next member for years.
        if archive.offset - member.offset > _MOST_BYTES:
            raise tarfile.ReadError(f"{member.name!r} is larger than {_MOST_BYTES >> 40} TiB")
        yield member
        archive.members.clear()  # type: ignore[attr-defined]


def walk(layer: LayerRef, blob: Path) -> Iterator[Member]:
    """Yield every member of the layer, in its order, in bounded memory.

    Raises HostError if the blob cannot be read, is not a tar file or, after its end was read, does not match its
    digest.
    """
    reader = BlobReader(layer, blob)
    try:
        # Use small buffers: the stream reader copies the rest of a buffer at every header.
        with tarfile.open(fileobj=cast("Any", reader), mode="r|", bufsize=1 << 16) as archive:
            for info in members(archive):
                yield Member(
                    path=info.name.removeprefix("./").strip("/"),
                    kind=KINDS.get(info.type, "other"),
                    size=info.size if info.isreg() else 0,
                    open=lambda info=info: _open(archive, info),  # type: ignore[misc]
                )
        reader.finish()
    except NO_TAR as error:
        raise damaged(layer, blob, f"no tar is in it ({error})") from None
    finally:
        reader.close()


def _open(archive: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    stream = archive.extractfile(info)
    if stream is None:
        raise HostError(f"/{info.name} is not a regular file")
    return stream
