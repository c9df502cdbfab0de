"""Entries → one compressed layer blob, in one pass: tar, SHA-256 of the tar, compression, SHA-256 of the blob."""

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import zstandard

from primus.errors import CheckFailed, HostError
from primus.oci.store import LAYER_TYPES, Blob, Layer, Store, storage_error
from primus.oci.tar import Entry, Member, in_order, write_tar

# Part of every key. Increase it whenever the same entries would give other bytes.
_FORMAT = 1
_ZSTD_LEVEL = 3
_LARGE = 1 << 18


def assembler() -> str:
    """Return what turns entries into bytes, for the keys: our format and the exact compressor."""
    return f"tar {_FORMAT}, zstd {_ZSTD_LEVEL}, zstandard {zstandard.__version__}"


class _Packer(io.RawIOBase):
    def __init__(self, out: IO[bytes], advance: Callable[[int], None]) -> None:
        self._out, self._advance = out, advance
        # zstd's output does not depend on the number of threads, as long as there is at least one worker. Each worker
        # takes about 20 MB, and layers are written in parallel.
        threads = max(1, min(4, (os.cpu_count() or 1) // 2))
        compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, threads=threads, write_checksum=True)
        self._compressor = compressor.compressobj()
        self.tar, self.blob, self.unpacked, self.size = hashlib.sha256(), hashlib.sha256(), 0, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.tar.update(data)
        self.unpacked += len(data)
        self._emit(self._compressor.compress(data))
        self._advance(len(data))
        return len(data)

    def _emit(self, data: bytes) -> None:
        self.blob.update(data)
        self._out.write(data)
        self.size += len(data)

    def finish(self) -> None:
        self._emit(self._compressor.flush())
        self._out.flush()


def write_layer(
    store: Store,
    entries: Iterable[Entry],
    *,
    advance: Callable[[int], None] = lambda _: None,
    look: Callable[[Iterator[Member]], object] = list,
) -> Layer:
    """Write the entries as a layer blob into the store. ``look`` gets each as it is written, and must take them all.

    Raises InputError for paths that an image may not contain, CheckFailed if a source changes while it is read,
    HostError if the disk is full or an archive is damaged. The store is then unchanged.
    """
    ordered = in_order(entries)
    try:
        with store.temporary() as out:
            packer = _Packer(out, advance)
            # Headers have 512 bytes: hash and compressor get few large pieces.
            pipe = io.BufferedWriter(packer, _LARGE)
            look(write_tar(ordered, pipe.write))
            pipe.flush()
            packer.finish()
            blob = Blob(digest=f"sha256:{packer.blob.hexdigest()}", media_type=LAYER_TYPES["zstd"], size=packer.size)
            store.adopt(Path(out.name), blob)
    except OSError as error:
        if error.errno is None:
            raise HostError(str(error), hint="run it again: a damaged file is fetched again") from None
        raise storage_error(error, Path(error.filename or store.root)) from None
    lines = (f"{e.kind} {e.mode:o} {e.uid}:{e.gid} {e.path}" for e in ordered)
    return Layer(
        blob=blob,
        diff_id=f"sha256:{packer.tar.hexdigest()}",
        unpacked=packer.unpacked,
        paths=save_paths(store, lines),
    )


def save_paths(store: Store, lines: Iterable[str]) -> str:
    """Store the list of a layer's paths, lines of ``kind mode uid:gid path``, and return its digest."""
    return store.put("\n".join(sorted(lines)).encode(), "text/plain").digest


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
    base image's own layers may replace each other's files, so they count as one. Folders may be shared if kind, mode
    and owner agree. No path may lie below another layer's symbolic link, because unpacking would replace the link
    (``/lib`` on a merged /usr).
    """
    base: dict[str, str] = {}
    components = []
    for name, of_base, paths in layers:
        if of_base:
            base |= paths
        else:
            components.append((name, paths))
    if conflicts := list(_overlaps([("the base image", base), *components])):
        more = f" (and {len(conflicts) - 5} more)" if len(conflicts) > 5 else ""
        hint = "let one component own it, or leave the file out of the other"
        raise CheckFailed(f"two layers own one path: {'; '.join(conflicts[:5])}{more}", hint=hint)


def _overlaps(layers: Iterable[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    owners: dict[str, tuple[str, str]] = {}
    for name, paths in layers:
        for path in sorted(owners.keys() & paths.keys()):
            owner, meta = owners[path]
            if not (meta == paths[path] and meta.startswith("dir ")):
                yield f"/{path} is in both {owner} ({meta}) and {name} ({paths[path]})"
        for path, meta in paths.items():
            owners.setdefault(path, (name, meta))
    links = {path for path, (_, meta) in owners.items() if meta.startswith("symlink ")}
    # There are few folders compared with files, so each folder's parents are visited once.
    folders = {path.rpartition("/")[0] for path in owners}
    below = {folder: link for folder in folders if (link := _link_at(folder, links))}
    for path, (owner, _) in owners.items() if below else ():
        if above := below.get(path.rpartition("/")[0]):
            yield f"/{path} of {owner} lies below the symbolic link /{above} of {owners[above][0]}"


def _link_at(folder: str, links: set[str]) -> str:
    while folder and folder not in links:
        folder = folder.rpartition("/")[0]
    return folder
