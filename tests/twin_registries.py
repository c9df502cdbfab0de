"""How registries of images answer."""

from __future__ import annotations

import gzip
import hashlib
import json
from typing import Any

from source_twins import HUB, OCI, TOKEN, Answer, Behaviour, Part, Twins, hangs

LAYER = gzip.compress(b"layer", mtime=0)
_OCI = "application/vnd.oci.image."


def image(name: str) -> dict[str, bytes]:
    """The blobs of an image by digest; ``top`` is what the pin names."""

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        blobs[hashlib.sha256(data).hexdigest()] = data
        return {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}

    blobs: dict[str, bytes] = {}
    platform = {"os": "linux", "architecture": "arm64" if name == "platform-missing" else "amd64"}
    config = blob(
        json.dumps({**platform, "rootfs": {"type": "layers", "diff_ids": []}}).encode(), f"{_OCI}config.v1+json"
    )
    layers = [blob(LAYER, f"{_OCI}layer.v1.tar+{'zstd' if name == 'layer-zstd' else 'gzip'}")]
    manifest = {"schemaVersion": 2, "mediaType": f"{_OCI}manifest.v1+json", "config": config, "layers": layers}
    top = json.dumps(manifest).encode()
    if name == "schema-1":
        top = json.dumps({"schemaVersion": 1, "name": "x", "fsLayers": [{"blobSum": "sha256:" + "0" * 64}]}).encode()
    elif name != "one-manifest":
        entry = {**blob(top, f"{_OCI}manifest.v1+json"), "platform": platform}
        listed = {"schemaVersion": 2, "mediaType": f"{_OCI}index.v1+json", "manifests": [entry]}
        top = json.dumps(listed).encode()
    blobs[hashlib.sha256(top).hexdigest()] = top
    return {**blobs, "top": top}


def registry(manifest: Part | None = None, blob: Part | None = None) -> Part:
    """A registry that wants a token and has one image."""

    def answer(one: Answer, rest: str) -> None:
        if "Authorization" not in one.headers and not rest.startswith("store/"):
            return one.challenge()
        kind, _, digest = rest.removeprefix("x/").partition("/sha256:")
        if kind == "manifests" and manifest:
            return manifest(one, digest)
        if kind == "blobs" and blob:
            return blob(one, digest)
        return given(one, digest)

    return answer


def given(one: Answer, digest: str) -> None:
    data = image(one.name).get(digest)
    if data is None:
        body = b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}'
        return one.reply(404, body, Content_Type="application/json")
    kind = (
        json.loads(data).get("mediaType", "application/octet-stream")
        if data[:1] == b"{"
        else "application/octet-stream"
    )
    if one.name == "schema-1":
        kind = "application/vnd.docker.distribution.manifest.v1+json"
    return one.reply(200, data, Content_Type=kind, Docker_Content_Digest=f"sha256:{digest}")


def expires(one: Answer, digest: str) -> None:
    """The first token is good for the first request alone."""
    if one.nth() == 1:
        return one.challenge()
    return given(one, digest)


def limited(one: Answer, _: str) -> None:
    body = b'{"errors": [{"code": "TOOMANYREQUESTS", "message": "You have reached your pull rate limit."}]}'
    one.reply(429, body, Content_Type="application/json", Retry_After="60", RateLimit_Remaining="0;w=21600")


def elsewhere(one: Answer, digest: str) -> None:
    one.reply(307, Location=f"http://localhost:{one.twins.port}/{one.name}/store/sha256:{digest}")


def blob_without_token(here: Twins, _: Any) -> bool:
    stored = [headers for _, rest, headers in here.seen["blob-elsewhere"] if rest.startswith("store/")]
    return bool(stored) and not any("Authorization" in headers for headers in stored)


def from_store(one: Answer, rest: str) -> None:
    if rest.startswith("store/sha256:"):
        return given(one, rest.removeprefix("store/sha256:"))
    return registry(blob=elsewhere)(one, rest)


REGISTRIES = (
    Behaviour(
        name="token-flow", source=TOKEN, answer=registry(), way="image", check=lambda here, _: bool(here.seen["token"])
    ),
    Behaviour(name="token-expires", source=TOKEN, answer=registry(manifest=expires), way="image"),
    Behaviour(
        name="manifest-list",
        source="https://github.com/opencontainers/image-spec/blob/main/image-index.md",
        answer=registry(),
        way="image",
    ),
    Behaviour(
        name="one-manifest",
        source="https://github.com/opencontainers/image-spec/blob/main/manifest.md",
        answer=registry(),
        way="image",
    ),
    Behaviour(
        name="platform-missing",
        source="https://github.com/opencontainers/image-spec/blob/main/image-index.md",
        answer=registry(),
        way="image",
        says="has no image for linux/amd64",
    ),
    Behaviour(
        name="layer-zstd",
        source="https://github.com/opencontainers/image-spec/blob/main/layer.md",
        answer=registry(),
        way="image",
        says="only gzip layers|has a layer of type",
    ),
    Behaviour(
        name="schema-1",
        source="https://docs.docker.com/engine/deprecated/#pushing-and-pulling-with-image-manifest-v2-schema-1",
        answer=registry(),
        way="image",
        says="is not an image with layers, but schema 1",
    ),
    Behaviour(
        name="other-manifest",
        source=f"{OCI}#pulling-manifests",
        answer=registry(
            manifest=lambda one, _: one.reply(200, image("token-flow")["top"], Content_Type=f"{_OCI}index.v1+json")
        ),
        way="image",
        says="different bytes|does not match",
    ),
    Behaviour(
        name="manifest-unknown",
        source=f"{OCI}#error-codes",
        answer=registry(manifest=lambda one, _: given(one, "")),
        way="image",
        says="it has no such image",
    ),
    Behaviour(
        name="rate-limit", source=HUB, answer=registry(manifest=limited), way="image", says="its rate limit is reached"
    ),
    Behaviour(
        name="head-refused",
        source=f"{OCI}#checking-if-content-exists-in-the-registry",
        answer=lambda one, rest: one.reply(405) if one.command == "HEAD" else registry()(one, rest),
        way="image",
    ),
    Behaviour(
        name="blob-elsewhere", source=f"{OCI}#pulling-blobs", answer=from_store, way="image", check=blob_without_token
    ),
    Behaviour(
        name="registry-silent", source=HUB, answer=registry(manifest=hangs), way="image", says="no answer in time"
    ),
    Behaviour(
        name="access-refused",
        source=f"{OCI}#error-codes",
        answer=registry(
            manifest=lambda one, _: one.reply(
                403,
                b'{"errors": [{"code": "DENIED", "message": "requested access to the resource is denied"}]}',
                Content_Type="application/json",
            )
        ),
        way="image",
        says="it wants credentials",
    ),
)
