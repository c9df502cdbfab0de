"""A registry in memory: what requests are answered, without a socket."""

import json
import re
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter

from primus_images.oci.store import INDEX_TYPE, digest_of

NAME = "localhost:1/rocm/demo"


class MemoryRegistry:
    """One repository, with the referrers API if ``api``. ``lost`` are digests that it denies."""

    def __init__(self, *, api: bool = True) -> None:
        self.api = api
        self.manifests: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        self.blobs: dict[str, bytes] = {}
        self.lost: set[str] = set()
        self.asked: list[str] = []
        # Paths that it refuses to take, by their beginnings.
        self.refuses: tuple[str, ...] = ()

    def send(self, request: PreparedRequest) -> Response:
        parts = urlsplit(str(request.url))
        path = parts.path.removeprefix("/v2/rocm/demo/")
        self.asked.append(f"{request.method} {path}")
        body = request.body or b""
        data = body.encode() if isinstance(body, str) else bytes(body)  # type: ignore[arg-type]
        status, content, headers = self._answer(
            str(request.method), path, parse_qs(parts.query), data
        )
        answer = Response()
        answer.status_code = status
        answer.url = str(request.url)
        answer.request = request
        answer.raw = BytesIO(b"" if request.method == "HEAD" else content)
        answer.headers.update(headers)
        return answer

    def _answer(
        self, method: str, path: str, query: dict[str, list[str]], data: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        kind, _, word = path.partition("/")
        if method in ("POST", "PUT", "PATCH") and path.startswith(self.refuses or ("none",)):
            return 400, b"", {}
        if path.startswith("blobs/uploads/"):
            if method == "PUT":
                self.blobs[query["digest"][0]] = data
                return 201, b"", {}
            return 202, b"", {"Location": "/v2/rocm/demo/blobs/uploads/1"}
        if kind == "manifests" and method == "PUT":
            return 201, b"", self._put(word, data)
        if path == "tags/list":
            return 200, json.dumps({"tags": sorted(self.tags)}).encode(), {}
        if kind == "referrers":
            if not self.api:
                return 404, b"", {}
            return 200, json.dumps({"manifests": self._referrers(word)}).encode(), {}
        digest = self.tags.get(word, word)
        found = (self.blobs if kind == "blobs" else self.manifests).get(digest)
        if found is None or digest in self.lost:
            return 404, b"", {}
        return 200, found, {}

    def _put(self, word: str, data: bytes) -> dict[str, str]:
        digest = digest_of(data)
        self.manifests[digest] = data
        if not re.match("sha256:", word):
            self.tags[word] = digest
        if self.api and "subject" in json.loads(data):
            return {"OCI-Subject": json.loads(data)["subject"]["digest"]}
        return {}

    def _referrers(self, image: str) -> list[dict[str, Any]]:
        rows = []
        for digest, data in self.manifests.items():
            content = json.loads(data)
            if content.get("mediaType") == INDEX_TYPE:
                continue
            if content.get("subject", {}).get("digest") == image:
                row = {"digest": digest, "size": len(data)}
                rows.append({**row, "artifactType": content.get("artifactType")})
        return rows


def connect(monkeypatch: pytest.MonkeyPatch, registry: MemoryRegistry) -> MemoryRegistry:
    """Let every request of this test go to ``registry``."""

    def send(_: object, request: PreparedRequest, **__: object) -> Response:
        return registry.send(request)

    monkeypatch.setattr(HTTPAdapter, "send", send)
    return registry
