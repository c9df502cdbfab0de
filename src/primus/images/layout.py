"""Find an image in an OCI image layout, the form in which the store keeps images."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus.errors import HostError, InputError

__all__ = ["OciImage", "OciLayer", "find_image", "image_refs", "open_image"]

REF_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True, kw_only=True)
class OciLayer:
    """One layer's descriptor, with the digest of its uncompressed tar."""

    digest: str
    diff_id: str
    size: int
    media_type: str


@dataclass(frozen=True, kw_only=True)
class OciImage:
    """An image with its exact manifest and config bytes; ``layers`` go bottom first."""

    ref: str
    digest: str
    manifest_bytes: bytes
    config: Mapping[str, Any]
    config_bytes: bytes
    layers: tuple[OciLayer, ...]
    store: Path

    def blob(self, digest: str) -> Path:
        """The file of a blob."""
        return blob_path(self.store, digest)


def blob_path(store: Path, digest: str) -> Path:
    """Where the layout at ``store`` keeps the blob ``digest``."""
    algorithm, _, value = digest.partition(":")
    return store / "blobs" / algorithm / value


def _index(store: Path) -> list[dict[str, Any]]:
    path = store / "index.json"
    try:
        found = json.loads(path.read_bytes())
        return [entry for entry in found["manifests"] if REF_NAME in (entry.get("annotations") or {})]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise HostError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no OCI image index: {error}", hint="delete the store and build again") from error


def image_refs(store: Path) -> list[str]:
    """The names of the images in the layout, in its own order (latest last)."""
    return [str(entry["annotations"][REF_NAME]) for entry in _index(store)]


def find_image(store: Path, target: str, release: str | None = None) -> OciImage:
    """The image of ``target``: that of ``release`` when there is one, else the latest.

    Raises InputError that names the images there are when ``target`` has none.
    """
    refs = image_refs(store)
    wanted = [ref for ref in refs if ref == target or ref.endswith(f"-{target}")]
    exact = [ref for ref in wanted if release and ref == f"{release}-{target}"]
    if wanted:
        return open_image(store, (exact or wanted)[-1])
    there = f"there are {', '.join(sorted(set(refs)))}" if refs else "there are none yet"
    raise InputError(f"no image {target!r} in {store}; {there}", hint=f"primus build {target}")


def open_image(store: Path, ref: str) -> OciImage:
    """Read the image called ``ref``. InputError for an unknown or broken one, HostError when unreadable."""
    entry = next((e for e in reversed(_index(store)) if e["annotations"][REF_NAME] == ref), None)
    if entry is None:
        raise InputError(f"no image {ref!r} in {store}", hint=f"there are {', '.join(image_refs(store)) or 'none'}")
    digest = str(entry["digest"])
    try:
        manifest_bytes = _verified(store, digest)
        manifest = json.loads(manifest_bytes)
        config_bytes = _verified(store, str(manifest["config"]["digest"]))
        config = json.loads(config_bytes)
        layers = tuple(
            OciLayer(
                digest=str(layer["digest"]),
                diff_id=str(diff_id),
                size=int(layer["size"]),
                media_type=str(layer["mediaType"]),
            )
            for layer, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"image {ref} in {store} is malformed: {error}", hint="build it again") from error
    return OciImage(
        ref=ref,
        digest=digest,
        manifest_bytes=manifest_bytes,
        config=config,
        config_bytes=config_bytes,
        layers=layers,
        store=store,
    )


def _verified(store: Path, digest: str) -> bytes:
    import hashlib

    path = blob_path(store, digest)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise HostError(f"blob {digest} cannot be read: {error.strerror} ({path})", hint="build it again") from error
    found = "sha256:" + hashlib.sha256(data).hexdigest()
    if found != digest:
        raise HostError(
            f"blob {digest} is damaged: its bytes hash to {found} ({path})", hint="delete it and build again"
        )
    return data
