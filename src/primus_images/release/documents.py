"""The documents about an image: bills of materials, provenance, lock, and findings of the gates.

They depend only on the image, its lock and the commit, and contain neither times nor host names, so
a rebuild of the commit gives the same documents, byte for byte.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from primus_images import __version__
from primus_images.gates.check import Outcome
from primus_images.gates.examined import LayerFacts
from primus_images.oci.store import canonical_json, digest_of
from primus_images.plan.action import Composed
from primus_images.release.artifact import Document
from primus_images.release.bills import contents, cyclonedx, purl, spdx
from primus_images.release.git import Checkout
from primus_images.release.licences import licences

GATES = "application/vnd.primus.gates.v1+json"
LOCK = "application/vnd.primus.lock.v1+json"
SPDX = "application/spdx+json"
CYCLONEDX = "application/vnd.cyclonedx+json"
STATEMENT = "https://in-toto.io/Statement/v1"
IN_TOTO = "application/vnd.in-toto+json"
VALIDATION = "application/vnd.primus.validation.v1+json"


def documents(
    image: Composed, outcome: Outcome, facts: Mapping[str, LayerFacts], source: Checkout
) -> tuple[Document, ...]:
    """Return the documents about the image. Its provenance names the others' hashes.

    ``facts`` are those of its layers, and ``source`` is the repository that it was built from.
    """
    resolved = image.plan.resolved
    files = [_json(GATES, "gates.json", outcome.as_json())]
    if resolved.lock:
        stated = [item for layer in facts.values() for item in layer.stated]
        inside = contents(image, source, licences(facts), stated)
        lock = resolved.lock_path.read_bytes()
        files += [
            Document(media_type=LOCK, name="lock.json", data=lock),
            _json(SPDX, "sbom.spdx.json", spdx(inside)),
            _json(CYCLONEDX, "sbom.cdx.json", cyclonedx(inside)),
        ]
    commit = None if source.edited else source.commit
    return (*files, _json(IN_TOTO, "provenance.json", provenance(image, commit, files)))


def _json(media_type: str, name: str, content: Any) -> Document:
    return Document(media_type=media_type, name=name, data=canonical_json(content))


def provenance(image: Composed, commit: str | None, others: Sequence[Document]) -> dict[str, Any]:
    """Return the provenance of the image: an in-toto statement with SLSA's predicate.

    ``commit`` is that of the repository, or None if unknown. ``others`` are the other documents
    about the image. The key of a layer's action is a hash of everything that can affect the layer's
    bytes. See https://slsa.dev/spec/v1.0/provenance.
    """
    resolved = image.plan.resolved
    dependencies: list[dict[str, Any]] = []
    if commit:
        dependencies.append({"name": "source", "digest": {"gitCommit": commit}})
    if resolved.lock:
        for file in resolved.lock.files:
            dependencies.append(
                {"uri": purl(file, resolved.system), "digest": {"sha256": file.sha256}}
            )
    products = []
    for other in others:
        digest = digest_of(other.data).removeprefix("sha256:")
        products.append({"name": other.name, "digest": {"sha256": digest}})
    definition = {
        "buildType": "urn:primus-images:build:1",
        "externalParameters": {
            "release": resolved.versions.release,
            "supported_until": resolved.versions.supported_until,
            "target": resolved.name,
            "channel": resolved.choice.channel,
            "preview": resolved.choice.preview or "",
            "gpu": resolved.gpu.name if resolved.gpu else None,
            "recipes": list(resolved.target.recipes),
            "components": resolved.trained_with,
        },
        "internalParameters": {
            "layers": {action.name: action.key for action in image.plan.layers},
        },
        "resolvedDependencies": dependencies,
    }
    details = {
        "builder": {"id": "urn:primus-images:builder", "version": {"primus-images": __version__}},
        "byproducts": products,
    }
    predicate = {"buildDefinition": definition, "runDetails": details}
    return statement(resolved.ref, image.digest, "https://slsa.dev/provenance/v1", predicate)


def statement(name: str, digest: str, kind: str, predicate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the in-toto statement of the type ``kind`` about the artifact ``digest``."""
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}],
        "predicateType": kind,
        "predicate": predicate,
    }
