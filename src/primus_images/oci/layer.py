"""Layers: written in one pass, read as a stream, or adopted from an image of a registry.

One pass makes the tar, its SHA-256, its compression and the SHA-256 of the blob. A stream unpacks
nothing, and an adopted layer keeps its bytes.
"""

import contextlib
import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, cast

import zstandard

from primus_images.errors import CheckFailed, HostError, InputError
from primus_images.files import open_regular, reason_of
from primus_images.oci.store import LAYER_TYPES, Blob, Layer, Store, storage_error
from primus_images.oci.tar import Entry, Kind, Member, chunks_of, in_order, write_tar
from primus_images.sandbox.container import LayerRef

# Part of every key. Increase it whenever the same entries would give other bytes.
_FORMAT = 1
_ZSTD_LEVEL = 3
_CHUNK = 1 << 18
MEMBER_KINDS: Mapping[bytes, Kind] = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.LNKTYPE: "hardlink",
    tarfile.SYMTYPE: "symlink",
    tarfile.DIRTYPE: "dir",
}
_UNREADABLE = (zlib.error, gzip.BadGzipFile, EOFError, zstandard.ZstdError)
_MOST_BYTES = 1 << 40
_FREE = 100 << 20
# Real archives reach about 20, such as licence texts and GPU libraries padded with zeros.
_MOST_RATIO = 100


def assembler() -> str:
    """Return what turns entries into bytes, for the keys: our format and the exact compressor."""
    return f"tar {_FORMAT}, zstd {_ZSTD_LEVEL}, zstandard {zstandard.__version__}"


class _Packer(io.RawIOBase):
    def __init__(self, out: IO[bytes], advance: Callable[[int], None]) -> None:
        self._out = out
        self._advance = advance
        # zstd's output does not depend on the number of threads, as long as there is at least one
        # worker. Each worker takes about 20 MB, and layers are written in parallel.
        threads = max(1, min(4, (os.cpu_count() or 1) // 2))
        compressor = zstandard.ZstdCompressor(
            level=_ZSTD_LEVEL, threads=threads, write_checksum=True
        )
        self._compressor = compressor.compressobj()
        self.tar = hashlib.sha256()
        self.blob = hashlib.sha256()
        self.unpacked = 0
        self.size = 0

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
    """Write the entries as a layer blob into the store.

    ``look`` gets each as it is written, and must take them all. Raises InputError for paths that an
    image may not contain, CheckFailed if a source changes while it is read, HostError if the disk
    is full or an archive is damaged. The store is then unchanged.
    """
    ordered = in_order(entries)
    try:
        with store.temporary() as out:
            packer = _Packer(out, advance)
            # Headers have 512 bytes: hash and compressor get few large pieces.
            pipe = io.BufferedWriter(packer, _CHUNK)
            look(write_tar(ordered, pipe.write))
            pipe.flush()
            packer.finish()
            digest = f"sha256:{packer.blob.hexdigest()}"
            blob = Blob(digest=digest, media_type=LAYER_TYPES["zstd"], size=packer.size)
            store.adopt(Path(out.name), blob)
    except OSError as error:
        if error.errno is None:
            hint = "run it again: a damaged file is fetched again"
            raise HostError(str(error), hint=hint) from None
        raise storage_error(error, Path(error.filename or store.root)) from None
    paths = save_paths(store, map(_listed, ordered))
    diff_id = f"sha256:{packer.tar.hexdigest()}"
    return Layer(blob=blob, diff_id=diff_id, unpacked=packer.unpacked, paths=paths)


def _listed(entry: Entry) -> str:
    return f"{entry.kind} {entry.mode:o} {entry.uid}:{entry.gid} {entry.path}"


def save_paths(store: Store, lines: Iterable[str]) -> str:
    """Store the list of a layer's paths, and return its digest.

    Its lines are ``kind mode uid:gid path``.
    """
    text = "\n".join(sorted(lines))
    return store.put(text.encode(), "text/plain").digest


def read_paths(store: Store, layer: Layer) -> dict[str, str]:
    """Return path → ``kind mode uid:gid`` for every entry of the layer.

    Raises HostError if the list is damaged.
    """
    result: dict[str, str] = {}
    for line in store.read(layer.paths).decode().split("\n"):
        if line:
            kind, mode, owner, path = line.split(" ", 3)
            result[path] = f"{kind} {mode} {owner}"
    return result


def check_overlap(layers: Iterable[tuple[str, bool, Mapping[str, str]]]) -> None:
    """Raise CheckFailed, with the first conflicts, if two layers of an image contain the same path.

    ``layers`` are name, whether the layer is of the base image, and path → ``kind mode uid:gid``,
    lowest first. The base image's own layers may replace each other's files, so they count as one.
    Folders may be shared if kind, mode and owner agree. No path may lie below another layer's
    symbolic link, because unpacking would replace the link (``/lib`` on a merged /usr).
    """
    base: dict[str, str] = {}
    components = []
    for name, of_base, paths in layers:
        if of_base:
            base |= paths
        else:
            components.append((name, paths))
    components.insert(0, ("the base image", base))
    conflicts = [*_paths_of_two(components), *_paths_below_links(components)]
    if conflicts:
        listed = "; ".join(conflicts[:5])
        if len(conflicts) > 5:
            listed += f" (and {len(conflicts) - 5} more)"
        raise CheckFailed(
            f"two layers own one path: {listed}",
            hint="let one component own it, or leave the file out of the other",
        )


def _paths_of_two(layers: Iterable[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    owners: dict[str, tuple[str, str]] = {}
    for name, paths in layers:
        for path in sorted(owners.keys() & paths.keys()):
            owner, meta = owners[path]
            if meta != paths[path] or not meta.startswith("dir "):
                yield f"/{path} is in both {owner} ({meta}) and {name} ({paths[path]})"
        for path, meta in paths.items():
            owners.setdefault(path, (name, meta))


def _paths_below_links(layers: Iterable[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    links: dict[str, str] = {}
    # There are few folders compared with files, so each folder's parents are visited once.
    folders: dict[str, list[str]] = {}
    for name, paths in layers:
        for path, meta in paths.items():
            if meta.startswith("symlink "):
                links.setdefault(path, name)
            folders.setdefault(path.rpartition("/")[0], []).append(f"/{path} of {name}")
    for folder, paths_inside in folders.items():
        link = _link_at(folder, links)
        if link:
            for path in paths_inside:
                yield f"{path} lies below the symbolic link /{link} of {links[link]}"


def _link_at(folder: str, links: Mapping[str, str]) -> str:
    while folder and folder not in links:
        folder = folder.rpartition("/")[0]
    return folder


def members(archive: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Yield (path without a leading slash, member) of the archive, in order; the path of its root
    is empty.

    tarfile itself would keep every member, and a layer may have a million. Raises tarfile.ReadError
    for a member of an impossible size.
    """
    for member in iter(archive.next, None):
        # tarfile would look for the next member for years.
        if archive.offset - member.offset > _MOST_BYTES:
            raise tarfile.ReadError(f"{member.name!r} is larger than {_MOST_BYTES >> 40} TiB")
        path = member.name.removeprefix("./").strip("/")
        if path == ".":
            path = ""
        yield path, member
        archive.members.clear()  # type: ignore[attr-defined]


def entry_of(path: str, member: tarfile.TarInfo, **more: Any) -> Entry:
    """Return the entry of an archive's member, one of :data:`MEMBER_KINDS`.

    ``more`` are fields such as its bytes.
    """
    kind = MEMBER_KINDS[member.type]
    link = member.linkname
    if kind == "hardlink":
        link = link.removeprefix("./")
    return Entry(
        path=path, kind=kind, mode=member.mode, uid=member.uid, gid=member.gid, link=link, **more
    )


def walk(layer: LayerRef, blob: Path) -> Iterator[Member]:
    """Yield every member of the layer, in its order, in bounded memory.

    Raises HostError if the blob cannot be read, and DamagedLayer if it is not a tar file or, after
    its end was read, does not match its digest.
    """
    with _reader(layer, blob) as reader:
        try:
            # Use small buffers: the stream reader copies the rest of a buffer at every header.
            with tarfile.open(fileobj=cast("Any", reader), mode="r|", bufsize=1 << 16) as archive:
                for path, info in members(archive):
                    kind: Kind | Literal["other"] = MEMBER_KINDS.get(info.type, "other")
                    file = archive.extractfile(info) if info.isreg() else None
                    if file is None:
                        yield Member(path, kind, link=info.linkname)
                    else:
                        yield Member(path, kind, info.size, chunks=chunks_of(file))
        # ValueError is for the numbers of a sparse file, RecursionError for thousands of extended
        # headers in a row.
        except (tarfile.TarError, ValueError, RecursionError) as error:
            raise reader.damaged(f"no tar is in it ({error})") from None
        reader.finish()


def unpacked(layer: LayerRef, blob: Path) -> Iterator[bytes]:
    """Yield the bytes of the layer's tar.

    Raises HostError if the blob cannot be read, and DamagedLayer if it does not match its digest
    after its end was read.
    """
    with _reader(layer, blob) as reader:
        while data := reader.read(_CHUNK):
            yield data
        reader.finish()


class DamagedLayer(HostError):
    """The file of a layer does not hold the layer. ``reason`` says what is wrong with it."""

    def __init__(self, digest: str, reason: str, path: Path) -> None:
        super().__init__(
            f"blob {digest} is damaged: {reason} ({path})",
            hint="delete that file and build the image again; nothing of it was kept",
        )
        self.reason = reason


@contextlib.contextmanager
def _reader(layer: LayerRef, blob: Path) -> Iterator["_BlobReader"]:
    try:
        file = blob.open("rb", buffering=0)
    except OSError as error:
        raise HostError(
            f"blob {layer.digest} of the image cannot be read: {reason_of(error)} ({blob})",
            hint="build the image again",
        ) from None
    with file:
        yield _BlobReader(layer, blob, file)


class _BlobReader:
    def __init__(self, layer: LayerRef, path: Path, file: IO[bytes]) -> None:
        self._layer = layer
        self._path = path
        self._packed = _Tee(file)
        self._plain = _Tee(_decompressed(self._packed, layer.media_type))

    def read(self, size: int) -> bytes:
        try:
            return self._plain.read(size)
        except _UNREADABLE as error:
            raise self.damaged(f"it does not decompress ({error})") from None

    def finish(self) -> None:
        while self.read(_CHUNK) or self._packed.read(_CHUNK):
            pass
        digest = self._packed.digest
        diff_id = self._plain.digest
        if digest != self._layer.digest:
            raise self.damaged(f"its bytes hash to {digest}")
        if diff_id != self._layer.diff_id:
            raise self.damaged(
                f"its content hashes to {diff_id}, the config says {self._layer.diff_id}"
            )

    def damaged(self, reason: str) -> "DamagedLayer":
        return DamagedLayer(self._layer.digest, reason, self._path)


def require_sane(unpacked: int, packed: int) -> None:
    """Raise ValueError if the compression ratio is implausible.

    A few kilobytes can unpack to more than a disk holds. ``unpacked`` is the size so far or the
    total.
    """
    if unpacked > _FREE + _MOST_RATIO * packed:
        raise ValueError(
            f"it is a decompression bomb: {packed:,} bytes unpack to {unpacked:,} or more"
        )


class _Tee:
    def __init__(
        self, stream: IO[bytes], passed_on: Callable[[bytes], object] = lambda _: None
    ) -> None:
        self._stream = stream
        self._passed_on = passed_on
        self._hash = hashlib.sha256()
        self.size = 0

    def read(self, amount: int = -1) -> bytes:
        data = self._stream.read(amount)
        self._hash.update(data)
        self.size += len(data)
        self._passed_on(data)
        return data

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def _decompressed(packed: _Tee, media_type: str) -> IO[bytes]:
    stream = cast("Any", packed)
    if media_type.endswith("gzip"):
        stream = gzip.GzipFile(fileobj=stream)
    elif not media_type.endswith("tar"):
        stream = zstandard.ZstdDecompressor().stream_reader(
            stream, read_size=_CHUNK, read_across_frames=True
        )
    return cast("IO[bytes]", stream)


def adopt_layer(
    store: Store, path: Path, sha256: str, media_type: str = LAYER_TYPES["gzip"]
) -> Layer:
    """Add the layer at ``path``, whose bytes must match ``sha256``, to the store, unchanged.

    Raises InputError if it is not a layer or has an entry that an image may not contain,
    CheckFailed if its bytes change while they are read, HostError if the disk is full.
    """
    try:
        with open_regular(path) as file, store.temporary() as out:
            packed = _Tee(file, out.write)
            # A few bytes can unpack to gigabytes of zeros.
            plain = _Tee(
                _decompressed(packed, media_type), lambda _: require_sane(plain.size, packed.size)
            )
            lines = list(_lines(plain))
            while plain.read(_CHUNK):
                pass
            out.flush()
            if packed.digest != f"sha256:{sha256}":
                raise CheckFailed(f"{path} changed while the build read it", hint="build again")
            blob = Blob(digest=packed.digest, media_type=media_type, size=packed.size)
            store.adopt(Path(out.name), blob)
    # UnicodeError is a ValueError, and BadGzipFile an OSError.
    except (tarfile.TarError, *_UNREADABLE, ValueError, RecursionError, InputError) as error:
        raise InputError(
            f"layer sha256:{sha256} cannot be used: {error}", hint="choose another image"
        ) from None
    except OSError as error:
        raise storage_error(error, path) from None
    return Layer(
        blob=blob, diff_id=plain.digest, unpacked=plain.size, paths=save_paths(store, lines)
    )


def _lines(plain: _Tee) -> Iterator[str]:
    seen: set[str] = set()
    with tarfile.open(fileobj=cast("Any", plain), mode="r|", bufsize=1 << 16) as archive:
        for path, member in members(archive):
            if not path:
                continue
            # A sparse file can claim more bytes than the layer has.
            if member.type not in MEMBER_KINDS or member.issparse():
                raise InputError(f"/{path} is not a plain file, folder or link")
            entry = entry_of(path, member)
            # A folder may appear twice, but of two files with one path, it is unclear which one
            # counts.
            if path in seen and entry.kind != "dir":
                raise InputError(f"it contains /{path} twice")
            if entry.kind == "hardlink" and entry.link not in seen:
                raise InputError(
                    f"/{path} is a link to /{entry.link}, which this layer does not contain"
                )
            seen.add(path)
            yield _listed(entry)


def reference(layer: Layer) -> LayerRef:
    """Return the layer as readers of blobs and the sandbox name it: without its paths."""
    blob = layer.blob
    return LayerRef(
        digest=blob.digest, diff_id=layer.diff_id, size=blob.size, media_type=blob.media_type
    )
