"""Entries → one compressed layer blob, in one pass: tar, SHA-256 of the tar, compression, SHA-256 of the blob."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO

import zstandard

from primus.errors import CheckFailed, HostError
from primus.oci.store import LAYER_TYPES, Blob, Layer, Store, storage_error
from primus.oci.tar import Entry, in_order, write_tar

# Part of every key. Increase it whenever the same entries would give other bytes.
_FORMAT = 1
_ZSTD_LEVEL = 3
_LARGE = 1 << 18


def assembler() -> str:
    """Return what turns entries into bytes, for the keys: our format and the exact compressor."""
    return f"tar {_FORMAT}, zstd {_ZSTD_LEVEL}, zstandard {zstandard.__version__}"


class _Pipe:
    def __init__(self, out: IO[bytes], advance: Callable[[int], None]) -> None:
        self._out = out
        # zstd's output does not depend on the number of threads, as long as there is at least one worker. Each worker
        # takes about 20 MB, and layers are written in parallel.
        threads = max(1, min(4, (os.cpu_count() or 1) // 2))
        self._compressor = zstandard.ZstdCompressor(
            level=_ZSTD_LEVEL, threads=threads, write_checksum=True
        ).compressobj()
        self._advance = advance
        self._buffer = bytearray()
        self.tar = hashlib.sha256()
        self.blob = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        # Headers have 512 bytes. Collect them, so that hash and compressor get few large pieces.
        if len(data) >= _LARGE:
            self._gathered()
            self._pass_on(data)
            return
        self._buffer += data
        if len(self._buffer) >= _LARGE:
            self._gathered()

    def _gathered(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        self.tar.update(data)
        self._emit(self._compressor.compress(data))
        self._advance(len(data))

    def _emit(self, data: bytes) -> None:
        if data:
            self.blob.update(data)
            self._out.write(data)
            self.size += len(data)

    def close(self) -> None:
        self._gathered()
        self._emit(self._compressor.flush())


def write_layer(store: Store, entries: Iterable[Entry], *, advance: Callable[[int], None] = lambda _: None) -> Layer:
    """Write the entries as a layer blob into the store.

    Raises InputError for paths that an image may not contain, CheckFailed if a source changes while it is read,
    HostError if the disk is full or an archive is damaged. The store is then unchanged.
    """
    ordered = in_order(entries)
    try:
        with store.temporary() as out:
            pipe = _Pipe(out, advance)
            unpacked = write_tar(ordered, pipe)
            pipe.close()
            out.flush()
            blob = Blob(digest=f"sha256:{pipe.blob.hexdigest()}", media_type=LAYER_TYPES["zstd"], size=pipe.size)
            store.adopt(Path(out.name), blob)
    except OSError as error:
        if error.errno is None:
            raise HostError(str(error), hint="run it again: a damaged file is fetched again") from None
        raise storage_error(error, Path(error.filename or store.root)) from None
    return Layer(
        blob=blob,
        diff_id=f"sha256:{pipe.tar.hexdigest()}",
        unpacked=unpacked,
        paths=_save_paths(store, ordered),
    )


def _save_paths(store: Store, entries: list[Entry]) -> str:
    lines = sorted(f"{e.kind} {e.mode:o} {e.uid}:{e.gid} {e.path}" for e in entries)
    return store.put("\n".join(lines).encode(), "text/plain").digest


def read_paths(store: Store, layer: Layer) -> dict[str, str]:
    """Return path → ``kind mode uid:gid`` for every entry of the layer. Raises HostError if the list is damaged."""
    result: dict[str, str] = {}
    for line in store.read(layer.paths).decode().split("\n"):
        if line:
            kind, mode, owner, path = line.split(" ", 3)
            result[path] = f"{kind} {mode} {owner}"
    return result


def check_overlap(layers: Iterable[tuple[str, bool, Mapping[str, str]]]) -> None:
    """Raise CheckFailed, with the first conflicts, if two layers of an image contain the same path.

    ``layers`` are name, whether the layer is of the base image, and path → ``kind mode uid:gid``, lowest first. The
    base image's own layers may replace each other's files, so they count as one.
    """
    base: dict[str, str] = {}
    components = []
    for name, of_base, paths in layers:
        if of_base:
            base |= paths
        else:
            components.append((name, paths))
    conflicts = overlaps([("the base image", base), *components])
    if conflicts:
        more = f" (and {len(conflicts) - 5} more)" if len(conflicts) > 5 else ""
        hint = "let one component own it, or leave the file out of the other"
        raise CheckFailed(f"two layers own one path: {'; '.join(conflicts[:5])}{more}", hint=hint)


def overlaps(layers: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return one sentence per conflict between layers (name, path → ``kind mode uid:gid``), lowest layer first.

    Several layers may contain a folder if kind, mode and owner agree. Only one may contain a file. No layer may
    contain a path below another layer's symbolic link, because unpacking would replace the link (``/lib`` on a
    merged /usr).
    """
    layers = list(layers)
    merged: dict[str, str] = {}
    links: set[str] = set()
    conflicts: list[str] = []

    def owner(path: str) -> str:
        return next(name for name, paths in layers if path in paths)

    for name, paths in layers:
        shared = {path: merged[path] for path in sorted(merged.keys() & paths.keys())}
        for path, meta in shared.items():
            if not (meta == paths[path] and meta.startswith("dir ")):
                conflicts.append(f"/{path} is in both {owner(path)} ({meta}) and {name} ({paths[path]})")
        links.update(path for path, meta in paths.items() if meta.startswith("symlink ") and path not in shared)
        merged |= {**paths, **shared}
    # There are few folders compared with files, so each folder's parents are visited once.
    folders = {path.rpartition("/")[0] for path in merged}
    bad = {folder: link for folder in folders if (link := _link_at(folder, links))}
    below = ((path, bad.get(path.rpartition("/")[0])) for path in (merged if bad else ()))
    conflicts += [
        f"/{path} of {owner(path)} lies below the symbolic link /{link} of {owner(link)}"
        for path, link in below
        if link
    ]
    return conflicts


def _link_at(folder: str, links: set[str]) -> str:
    while folder and folder not in links:
        folder = folder.rpartition("/")[0]
    return folder
