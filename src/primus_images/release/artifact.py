"""Documents about an image as artifacts of OCI 1.1, whose subject is the image, and the list of
them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from primus_images.oci.store import INDEX_TYPE, MANIFEST_TYPE, Blob, canonical_json

EMPTY = b"{}"


@dataclass(frozen=True, kw_only=True)
class Document:
    """A file to attach to an image."""

    media_type: str
    name: str
    data: bytes


def artifact(document: Document, subject: Mapping[str, Any]) -> bytes:
    """Return the manifest of an artifact that contains ``document``. ``subject`` is the image's
    descriptor.
    """
    layer = Blob.of(document.data, document.media_type).descriptor
    layer["annotations"] = {"org.opencontainers.image.title": document.name}
    about = {key: subject[key] for key in ("mediaType", "digest", "size")}
    return artifact_of(document.media_type, layer, subject=about)


def artifact_of(kind: str, layer: Mapping[str, object], **more: object) -> bytes:
    """Return the manifest of an artifact with one layer, which a descriptor names. Its config is
    :data:`EMPTY`.
    """
    config = Blob.of(EMPTY, "application/vnd.oci.empty.v1+json").descriptor
    content = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": kind,
        "config": config,
    }
    return canonical_json({**content, "layers": [layer], **more})


def listed(index: dict[str, Any] | None, manifest: bytes) -> dict[str, Any]:
    """Return the index of referrers with the artifact added, without duplicates."""
    entry = {
        **Blob.of(manifest, MANIFEST_TYPE).descriptor,
        "artifactType": json.loads(manifest)["artifactType"],
    }
    others = [
        other for other in (index or {}).get("manifests", ()) if other["digest"] != entry["digest"]
    ]
    return {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*others, entry]}


def digest_tag(digest: str) -> str:
    """Return the tag for the referrers of the image ``digest`` in a registry without the referrers
    API.
    """
    return digest.replace(":", "-")
