"""The provenance of an image, as an in-toto statement with SLSA's predicate (https://slsa.dev/spec/v1.0/provenance).

It contains the commit, every input file and the key of every layer. It contains neither times nor host names, so a
rebuild of the commit gives the same statement, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus import __version__
from primus.release.purl import purl
from primus.versions.lock import Lock

PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:primus-images:build:1"


def statement(
    lock: Lock | None,
    *,
    ref: str,
    digest: str,
    release: str,
    target: str,
    channel: str,
    commit: str | None,
    layers: Mapping[str, str],
) -> dict[str, Any]:
    """Return the statement about the manifest ``digest``.

    ``commit`` is that of the repository, or None if unknown. ``layers`` maps each layer's name to the key of its
    action, which is a hash of everything that can affect the layer's bytes.
    """
    source = [{"name": "source", "digest": {"gitCommit": commit}}] if commit else []
    files = [{"uri": purl(file), "digest": {"sha256": file.sha256}} for file in (lock.files if lock else ())]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": ref, "digest": {"sha256": digest.removeprefix("sha256:")}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"release": release, "target": target, "channel": channel},
                "internalParameters": {"layers": dict(layers)},
                "resolvedDependencies": [*source, *files],
            },
            "runDetails": {"builder": {"id": "urn:primus-images:builder", "version": {"primus-images": __version__}}},
        },
    }
