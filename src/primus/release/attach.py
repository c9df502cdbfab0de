"""Attaching documents to an image in a registry, as OCI 1.1 artifacts whose subject is the image.

https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md#listing-referrers. For a registry without the
referrers API (distribution 2), the list is an index under the tag ``sha256-<digest>``, as the specification requires.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from primus.errors import HostError
from primus.oci import canonical
from primus.oci.store import MANIFEST_TYPE
from primus.release.distribution import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from requests import Response

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_EMPTY = b"{}"
# Another publish, or a registry that copies between its servers, may lose an entry.
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Document:
    """A file to attach to an image."""

    media_type: str
    name: str
    data: bytes


def artifact(document: Document, subject: dict[str, Any]) -> bytes:
    """Return the manifest of an artifact that contains ``document``. ``subject`` is the image's descriptor."""
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
    """Return the index of referrers with the artifact added, without duplicates."""
    entry = {
        "mediaType": MANIFEST_TYPE,
        "digest": canonical.digest_of(manifest),
        "size": len(manifest),
        "artifactType": json.loads(manifest)["artifactType"],
    }
    others = [m for m in (index or {}).get("manifests", ()) if m["digest"] != entry["digest"]]
    return {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*others, entry]}


class Repository:
    """The images and documents in one repository of a registry (``host[:port]/path``).

    Every method raises HostError if the registry refuses the request or does not answer.
    """

    def __init__(self, name: str) -> None:
        self._registry = Registry(name)

    def digest(self, reference: str) -> str | None:
        """Return the digest of the manifest that a tag or digest names, or None."""
        answer = self._registry.request(
            "HEAD", f"manifests/{reference}", headers={"Accept": f"{MANIFEST_TYPE}, {INDEX_TYPE}"}, absent=True
        )
        if answer.status_code == 404:
            return None
        if digest := answer.headers.get("Docker-Content-Digest"):
            return digest
        # The header is optional. Without it, the manifest itself tells.
        answer = self._registry.request(
            "GET", f"manifests/{reference}", headers={"Accept": f"{MANIFEST_TYPE}, {INDEX_TYPE}"}
        )
        if "schemaVersion" not in self._registry.json(answer):
            raise self._registry.odd(f"manifests/{reference} is not a manifest")
        return canonical.digest_of(answer.content)

    def has_blob(self, digest: str) -> bool:
        """Whether the repository has the blob."""
        return self._registry.request("HEAD", f"blobs/{digest}", absent=True).status_code != 404

    def tag(self, tag: str, manifest: bytes) -> None:
        """Set ``tag`` to the manifest, whose blobs must already be in the repository."""
        self._put(tag, manifest, MANIFEST_TYPE)

    def attach(self, documents: Sequence[Document], subject: dict[str, Any]) -> list[str]:
        """Attach ``documents`` to the image ``subject``, unless they already are. Returns the artifacts' digests.

        Raises HostError if the registry does not list them afterwards.
        """
        about = str(subject["digest"])
        made = [(document, artifact(document, subject)) for document in documents]
        digests = [canonical.digest_of(manifest) for _, manifest in made]
        for number in range(_TRIES + 1):
            there = {one["digest"] for one in self.referrers(about)}
            absent = [one for one, digest in zip(made, digests, strict=True) if digest not in there]
            if not absent:
                return digests
            if number == _TRIES:
                break
            time.sleep(number * 0.5)
            self._add(absent, about)
        raise HostError(
            f"{self._registry.name} accepts documents for {about}, but does not list them", hint="run the command again"
        )

    def _add(self, made: Sequence[tuple[Document, bytes]], about: str) -> None:
        unlisted = []
        for document, manifest in made:
            self._blob(_EMPTY)
            self._blob(document.data)
            if "OCI-Subject" not in self._put(canonical.digest_of(manifest), manifest, MANIFEST_TYPE).headers:
                unlisted.append(manifest)
        if unlisted:
            # This registry has no referrers API, so the client maintains the list. Another one may do so now, too.
            index = self._index(f"manifests/{digest_tag(about)}")
            for manifest in unlisted:
                index = listed(index, manifest)
            self._put(digest_tag(about), canonical.dumps(index), INDEX_TYPE)

    def referrers(self, digest: str) -> list[dict[str, Any]]:
        """Return the descriptors of the artifacts attached to the image ``digest``."""
        index = self._index(f"referrers/{digest}")
        if index is None:
            index = self._index(f"manifests/{digest_tag(digest)}")
        return list((index or {}).get("manifests", ()))

    def _index(self, path: str) -> dict[str, Any] | None:
        answer = self._registry.request("GET", path, headers={"Accept": INDEX_TYPE}, absent=True)
        if answer.status_code == 404:
            return None
        index = self._registry.json(answer)
        manifests = index.get("manifests")
        if not isinstance(manifests, list) or not all(isinstance(m, dict) and "digest" in m for m in manifests):
            raise self._registry.odd(f"{path} is not a list of manifests")
        return index

    def _blob(self, data: bytes) -> None:
        digest = canonical.digest_of(data)
        if self.has_blob(digest):
            return
        begun = self._registry.request("POST", "blobs/uploads/")
        if "Location" not in begun.headers:
            raise self._registry.odd("blobs/uploads/ names no address for the upload")
        place = urljoin(begun.url, begun.headers["Location"])
        headers = {"Content-Type": "application/octet-stream"}
        self._registry.request("PUT", place, params={"digest": digest}, data=data, headers=headers)

    def _put(self, reference: str, data: bytes, media_type: str) -> Response:
        return self._registry.request("PUT", f"manifests/{reference}", data=data, headers={"Content-Type": media_type})


def digest_tag(digest: str) -> str:
    """Return the tag for the referrers of the image ``digest`` in a registry without the referrers API."""
    return digest.replace(":", "-")
