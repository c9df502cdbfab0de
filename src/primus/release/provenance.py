"""How an image came about, as an in-toto statement with SLSA's predicate (https://slsa.dev/spec/v1.0/provenance).

It names the commit, every file that entered and every layer's key. No clock and no machine is in it, so whoever builds
the commit again can write the same statement, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus import __version__
from primus.release.purl import purl
from primus.versions.lock import Lock

__all__ = ["BUILD_TYPE", "PREDICATE", "statement"]

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
    """The statement about the manifest ``digest``.

    ``commit`` is the repository's, None where it is not known; ``layers`` maps each layer's name to the key of the
    action that made it: a hash of all that can affect its bytes.
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
