"""The store: one OCI image layout, and the records of the actions that created its blobs.

Layout: ``oci-layout``, ``index.json`` and ``blobs/sha256/*`` as in the OCI image-layout
specification; ``actions/<key>.json`` is the record of a finished action; ``targets/<target>.json``
describes the last build; ``locks/`` and ``tmp/`` are for work in progress. A blob appears by rename
when it is complete, and a record only after its blobs, so the store is valid after an interrupt at
any moment. A name proves nothing: bytes that ship are hashed again (GHSA-3fqg-8hpf-5682), see
:meth:`Store.check`.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from primus_images import files
from primus_images.errors import HostError, InputError, PrimusError
from primus_images.schema import build_typed, read_json
from primus_images.waits import InUse, is_unlocked, lock

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPES = {
    "zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
    "gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
}
_REF = "org.opencontainers.image.ref.name"
_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'


class DiskFull(HostError):
    """A file could not be written, because the disk or the user's share of it is full."""


def canonical_json(data: object) -> bytes:
    """Return canonical JSON: sorted keys, no spaces, UTF-8.

    The same data gives the same bytes on every machine.
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def key_of(data: object) -> str:
    """Return the SHA-256 (64 hex digits) of the canonical JSON of ``data``."""
    return hashlib.sha256(canonical_json(data)).hexdigest()


def digest_of(blob: bytes) -> str:
    """Return the OCI digest ``sha256:…`` of the bytes."""
    return "sha256:" + hashlib.sha256(blob).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A blob of the store: OCI digest, media type, size in bytes."""

    digest: str
    media_type: str
    size: int

    @classmethod
    def of(cls, data: bytes, media_type: str) -> Self:
        """Return the blob of these bytes."""
        return cls(digest=digest_of(data), media_type=media_type, size=len(data))

    @property
    def descriptor(self) -> dict[str, object]:
        """The OCI descriptor."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The result of an action: the blob, the digest and size of the tar inside it, the paths."""

    blob: Blob
    diff_id: str
    unpacked: int
    paths: str


def manifest_of(config: bytes, layers: Iterable[Blob], annotations: Mapping[str, str]) -> bytes:
    """Return the manifest of the image with this config and these layers, bottom first."""
    return canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": Blob.of(config, CONFIG_TYPE).descriptor,
            "layers": [layer.descriptor for layer in layers],
            "annotations": dict(annotations),
        }
    )


class Store:
    """One OCI image layout on disk. Several builders may use it at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.in_use = InUse(root / "locks" / "in-use", "the store", root)

    def prepare(self) -> None:
        """Create the layout if it does not exist, and remove files of builders that were killed."""
        try:
            for folder in ("blobs/sha256", "actions", "targets", "locks", "tmp"):
                (self.root / folder).mkdir(parents=True, exist_ok=True)
            if not self._is_layout():
                self._replace(self.root / "oci-layout", _LAYOUT)
            if not self._index.exists():
                with self.lock("index"):
                    if not self._index.exists():
                        self._replace(self._index, _index_bytes({}))
        except OSError as error:
            raise storage_error(error, self.root) from None
        self.in_use.hold()
        self._sweep()

    def blob_path(self, digest: str) -> Path:
        """Return the path of the blob with this digest, whether or not it exists."""
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def has(self, blob: Blob) -> bool:
        """Whether the blob exists with its full size (its bytes are not read)."""
        try:
            status = self.blob_path(blob.digest).stat()
        except PermissionError:
            raise  # what another user built is not absent
        except OSError:
            return False
        return status.st_size == blob.size and stat.S_ISREG(status.st_mode)

    def check(self, digest: str) -> str | None:
        """Read the blob and hash it.

        Returns None if it is intact, else one sentence that says what is wrong.
        """
        try:
            seen = f"sha256:{files.sha256_of(self.blob_path(digest))}"
        except (OSError, InputError) as error:
            return f"blob {digest} cannot be read: {_reason(error)}"
        if seen == digest:
            return None
        return f"blob {digest} is damaged: its bytes hash to {seen}"

    def read(self, digest: str) -> bytes:
        """Read and verify a small blob. Raises HostError if it is damaged or missing."""
        hint = "primus build --rehash creates it again"
        try:
            data = files.read_bytes(self.blob_path(digest))
        except PermissionError:
            raise  # another user's store is not damaged
        except (OSError, InputError) as error:
            raise HostError(f"blob {digest} cannot be read: {_reason(error)}", hint=hint) from None
        if digest_of(data) != digest:
            raise HostError(f"blob {digest} is damaged", hint=hint)
        return data

    def put(self, data: bytes, media_type: str) -> Blob:
        """Store a small blob, such as a config or a manifest."""
        blob = Blob.of(data, media_type)
        if not self.has(blob) or self.check(blob.digest):
            self._replace(self.blob_path(blob.digest), data)
        return blob

    def adopt(self, temporary: Path, blob: Blob) -> None:
        """Move a finished temporary file of :meth:`temporary` into place."""
        _move(temporary, self.blob_path(blob.digest))

    @contextlib.contextmanager
    def temporary(self) -> Iterator[IO[bytes]]:
        """Yield a file in a scratch folder. It is removed afterwards unless adopted."""
        with self.folder("blob") as folder, (folder / "blob").open("xb") as stream:
            os.fchmod(stream.fileno(), 0o644)
            yield stream

    @contextlib.contextmanager
    def folder(self, prefix: str) -> Iterator[Path]:
        """Yield a scratch folder in ``tmp/``, removed afterwards.

        A later run removes it if this process is killed.
        """
        # Take the sweepers' lock: between its creation and its locking, a folder looks like one of
        # a killed builder.
        with self.lock("tmp"):
            path = self.root / "tmp" / f"{prefix}-{os.urandom(6).hex()}"
            path.mkdir(mode=0o700)
            keep = os.open(path, os.O_RDONLY)
            fcntl.flock(keep, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(keep)

    @contextlib.contextmanager
    def lock(self, name: str, what: str = "") -> Iterator[None]:
        """Hold ``locks/<name>``. A second builder of the same thing waits here.

        The kernel releases the lock if the process dies. ``what`` names it in messages.
        """
        path = self.root / "locks" / name
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            lock(handle, what or f"the store's {name}", path)
            yield
        finally:
            os.close(handle)

    def layer(self, key: str) -> Layer | None:
        """Return the layer that an action created.

        None if it did not run, its blob is missing or truncated, or its list of paths is missing.
        """
        record = self.record("actions", key) or {}
        try:
            layer = build_typed(Layer, record.get("layer"), key)
        except InputError:
            return None
        if not self.has(layer.blob) or not self.blob_path(layer.paths).is_file():
            return None
        return layer

    def record(self, room: str, name: str) -> dict[str, Any] | None:
        """Return a record of ``actions`` or ``targets``; None if it is absent or damaged.

        It is then created again.
        """
        path = self._record(room, name)
        data = files.read_sealed(path)
        if data is None:
            files.require_readable(path)
        if isinstance(data, dict):
            return data
        return None

    def save(self, room: str, name: str, record: dict[str, Any]) -> None:
        """Write a record atomically."""
        self._replace(self._record(room, name), files.seal(canonical_json(record)))

    def _record(self, room: str, name: str) -> Path:
        return self.root / room / f"{name}.json"

    def images(self) -> dict[str, dict[str, Any]]:
        """Return name → manifest descriptor, as in index.json.

        Raises HostError if it is damaged.
        """
        try:
            document = read_json(self._index)
        except FileNotFoundError:
            return {}
        except PermissionError:
            raise  # another user's store is not damaged
        except (InputError, OSError) as error:
            raise self._damaged_index(_reason(error)) from None
        images = {}
        try:
            for manifest in document.data["manifests"]:
                # Without its name, an image would count as removed.
                name = str(manifest["annotations"][_REF])
                fields = {
                    "digest": manifest["digest"],
                    "media_type": manifest["mediaType"],
                    "size": manifest["size"],
                }
                build_typed(Blob, fields, name)
                images[name] = dict(manifest)
        except InputError as error:
            raise self._damaged_index(error.message) from None
        except (KeyError, TypeError, ValueError):
            raise self._damaged_index("it is not an index of images") from None
        return images

    def _damaged_index(self, reason: str) -> PrimusError:
        return HostError(
            f"the store's index is damaged: {reason}",
            where=self._index,
            hint="primus build --rehash creates it again",
        )

    def names(self, ref: str, manifest: Blob) -> bool:
        """Whether ``ref`` points to the manifest, and the layout is exactly as written here.

        Raises HostError if the index is damaged.
        """
        images = self.images()
        if images.get(ref) != _entry(ref, manifest):
            return False
        return self._is_layout() and files.read_bytes(self._index) == _index_bytes(images)

    def _is_layout(self) -> bool:
        try:
            return files.read_bytes(self.root / "oci-layout") == _LAYOUT
        except (OSError, InputError):
            return False

    def tag(self, ref: str, manifest: Blob) -> None:
        """Let the name ``ref`` point to the manifest."""
        with self.lock("index"):
            if not self.names(ref, manifest):
                images = {**self.images(), ref: _entry(ref, manifest)}
                self._replace(self._index, _index_bytes(images))

    def untag(self, ref: str) -> None:
        """Remove the name ``ref`` from the index."""
        with self.lock("index"):
            images = self.images()
            del images[ref]
            self._replace(self._index, _index_bytes(images))

    def reset_index(self) -> None:
        """Replace a damaged index.

        Every image gets its name back when it is built again, from the same layers.
        """
        with self.lock("index"):
            files.remove_path(self._index)
            self._replace(self._index, _index_bytes({}))

    @property
    def _index(self) -> Path:
        return self.root / "index.json"

    def _replace(self, path: Path, data: bytes) -> None:
        try:
            with self.temporary() as stream:
                stream.write(data)
                stream.flush()
                _move(Path(stream.name), path)
        except OSError as error:
            raise storage_error(error, path) from None

    def _sweep(self) -> None:
        with self.lock("tmp"):
            abandoned = [path for path in (self.root / "tmp").iterdir() if is_unlocked(path)]
        for path in abandoned:
            with contextlib.suppress(OSError):
                files.remove_path(path)


def _move(temporary: Path, place: Path) -> None:
    try:
        temporary.replace(place)
    except IsADirectoryError:
        # Something has created a folder at the file's path.
        files.remove_path(place)
        temporary.replace(place)


def _entry(ref: str, manifest: Blob) -> dict[str, Any]:
    platform = {"architecture": "amd64", "os": "linux"}
    return {**manifest.descriptor, "platform": platform, "annotations": {_REF: ref}}


def _index_bytes(images: Mapping[str, Mapping[str, Any]]) -> bytes:
    manifests = [images[name] for name in sorted(images)]
    return canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": manifests})


def _reason(error: OSError | InputError) -> str:
    if isinstance(error, InputError):
        return error.message
    return files.reason_of(error)


def storage_error(error: OSError, path: Path) -> PrimusError:
    """Return the error for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"the disk that holds {path.parent} is full",
            hint="free space and run it again: finished work is kept",
        )
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return HostError(
            f"{error.filename} is not a folder", hint="remove it, or choose another with --store"
        )
    hint = None
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = (
            "run this as a user who may write there, or choose a folder on another file system "
            "with --store"
        )
    return HostError(f"cannot write {path}: {files.reason_of(error)}", hint=hint)
