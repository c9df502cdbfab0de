"""Publishing through a registry that answers wrongly or not at all: one sentence, and the next run heals."""

import http.client
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from amd_channel import registry
from host_tools import needs
from primus.errors import HostError
from primus.oci import canonical
from primus.oci.store import Store
from primus.plan.layers import plan_image
from primus.plan.project import Project
from primus.plan.resolve import resolve
from primus.progress import Progress
from primus.release.policy import Policy
from primus.release.publish import Ready, prepare, publish
from primus.release.registry import Repository
from project_kit import make_project

pytestmark = [pytest.mark.integration, needs("docker-registry", "skopeo")]

Answer = tuple[int, dict[str, str], bytes]
CUT = None  # the connection ends without an answer


class Proxy(ThreadingHTTPServer):
    """Stands before the registry on ``port``. Requests that match ``what`` (method and path) get ``fault`` instead."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.port = port
        self.what, self.times = "", 0
        self.fault: Answer | None = CUT


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        length = int(self.headers["Content-Length"] or 0)
        body = self._chunks() if self.headers["Transfer-Encoding"] == "chunked" else self.rfile.read(length)
        hit = self.server.times != 0 and re.search(self.server.what, f"{self.command} {self.path}") is not None
        if hit:
            self.server.times -= 1
        answer = self.server.fault if hit else self._asked(body)
        if answer is None:
            self.close_connection = True
            self.connection.close()
            return
        status, headers, content = answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.command != "HEAD" or "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_PUT = do_POST = do_PATCH = do_GET

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _asked(self, body: bytes) -> Answer:
        there = http.client.HTTPConnection("127.0.0.1", self.server.port)
        left_out = {"transfer-encoding", "content-length", "connection", "host"}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        headers["Host"] = f"127.0.0.1:{self.server.server_port}"
        with closing(there):
            there.request(self.command, self.path, body or None, headers)
            answer = there.getresponse()
            content = answer.read()
        drop = {"transfer-encoding", "connection"} | (set() if self.command == "HEAD" else {"content-length"})
        return answer.status, {n: v for n, v in answer.getheaders() if n.lower() not in drop}, content

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ready, Store]:
    kit = make_project(tmp_path_factory.mktemp("publish") / "project", size=100_000)
    kit.build("demo")
    project = Project(kit.root)
    plan = plan_image(resolve(project, "demo"), project.workspace.stats)
    ready = prepare(
        plan, project.workspace, records=kit.root / "none", policy=Policy(), preview=False, progress=Progress()
    )
    return replace(ready, objections=()), project.workspace.store


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with registry(tmp_path_factory.mktemp("registry") / "own") as port:
        yield port


@pytest.fixture
def proxy(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with Proxy(port) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
        yield proxy
        proxy.shutdown()


def repository(proxy: Proxy) -> str:
    """One of its own for each test."""
    return f"127.0.0.1:{proxy.server_port}/rocm/primus-{proxy.server_port}"


def say(status: int, content: bytes = b"", **headers: str) -> Answer:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, content


@pytest.mark.parametrize(
    ("what", "times", "fault"),
    [
        pytest.param("GET .*/manifests/v", 2, say(429, Retry_After="0"), id="overloaded"),
        pytest.param("POST .*/uploads", 1, say(503), id="unavailable"),
        pytest.param("PATCH .*/uploads", 1, CUT, id="cut in a blob"),
        pytest.param("PUT .*/manifests/sha256:", 1, CUT, id="cut in a manifest"),
        pytest.param("PUT .*/manifests/sha256-", 1, say(201), id="forgets the list of documents once"),
    ],
)
def test_a_passing_fault_is_overcome(
    built: tuple[Ready, Store], proxy: Proxy, what: str, times: int, fault: Answer | None
) -> None:
    name = repository(proxy)
    proxy.what, proxy.times, proxy.fault = what, times, fault
    publish(*built, name, Progress())
    assert_published(built[0], proxy, name)


@pytest.mark.parametrize(
    ("what", "fault", "told"),
    [
        ("GET .*/manifests/v", say(429, Retry_After="3600"), "status 429"),
        ("PUT .*/manifests/v", say(500, b"oh"), r"refuses manifests/v26\.11-demo\S*: status 500; oh"),
        ("PUT .*/manifests/v", say(201), r"names nothing after it was set to sha256:"),
        ("PUT .*/manifests/sha256-", say(201), "accepts documents for .*, but does not list them"),
        ("GET .*sha256-", say(200, b"<html>"), "does not answer like a registry: .* is not a JSON object"),
        ("GET .*sha256-", say(200, b'{"manifests": [{"a": 1}]}'), "is not a list of manifests"),
        ("GET .*sha256-", say(200, b'{"manifests": null}'), "is not a list of manifests"),
        ("", say(200, b"<html>Sign in</html>"), "is not a JSON object"),
        ("PATCH .*/uploads", CUT, "does not answer: .*EOF"),
    ],
)
def test_a_lasting_fault_is_a_sentence_and_the_next_run_heals(
    built: tuple[Ready, Store], proxy: Proxy, what: str, fault: Answer | None, told: str
) -> None:
    name = repository(proxy)
    proxy.what, proxy.times, proxy.fault = what, -1, fault
    with pytest.raises(HostError, match=told) as refused:
        publish(*built, name, Progress())
    assert refused.value.hint
    proxy.times = 0
    publish(*built, name, Progress())
    assert_published(built[0], proxy, name)


@pytest.mark.parametrize("part", ["layer", "config", "manifest"])
@pytest.mark.parametrize("damage", [lambda data: data[:-9] + b"?" + data[-8:], lambda data: data[:-30], None])
def test_a_damaged_image_is_not_sent(
    built: tuple[Ready, Store], proxy: Proxy, part: str, damage: Callable[[bytes], bytes] | None
) -> None:
    ready, store = built
    digests = {"layer": ready.image.layers[0].blob.digest, "config": canonical.digest_of(ready.image.config)}
    path = store.blob_path(digests.get(part, ready.image.digest))
    data = path.read_bytes()
    path.unlink()
    if damage:
        path.write_bytes(damage(data))
    try:
        with pytest.raises(HostError, match=path.name[:8]) as refused:
            publish(ready, store, repository(proxy), Progress())
        assert refused.value.hint == "primus build --rehash rebuilds it"
    finally:
        path.write_bytes(data)


def assert_published(ready: Ready, proxy: Proxy, name: str) -> None:
    """The registry itself has the tag, the image and all documents."""
    there = Repository(name.replace(f":{proxy.server_port}/", f":{proxy.port}/"))
    assert there.digest(ready.tag) == ready.image.digest
    assert len(there.referrers(ready.image.digest)) == len(ready.documents)
    assert all(there.has_blob(layer.blob.digest) for layer in ready.image.layers)
