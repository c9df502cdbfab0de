"""The store: one OCI image layout, plus the records of the actions that made its blobs.

Layout: ``oci-layout``, ``index.json``, ``blobs/sha256/*`` as the OCI image-layout specification has them;
``actions/<key>.json`` one record per finished action; ``targets/<target>.json`` what was last built; ``locks/`` and
``tmp/`` for work under way. A blob appears by rename when it is whole, a record only after its blobs, so an
interrupt at any moment leaves a valid store. A name is no check: bytes that ship are hashed again
(GHSA-3fqg-8hpf-5682), see :meth:`Store.check`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from primus.errors import HostError
from primus.images import canonical
from primus.images.left_out import NOTHING, LeftOut

__all__ = ["Blob", "Layer", "Store"]

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPES = {
    "zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
    "gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
}
_REF = "org.opencontainers.image.ref.name"


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A blob of the store: OCI digest, media type, size in bytes."""

    digest: str
    media_type: str
    size: int

    @property
    def descriptor(self) -> dict[str, object]:
        """The OCI descriptor."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What an action made: the blob, the digest of the tar inside it, the tar's size, the paths, the seconds.

    ``left_out`` is what stayed out of it, since it is for other GPUs.
    """

    blob: Blob
    diff_id: str
    unpacked: int
    paths: str
    seconds: float
    left_out: LeftOut = NOTHING


class Store:
    """One OCI image layout on disk, safe for several builders at once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Make the layout if it is not there; clear away what dead builders left."""
        try:
            for folder in ("blobs/sha256", "actions", "targets", "locks", "tmp"):
                (self.root / folder).mkdir(parents=True, exist_ok=True)
            if not (self.root / "oci-layout").exists():
                self._replace(self.root / "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
                with self.lock("index"):
                    if not (self.root / "index.json").exists():
                        self._write_index([])
        except OSError as error:
            raise storage_error(error, self.root) from None
        self._sweep()

    def blob_path(self, digest: str) -> Path:
        """Where the blob with this digest lies or would lie."""
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def has(self, blob: Blob) -> bool:
        """Whether the blob is there with its full size (its bytes are not read)."""
        try:
            return self.blob_path(blob.digest).stat().st_size == blob.size
        except OSError:
            return False

    def check(self, digest: str) -> str | None:
        """Read the blob and hash it: None when sound, else one sentence saying what is wrong."""
        try:
            with self.blob_path(digest).open("rb") as stream:
                seen = hashlib.file_digest(stream, "sha256")
        except OSError as error:
            return f"blob {digest} cannot be read: {error.strerror}"
        if f"sha256:{seen.hexdigest()}" != digest:
            return f"blob {digest} is damaged: its bytes hash to sha256:{seen.hexdigest()}"
        return None

    def discard(self, digest: str) -> None:
        """Take a damaged blob out of the layout."""
        self.blob_path(digest).unlink(missing_ok=True)

    def put(self, data: bytes, media_type: str) -> Blob:
        """Store small bytes (a config, a manifest) as a blob."""
        blob = Blob(digest=canonical.digest_of(data), media_type=media_type, size=len(data))
        if not self.has(blob):
            self._replace(self.blob_path(blob.digest), data)
        return blob

    def adopt(self, temporary: Path, blob: Blob) -> None:
        """Move a finished temporary file of :meth:`temporary` into place."""
        temporary.replace(self.blob_path(blob.digest))

    @contextlib.contextmanager
    def temporary(self) -> Iterator[IO[bytes]]:
        """A file under ``tmp/`` held by a lock while this process lives; gone afterwards unless adopted."""
        # Under the sweepers' lock: between its making and its locking a file looks like one whose owner died.
        with self.lock("tmp"):
            stream = tempfile.NamedTemporaryFile(dir=self.root / "tmp", prefix="blob-", delete=False)  # noqa: SIM115
            fcntl.flock(stream, fcntl.LOCK_EX)
        path = Path(stream.name)
        try:
            with stream:
                path.chmod(0o644)
                yield stream
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def folder(self, prefix: str) -> Iterator[Path]:
        """A scratch folder under ``tmp/``, removed afterwards; swept by a later run if this process is killed."""
        with self.lock("tmp"):
            path = Path(tempfile.mkdtemp(dir=self.root / "tmp", prefix=f"{prefix}-"))
            keep = os.open(path, os.O_RDONLY)
            fcntl.flock(keep, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(keep)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold ``locks/<name>``: a second builder of the same thing waits here. The kernel frees it on any death."""
        handle = os.open(self.root / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    # Records

    def layer(self, key: str) -> Layer | None:
        """The layer an action made, or None when it was not run, its blob is missing or cut short, or its list of
        paths is missing.
        """
        record = self.record("actions", key)
        if record is None or "layer" not in record:
            return None
        fields = dict(record["layer"])
        left_out = LeftOut.of(fields.get("left_out", ()))
        layer = Layer(**{**fields, "blob": Blob(**fields["blob"]), "left_out": left_out})
        return layer if self.has(layer.blob) and self.blob_path(layer.paths).exists() else None

    def save_layer(self, key: str, layer: Layer, about: dict[str, object]) -> None:
        """Record that the action ``key`` made ``layer``; its blob is in place already."""
        self.save("actions", key, {**about, "layer": asdict(layer)})

    def record(self, room: str, name: str) -> dict[str, Any] | None:
        """A JSON record of ``actions`` or ``targets``; None when absent or unreadable (it is then made again)."""
        try:
            data = json.loads((self.root / room / f"{name}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return data if isinstance(data, dict) else None

    def save(self, room: str, name: str, record: dict[str, Any]) -> None:
        """Write a record, whole or not at all."""
        self._replace(self.root / room / f"{name}.json", canonical.dumps(record))

    # Index

    def images(self) -> dict[str, dict[str, Any]]:
        """Reference name → manifest descriptor, as index.json has them."""
        try:
            index = json.loads((self.root / "index.json").read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError:
            raise HostError(
                "the store's index.json is not JSON", where=str(self.root), hint="remove that file and build again"
            ) from None
        return {m["annotations"][_REF]: m for m in index["manifests"] if _REF in m.get("annotations", {})}

    def tag(self, ref: str, manifest: Blob, platform: dict[str, str]) -> None:
        """Let ``ref`` name the manifest."""
        with self.lock("index"):
            images = self.images()
            entry = {**manifest.descriptor, "platform": platform, "annotations": {_REF: ref}}
            if images.get(ref) != entry:
                images[ref] = entry
                self._write_index([images[name] for name in sorted(images)])

    def _write_index(self, manifests: list[dict[str, Any]]) -> None:
        index = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": manifests,
        }
        self._replace(self.root / "index.json", canonical.dumps(index))

    def _replace(self, path: Path, data: bytes) -> None:
        try:
            with self.temporary() as stream:
                stream.write(data)
                stream.flush()
                Path(stream.name).replace(path)
        except OSError as error:
            raise storage_error(error, path) from None

    def _sweep(self) -> None:
        """Remove what killed builders left in ``tmp/``: whatever nobody holds a lock on any more."""
        with self.lock("tmp"):
            left = [path for path in (self.root / "tmp").iterdir() if self._is_left(path)]
        for path in left:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    @staticmethod
    def _is_left(path: Path) -> bool:
        """Whether nobody holds the path any more; its owner took a lock as it made it."""
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True


def storage_error(error: OSError, path: Path) -> HostError:
    """The sentence for a write that failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HostError(
            f"the disk that holds {path.parent} is full",
            hint="free space and run it again: finished work is kept",
        )
    return HostError(f"cannot write {path}: {error.strerror}", hint="check the folder's permissions")
