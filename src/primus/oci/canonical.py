"""Canonical JSON and its hashes, which keys, manifests and configs use."""

import hashlib
import json


def dumps(data: object) -> bytes:
    """Return canonical JSON: sorted keys, no spaces, UTF-8. The same data gives the same bytes on every machine."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def key_of(data: object) -> str:
    """Return the SHA-256 (64 hex digits) of the canonical JSON of ``data``."""
    return hashlib.sha256(dumps(data)).hexdigest()


def digest_of(blob: bytes) -> str:
    """Return the OCI digest ``sha256:…`` of the bytes."""
    return "sha256:" + hashlib.sha256(blob).hexdigest()
