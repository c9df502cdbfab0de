"""Documents beside an image in a registry: OCI 1.1 artifacts that name the image as their subject.

https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md#listing-referrers. A registry that keeps no
list of referrers (distribution 2) gets it as an index under the tag ``sha256-<digest>``, as the specification says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from primus.oci import canonical
from primus.oci.store import MANIFEST_TYPE
from primus.release.distribution import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from requests import Response

__all__ = ["Document", "Repository", "artifact", "digest_tag", "listed"]

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_EMPTY = b"{}"


@dataclass(frozen=True, kw_only=True)
class Document:
    """A file to lay beside an image: its media type says what it is."""

    media_type: str
    name: str
    data: bytes


def artifact(document: Document, subject: dict[str, Any]) -> bytes:
    """The manifest of an artifact that holds ``document`` and speaks of ``subject`` (a descriptor)."""
    data = document.data
    return canonical.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": document.media_type,
            "config": {"mediaType": _EMPTY_TYPE, "digest": canonical.digest_of(_EMPTY), "size": len(_EMPTY)},
            "layers": [
                {
                    "mediaType": document.media_type,
                    "digest": canonical.digest_of(data),
                    "size": len(data),
                    "annotations": {"org.opencontainers.image.title": document.name},
                }
            ],
            "subject": {key: subject[key] for key in ("mediaType", "digest", "size")},
        }
    )


def listed(index: dict[str, Any] | None, manifest: bytes) -> dict[str, Any]:
    """The index of referrers with the artifact in it, once."""
    entry = {
        "mediaType": MANIFEST_TYPE,
        "digest": canonical.digest_of(manifest),
        "size": len(manifest),
        "artifactType": json.loads(manifest)["artifactType"],
    }
    others = [m for m in (index or {}).get("manifests", ()) if m["digest"] != entry["digest"]]
    return {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*others, entry]}


class Repository:
    """One repository of a registry (``host[:port]/path``) as images and documents are kept in it.

    Every method raises HostError, a sentence, when the registry refuses or does not answer.
    """

    def __init__(self, name: str) -> None:
        self._registry = Registry(name)

    def digest(self, reference: str) -> str | None:
        """The digest of the manifest that a tag or digest names; None when there is none."""
        answer = self._registry.ask(
            "HEAD", f"manifests/{reference}", headers={"Accept": f"{MANIFEST_TYPE}, {INDEX_TYPE}"}, absent=True
        )
        return None if answer.status_code == 404 else answer.headers["Docker-Content-Digest"]

    def has_blob(self, digest: str) -> bool:
        """Whether the repository has the blob."""
        return self._registry.ask("HEAD", f"blobs/{digest}", absent=True).status_code != 404

    def tag(self, tag: str, manifest: bytes) -> None:
        """Let ``tag`` name the manifest, whose blobs are there."""
        self._put(tag, manifest, MANIFEST_TYPE)

    def attach(self, documents: Sequence[Document], subject: dict[str, Any]) -> list[str]:
        """Lay ``documents`` beside the image ``subject``; the artifacts' digests. What is there is not sent again."""
        about = str(subject["digest"])
        there = {one["digest"] for one in self.referrers(about)}
        made = [(document, artifact(document, subject)) for document in documents]
        unlisted = []
        for document, manifest in made:
            digest = canonical.digest_of(manifest)
            if digest not in there:
                self._blob(_EMPTY)
                self._blob(document.data)
                if "OCI-Subject" not in self._put(digest, manifest, MANIFEST_TYPE).headers:
                    unlisted.append(manifest)
        if unlisted:
            # This registry keeps no list of referrers, so the one who pushes does.
            index = self._index(f"manifests/{digest_tag(about)}")
            for manifest in unlisted:
                index = listed(index, manifest)
            self._put(digest_tag(about), canonical.dumps(index), INDEX_TYPE)
        return [canonical.digest_of(manifest) for _, manifest in made]

    def referrers(self, digest: str) -> list[dict[str, Any]]:
        """Descriptors of the artifacts that speak of the image ``digest``."""
        index = self._index(f"referrers/{digest}")
        if index is None:
            index = self._index(f"manifests/{digest_tag(digest)}")
        return list((index or {}).get("manifests", ()))

    def _index(self, path: str) -> dict[str, Any] | None:
        answer = self._registry.ask("GET", path, headers={"Accept": INDEX_TYPE}, absent=True)
        if answer.status_code == 404:
            return None
        index: dict[str, Any] = answer.json()
        return index

    def _blob(self, data: bytes) -> None:
        digest = canonical.digest_of(data)
        if self.has_blob(digest):
            return
        begun = self._registry.ask("POST", "blobs/uploads/")
        place = urljoin(begun.url, begun.headers["Location"])
        headers = {"Content-Type": "application/octet-stream"}
        self._registry.ask("PUT", place, params={"digest": digest}, data=data, headers=headers)

    def _put(self, reference: str, data: bytes, media_type: str) -> Response:
        return self._registry.ask("PUT", f"manifests/{reference}", data=data, headers={"Content-Type": media_type})


def digest_tag(digest: str) -> str:
    """The tag under which what belongs to the image ``digest`` is kept, where only tags can say so."""
    return digest.replace(":", "-")
