"""The first layer and file in which two builds of the same image differ."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
from collections.abc import Iterator
from itertools import zip_longest
from typing import IO, Any

import zstandard

from primus.engine.image import Built
from primus.oci.store import Store


def first_difference(one: tuple[Store, Built], other: tuple[Store, Built]) -> str | None:
    """Return one sentence that names the first difference between the images, or None if they have the same bytes."""
    (store_a, a), (store_b, b) = one, other
    if a.digest == b.digest:
        return None
    for line_a, line_b in zip_longest(a.layers, b.layers):
        if line_a is None or line_b is None or line_a.name != line_b.name:
            return f"layers differ: {getattr(line_a, 'name', 'none')} against {getattr(line_b, 'name', 'none')}"
        if line_a.digest != line_b.digest:
            path = _first_path(_members(store_a, line_a.digest), _members(store_b, line_b.digest))
            return f"layer {line_a.name}: " + (path or "the same files, compressed to other bytes")
    return "the layers are the same, config or manifest differ"


def _first_path(one: Iterator[tuple[str, str]], other: Iterator[tuple[str, str]]) -> str | None:
    for left, right in zip_longest(one, other):
        if left != right:
            if left is None or right is None or left[0] != right[0]:
                return f"/{(left or right)[0]} is in one only"
            return f"/{left[0]}: {left[1]} against {right[1]}"
    return None


def _members(store: Store, digest: str) -> Iterator[tuple[str, str]]:
    """Yield the path and a description of every entry of a layer blob, in its order."""
    with (
        store.blob_path(digest).open("rb") as raw,
        _plain(raw) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for member in archive:
            content = ""
            if member.isreg() and (data := archive.extractfile(member)):
                content = "sha256 " + hashlib.file_digest(data, "sha256").hexdigest()[:12]  # type: ignore[arg-type]
            yield (
                member.name,
                f"type {member.type.decode()} mode {member.mode:o} owner {member.uid}:{member.gid} "
                f"time {member.mtime} size {member.size} {member.linkname} {content}".strip(),
            )


def _plain(raw: IO[bytes]) -> Any:
    magic = raw.read(4)
    raw.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.open(raw)
    return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
