"""Documents about an image as artifacts of OCI 1.1, whose subject is the image."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from primus_images.errors import InputError, PrimusError
from primus_images.oci.store import INDEX_TYPE, MANIFEST_TYPE, Blob, canonical_json

EMPTY = b"{}"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
# The annotation by which cosign, too, names the predicate type of a bundle's statement.
_PREDICATE = "dev.sigstore.bundle.predicateType"
# What follows a tag in the tag by which a publisher announces that it will set it.
ANNOUNCED = ".by-"
WITHDRAWAL = "urn:primus-images:withdrawal:1"
# What reading a damaged document may raise: anything can be in it.
DAMAGED = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RecursionError,
    InputError,
)
_FORMATS = (
    "application/spdx+json",
    "application/vnd.cyclonedx+json",
    "application/vnd.in-toto+json",
)
# The types of our documents and statements begin so. Other programs attach artifacts of others.
_OURS = ("application/vnd.primus.", "application/vnd.dev.sigstore.bundle", *_FORMATS)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A file to attach to an image. ``predicate`` is the type of a signed statement's predicate."""

    media_type: str
    name: str
    data: bytes
    predicate: str = ""


def artifact(document: Document, subject: Mapping[str, Any]) -> bytes:
    """Return the manifest of an artifact that contains ``document``.

    ``subject`` is the image's descriptor. The config is :data:`EMPTY`.
    """
    layer: dict[str, Any] = dict(Blob.of(document.data, document.media_type).descriptor)
    layer["annotations"] = {"org.opencontainers.image.title": document.name}
    content: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": document.media_type,
        "config": Blob.of(EMPTY, EMPTY_TYPE).descriptor,
        "layers": [layer],
        "subject": {key: subject[key] for key in ("mediaType", "digest", "size")},
    }
    if document.predicate:
        content["annotations"] = {_PREDICATE: document.predicate}
    return canonical_json(content)


def predicate_of(content: Mapping[str, Any]) -> str:
    """Return the predicate type that a manifest, or its entry in a list, states; empty without."""
    annotations = content.get("annotations")
    if not isinstance(annotations, dict):
        return ""
    return str(annotations.get(_PREDICATE, ""))


def is_foreign(entry: Mapping[str, Any]) -> bool:
    """Whether a list states a type that no document of ours has, such as a scanner's report.

    Nothing of ours is compared with it, so that it may also be lost.
    """
    kind = entry.get("artifactType")
    return isinstance(kind, str) and kind not in ("", EMPTY_TYPE) and not kind.startswith(_OURS)


def listed(entries: Sequence[Mapping[str, Any]], manifests: Sequence[bytes]) -> bytes:
    """Return the index of referrers with ``entries`` and then the artifacts, each once."""
    by_digest = {entry["digest"]: entry for entry in entries}
    for manifest in manifests:
        descriptor = Blob.of(manifest, MANIFEST_TYPE).descriptor
        content = json.loads(manifest)
        entry = {**descriptor, "artifactType": content["artifactType"]}
        if "annotations" in content:
            entry["annotations"] = content["annotations"]
        by_digest.pop(descriptor["digest"], None)
        by_digest[descriptor["digest"]] = entry
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*by_digest.values()]}
    return canonical_json(index)


def damage(error: Exception) -> str:
    """Return what is wrong with a document of which reading raised ``error``, without code's words.

    ``error`` is one of :data:`DAMAGED`.
    """
    if isinstance(error, PrimusError):
        return error.message
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing in it"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
        return "it is not JSON"
    return "its parts are not those of such a document"


def digest_tag(digest: str) -> str:
    """Return the tag of the list of referrers in a registry without the referrers API."""
    return digest.replace(":", "-")
