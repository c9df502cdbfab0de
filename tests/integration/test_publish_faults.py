"""Publishing through a registry that answers wrongly or not at all: one sentence, and the next run
heals. And a registry as the cache of builds: what is wrong in it or on its way is named, and never
gets into a store.
"""

import http.client
import io
import json
import re
import shutil
import subprocess
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any, Self

import pytest
import zstandard
from test_ship_release import ready as prepared

from amd_channel import registry, restore
from host_tools import needs
from primus_images.errors import HostError, PrimusError
from primus_images.oci.store import (
    INDEX_TYPE,
    LAYER_TYPES,
    MANIFEST_TYPE,
    Blob,
    Store,
    canonical_json,
    digest_of,
)
from primus_images.plan.layers import plan_image
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.progress import Progress
from primus_images.release.artifact import EMPTY, Document, artifact, digest_tag
from primus_images.release.publish import Ready, publish
from primus_images.release.registry import Repository
from primus_images.release.statement import BUNDLE, Signer, Trust, payload
from primus_images.release.verification import verify_image
from project_kit import SOURCE, Kit, Result, make_project
from tables import table_of

pytestmark = [pytest.mark.integration, needs("docker-registry", "skopeo")]

Answer = tuple[int, dict[str, str], bytes]
# What a client gets in place of an answer, or of the registry's own one. None: the connection ends
# without an answer.
Fault = Answer | None | Callable[[Answer], Answer | None]
CUT = None


class Proxy(ThreadingHTTPServer):
    """Stands before the registry on ``port``. Of the requests that match ``what`` (method and
    path), ``times`` get ``fault`` instead, after the first ``skip``.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.port = port
        self.what, self.skip, self.times = "", 0, 0
        self.seen: list[str] = []
        self.fault: Fault = CUT

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        length = int(self.headers["Content-Length"] or 0)
        body = (
            self._chunks()
            if self.headers["Transfer-Encoding"] == "chunked"
            else self.rfile.read(length)
        )
        self.server.seen.append(f"{self.command} {self.path}")
        hit = (
            self.server.times != 0
            and re.search(self.server.what, f"{self.command} {self.path}") is not None
        )
        if hit:
            self.server.skip -= 1
            hit = self.server.skip < 0
            self.server.times -= hit
        fault = self.server.fault if hit else lambda answer: answer
        answer = fault(self._asked(body)) if callable(fault) else fault
        if answer is None:
            self.close_connection = True
            self.connection.close()
            return
        status, headers, content = answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.close_connection |= self.command != "HEAD" and "Content-Length" in headers
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
        headers = {
            name: value for name, value in self.headers.items() if name.lower() not in left_out
        }
        headers["Host"] = f"127.0.0.1:{self.server.server_port}"
        with closing(there):
            there.request(self.command, self.path, body or None, headers)
            answer = there.getresponse()
            content = answer.read()
        drop = {"transfer-encoding", "connection"} | (
            set() if self.command == "HEAD" else {"content-length"}
        )
        return (
            answer.status,
            {n: v for n, v in answer.getheaders() if n.lower() not in drop},
            content,
        )

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ready, Store]:
    kit = make_project(tmp_path_factory.mktemp("publish") / "project", size=100_000)
    return prepared(kit), Project(kit.root).workspace.store


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The registry's folder."""
    return tmp_path_factory.mktemp("registry") / "files"


@pytest.fixture(scope="module")
def port(files: Path) -> Iterator[int]:
    with registry(files) as port:
        yield port


@pytest.fixture
def proxy(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: None)  # between tries
    with Proxy(port) as proxy:
        yield proxy


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
        pytest.param(
            "PUT .*/manifests/sha256-", 1, say(201), id="forgets the list of documents once"
        ),
    ],
)
def test_a_passing_fault_is_overcome(
    built: tuple[Ready, Store], proxy: Proxy, what: str, times: int, fault: Fault
) -> None:
    name = repository(proxy)
    proxy.what, proxy.times, proxy.fault = what, times, fault
    publish(*built, name, Progress())
    assert_published(built[0], proxy, name)


@pytest.mark.parametrize(
    ("what", "fault", "told"),
    [
        ("GET .*/manifests/v", say(429, Retry_After="3600"), "status 429"),
        (
            "PUT .*/manifests/v",
            say(500, b"oh"),
            r"refuses manifests/v26\.11-demo\S*: status 500; oh",
        ),
        (
            "POST .*/uploads",
            say(507, b'{"detail":{"Op":"mkdir","Err":28}}'),
            "status 507; its disk is full",
        ),
        ("PUT .*/manifests/v", say(201), r"names nothing after it was set to sha256:"),
        ("PUT .*/manifests/sha256-", say(201), "accepts documents for .*, but does not list them"),
        (
            "GET .*sha256-",
            say(200, b"<html>"),
            "does not answer like a registry: .* is not a JSON object",
        ),
        ("GET .*sha256-", say(200, b'{"manifests": [{"a": 1}]}'), "is not a list of manifests"),
        ("GET .*sha256-", say(200, b'{"manifests": null}'), "is not a list of manifests"),
        ("", say(200, b"<html>Sign in</html>"), "is not a JSON object"),
        # skopeo pauses between its own tries. That it says so, a cut at any request shows below.
        pytest.param("PATCH .*/uploads", CUT, "does not answer: .*EOF", marks=pytest.mark.slow),
    ],
)
def test_a_lasting_fault_is_a_sentence_and_the_next_run_heals(
    built: tuple[Ready, Store], proxy: Proxy, what: str, fault: Fault, told: str
) -> None:
    name = repository(proxy)
    proxy.what, proxy.times, proxy.fault = what, -1, fault
    with pytest.raises(HostError, match=told) as refused:
        publish(*built, name, Progress())
    assert refused.value.hint
    proxy.times = 0
    publish(*built, name, Progress())
    assert_published(built[0], proxy, name)


@pytest.mark.parametrize(
    "what", ["layer", "config", "image", "tag", "list", "document", "empty", "artifact"]
)
def test_what_the_registry_lost_is_sent_again(
    built: tuple[Ready, Store], proxy: Proxy, files: Path, what: str
) -> None:
    (ready, _), name = built, repository(proxy)
    publish(*built, name, Progress())
    document = ready.documents[0]
    blobs = {
        "layer": ready.image.layers[0].blob.digest,
        "config": digest_of(ready.image.config),
        "document": digest_of(document.data),
        "empty": digest_of(EMPTY),
    }
    manifests = {
        "image": ready.image.digest,
        "artifact": digest_of(artifact(document, ready.subject)),
    }
    tags = {"tag": ready.tag, "list": ready.image.digest.replace(":", "-")}
    place = (
        f"_layers/sha256/{blobs[what][7:]}"
        if what in blobs
        else f"_manifests/tags/{tags.get(what)}"
    )
    place = f"_manifests/revisions/sha256/{manifests[what][7:]}" if what in manifests else place
    lost = files / "data/docker/registry/v2/repositories" / name.partition("/")[2] / place
    shutil.rmtree(lost)
    publish(*built, name, Progress())
    assert lost.exists()
    assert_published(ready, proxy, name)


@pytest.mark.parametrize("part", ["layer", "config", "manifest"])
@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9] + b"?" + data[-8:], lambda data: data[:-30], None]
)
def test_a_damaged_image_is_not_sent(
    built: tuple[Ready, Store], proxy: Proxy, part: str, damage: Callable[[bytes], bytes] | None
) -> None:
    ready, store = built
    digests = {"layer": ready.image.layers[0].blob.digest, "config": digest_of(ready.image.config)}
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
    assert not there.missing("blobs", [layer.blob.digest for layer in ready.image.layers])


@dataclass(frozen=True)
class Cached:
    """A project whose image ``digest`` is built, its results in a cache, and the keys of their
    signer and others.
    """

    root: Path
    kit: Kit
    port: int
    digest: str

    def there(self, port: int = 0) -> Repository:
        return Repository(f"127.0.0.1:{port or self.port}/rocm/cache")

    def build(self, store: Path, *words: str, port: int = 0) -> Result:
        """Build with the cache in another store."""
        options = ("--cache", self.there(port).name, "--cache-key", str(self.root / "ours.pub"))
        return self.kit.primus("build", "demo", "--store", str(store), *options, *words)

    def blob(self, digest: str) -> Path:
        """The registry's own file of a blob."""
        number = digest.removeprefix("sha256:")
        return (
            self.root
            / "registry/data/docker/registry/v2/blobs/sha256"
            / number[:2]
            / number
            / "data"
        )

    @property
    def entry(self) -> tuple[str, bytes]:
        """Tag and manifest of the first layer's entry."""
        project = Project(self.kit.root)
        action = plan_image(resolve(project, "demo"), project.workspace.stats).layers[0]
        tag = f"{action.kind}-{action.key}"
        manifest = self.there().manifest(tag)
        assert manifest
        return tag, manifest

    @property
    def layer(self) -> Path:
        return self.blob(json.loads(self.entry[1])["layers"][0]["digest"])

    def sign(
        self, change: Callable[[Any], object], by: str = "ours", envelope: bytes = b""
    ) -> None:
        """Replace the entry's statement by a changed one, signed with the key ``by`` or in another
        ``envelope``.
        """
        there, (_, manifest) = self.there(), self.entry
        statement = payload(there.documents(digest_of(manifest), BUNDLE)[0].data)
        change(statement)
        unsigned(self)
        data = envelope or Signer(key=str(self.root / f"{by}.key")).bundle(statement)
        there.attach(
            [Document(media_type=BUNDLE, name="", data=data)],
            Blob.of(manifest, MANIFEST_TYPE).descriptor,
        )

    def swap(self, data: bytes) -> None:
        """Sign another blob as the entry's layer."""
        there, blob = self.there(), Blob.of(data, LAYER_TYPES["zstd"])
        there.upload(blob.digest, io.BytesIO(data))
        fields = {"digest": blob.digest, "media_type": blob.media_type, "size": blob.size}
        self.sign(lambda said: said["predicate"]["record"]["layer"].update(blob=fields))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cached]:
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch, registry(root / "registry") as port:
        patch.setenv("COSIGN_PASSWORD", "a word")
        patch.setenv("DOCKER_CONFIG", str(root))
        for name in ("ours", "others"):
            words = ["cosign", "generate-key-pair", f"--output-key-prefix={name}"]
            subprocess.run(words, cwd=root, check=True, capture_output=True)
        kit = make_project(root / "project", size=100_000)
        kit.write("parts/alpha/more", bytes(range(256)) * 100)
        cached = Cached(root, kit, port, kit.build("demo").digest)
        sent = cached.build(root / "project/.primus/store", "--cache-sign", str(root / "ours.key"))
        assert "3 results sent" in sent.err, sent.err
        shutil.copytree(root / "registry/data", root / "whole")
        yield cached


@pytest.fixture
def cached(whole: Cached, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cached]:
    monkeypatch.setattr("time.sleep", lambda _: None)  # between tries
    yield whole
    restore(whole.root)


def assert_built(cached: Cached, result: Result, store: Path, *, downloaded: int) -> None:
    """The image is the right one, so many of its layers came from the cache, and no blob is
    damaged.
    """
    assert (result.code, result.digest) == (0, cached.digest), result.err
    assert (result.err.count(" from the cache"), len(re.findall(" built ", result.err))) == (
        downloaded,
        3 - downloaded,
    )
    blobs = [path.name for path in (store / "blobs/sha256").iterdir()]
    assert [fault for name in blobs if (fault := Store(store).check(f"sha256:{name}"))] == []


@needs("cosign")
def test_a_second_machine_only_downloads_and_only_what_is_new_is_sent(
    cached: Cached, tmp_path: Path
) -> None:
    with Proxy(cached.port) as proxy:
        words = ("--cache-sign", str(cached.root / "ours.key"))
        plan = cached.build(tmp_path / "store", "--dry-run", port=proxy.server_port)
        assert "nothing to build, 3 to download" in plan.out
        assert not (tmp_path / "store").exists()
        result = cached.build(tmp_path / "store", port=proxy.server_port)
        assert_built(cached, result, tmp_path / "store", downloaded=3)
        proxy.seen.clear()
        assert (
            "0 results sent" in cached.build(tmp_path / "store", *words, port=proxy.server_port).err
        )
        assert {line.partition(" ")[0] for line in proxy.seen} == {"GET"}
        shutil.copytree(
            cached.kit.root,
            tmp_path / "edited",
            ignore=shutil.ignore_patterns(".primus"),
            symlinks=True,
        )
        edited = replace(cached, kit=Kit(tmp_path / "edited"))
        edited.kit.write("parts/alpha/blob", "new")
        again = edited.build(tmp_path / "other", *words, port=proxy.server_port)
        assert (again.err.count(" from the cache"), "1 result sent" in again.err) == (2, True), (
            again.err
        )
        # The layer, the statement and the empty config, which every artifact has.
        assert sum(line.startswith("PUT") and "blobs/uploads" in line for line in proxy.seen) == 2


def flip(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def change(*path: str, value: object) -> Callable[[Any], None]:
    def put(content: Any) -> None:
        for part in path[:-1]:
            content = content[part]
        content[path[-1]] = value

    return put


def of_beta(cached: Cached) -> None:
    there, (tag, _) = cached.there(), cached.entry
    other = next(other for other in there.tags("files-") if other != tag)
    there.tag(tag, there.manifest(other) or b"")


def unsigned(cached: Cached) -> None:
    there, (_, manifest) = cached.there(), cached.entry
    empty = canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []})
    tag = digest_tag(digest_of(manifest))
    there.request("PUT", f"manifests/{tag}", data=empty, headers={"Content-Type": INDEX_TYPE})


NOTHING = f"sha256:{'0' * 64}"
RECORD = ("predicate", "record", "layer")
LIES: dict[str, tuple[Callable[[Cached], object], str]] = {
    "bytes": (
        lambda c: c.layer.write_bytes(flip(c.layer.read_bytes())),
        "bytes were sent, which hash to",
    ),
    "cut": (
        lambda c: c.layer.write_bytes(c.layer.read_bytes()[:-20]),
        "entry of alpha|the cache is not used",
    ),
    "longer": (
        lambda c: c.layer.write_bytes(c.layer.read_bytes() + b"x"),
        "bytes were sent, which hash to",
    ),
    "lost": (lambda c: c.layer.unlink(), "its contents are missing"),
    "unsigned": (unsigned, "it is not signed"),
    "by another": (
        lambda c: c.sign(lambda _: None, by="others"),
        "its signature is not by .*ours.pub",
    ),
    "no envelope": (lambda c: c.sign(lambda _: None, envelope=b"{}"), "its signature is not by"),
    "of another action": (of_beta, "its statement is about [0-9a-f]{64} for linux/amd64"),
    "of another kind": (
        lambda c: c.sign(change("predicateType", value="urn:x:y")),
        "its signature is not by",
    ),
    "another key": (
        lambda c: c.sign(change("predicate", "key", value="0" * 64)),
        "its statement is about 0000",
    ),
    "another machine": (
        lambda c: c.sign(change("predicate", "platform", value="linux/arm64")),
        "for linux/arm64",
    ),
    "another subject": (
        lambda c: c.sign(lambda s: s["subject"][0]["digest"].update(sha256="e" * 64)),
        "in sha256:ee",
    ),
    "no record": (
        lambda c: c.sign(change("predicate", "record", value={})),
        "its statement is damaged",
    ),
    "odd record": (
        lambda c: c.sign(change(*RECORD, value={"blob": 5})),
        "its statement is damaged",
    ),
    "another tar": (
        lambda c: c.sign(change(*RECORD, "diff_id", value=NOTHING)),
        "describes another layer",
    ),
    "other paths": (
        lambda c: c.sign(change(*RECORD, "paths", value=NOTHING)),
        "describes another layer",
    ),
    "a size": (
        lambda c: c.sign(change(*RECORD, "blob", "size", value=7)),
        "bytes were sent, which hash to",
    ),
    "no layer": (lambda c: c.swap(b"no layer at all"), "layer sha256:[0-9a-f]{64} cannot be used"),
    "a bomb": (lambda c: c.swap(zstandard.compress(bytes(1 << 28))), "it is a decompression bomb"),
    "a path upwards": (
        lambda c: c.swap(zstandard.compress(tar_of("../up"))),
        "cannot be used: .*up",
    ),
}


def tar_of(name: str) -> bytes:
    member = tarfile.TarInfo(name)
    return member.tobuf() + bytes(1024)


@needs("cosign")
@pytest.mark.parametrize("lie", LIES)
def test_what_is_wrong_in_a_cache_is_named_and_built_here(
    cached: Cached, tmp_path: Path, lie: str
) -> None:
    damage, reason = LIES[lie]
    damage(cached)
    result = cached.build(tmp_path / "store")
    assert re.search(reason, result.err), result.err
    assert_built(cached, result, tmp_path / "store", downloaded=2)


@needs("cosign")
@pytest.mark.parametrize(
    ("what", "times", "fault", "downloaded", "reason"),
    [
        ("GET .*/manifests/files", 2, say(429, Retry_After="0"), 3, ""),
        ("GET .*/blobs/", 2, CUT, 3, ""),
        ("GET .*/blobs/", 1, say(503), 3, ""),
        ("GET ", -1, say(429, Retry_After="3600"), 0, "the cache is not used: .* status 429"),
        ("GET .*/blobs/", -1, CUT, 0, "the cache is not used: .* does not answer"),
        ("GET .*/manifests/sha256-", -1, CUT, 0, "the cache is not used: .* does not answer"),
        (
            "GET ",
            -1,
            say(200, b"<html>Sign in"),
            0,
            "the cache is not used: .* does not answer like a registry",
        ),
        (
            "GET .*/manifests/files",
            -1,
            say(200, b"{}"),
            0,
            "entry of alpha is not used: it is not signed",
        ),
        ("GET .*/blobs/", -1, say(200, b"wrong"), 0, "its contents have other bytes"),
        ("GET .*/manifests/files", -1, say(404), 0, ""),
        ("GET .*/manifests/files", -1, say(401), 0, "the cache is not used: .* denied access"),
    ],
)
def test_a_fault_on_the_way_from_a_cache_does_not_change_the_image(
    cached: Cached,
    tmp_path: Path,
    what: str,
    times: int,
    fault: Fault,
    downloaded: int,
    reason: str,
) -> None:
    with Proxy(cached.port) as proxy:
        proxy.what, proxy.times, proxy.fault = what, times, fault
        result = cached.build(tmp_path / "store", port=proxy.server_port)
        assert re.search(reason, result.err), result.err
        assert_built(cached, result, tmp_path / "store", downloaded=downloaded)


# What can happen to any one request: of a publish, of `verify --image`, of a build with a cache.
ANYWHERE: dict[str, Fault] = {
    "cut": CUT,
    "answer lost": lambda _: None,
    "answer cut": lambda a: (a[0], {**a[1], "Content-Length": str(len(a[2]) + 9)}, a[2]),
    "answer damaged": lambda a: (a[0], a[1], flip(a[2]) if len(a[2]) > 9 else a[2]),
    "answer empty": lambda a: (a[0], a[1], b""),
    "answer of another": lambda a: (a[0], a[1], b'{"schemaVersion": 2}'),
    "lying digest": lambda a: (a[0], {**a[1], "Docker-Content-Digest": NOTHING}, a[2]),
    "no headers": lambda a: (a[0], {}, a[2]),
    "not done": say(201),
    "login page": say(200, b"<html>Sign in</html>"),
    "elsewhere": say(307, Location="/v2/"),
    "nowhere": say(307),
    "other range": say(416),
    "too large": say(413, b"too large"),
    "busy": say(429),
    "busy for an hour": say(429, Retry_After="3600"),
    "disk full": say(507, b"no space left on device"),
    **{
        str(status): say(status, b'{"errors": []}')
        for status in (401, 403, 404, 405, 500, 502, 503)
    },
}
FAULTS = SOURCE.parent / "benchmarks/results/registry-faults.json"


@needs("cosign")
def test_a_signed_publish_sets_each_tag_once_so_that_none_needs_to_move(
    built: tuple[Ready, Store], whole: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "a word")
    with Proxy(whole.port) as proxy:
        publish(
            *built, repository(proxy), Progress(), signer=Signer(key=str(whole.root / "ours.key"))
        )
    tags = [line for line in proxy.seen if re.match("PUT .*/manifests/(?!sha256:)", line)]
    assert len(tags) == len({*tags}) == 3, "the list of referrers, the announcement, the release"


@needs("cosign")
@pytest.mark.parametrize("way", ["publish", "verify", "cache"])
def test_a_fault_of_any_request_is_overcome_or_a_sentence_and_nothing_is_corrupt(
    built: tuple[Ready, Store],
    whole: Cached,
    way: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready, store = built
    monkeypatch.setenv("COSIGN_PASSWORD", "a word")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr(Trust, "rejects", cache(Trust.rejects))
    monkeypatch.setattr("time.sleep", lambda _: None)
    trust, signer = (
        Trust(key=str(whole.root / "ours.pub")),
        Signer(key=str(whole.root / "ours.key")),
    )
    publish(ready, store, f"127.0.0.1:{whole.port}/rocm/verified", Progress(), signer=signer)
    with Proxy(whole.port) as proxy:
        base = f"127.0.0.1:{proxy.server_port}/rocm"

        def act(name: str) -> bool:
            if way == "verify":
                return verify_image(f"{base}/verified:{ready.tag}", trust).passed
            if way == "publish":
                return (
                    publish(ready, store, f"{base}/{name}", Progress())["digest"]
                    == ready.image.digest
                )
            result = whole.build(tmp_path / name, port=proxy.server_port)
            assert (result.code, result.digest) == (0, whole.digest), result.err
            blobs = [path.name for path in (tmp_path / name / "blobs/sha256").iterdir()]
            assert [
                fault for blob in blobs if (fault := Store(tmp_path / name).check(f"sha256:{blob}"))
            ] == []
            shutil.rmtree(tmp_path / name)
            return "!" not in result.err

        assert act("healthy")
        requests, slow = len(proxy.seen), request.config.getoption("--slow")
        counts: Counter[str] = Counter()
        for position, kind in [*product(range(requests), ANYWHERE)][:: 5 if slow else 307]:
            name = f"{kind.replace(' ', '-')}-{position}"
            proxy.skip, proxy.times, proxy.fault = position, 1, ANYWHERE[kind]
            try:
                counts["overcome" if act(name) else "named"] += 1
            except PrimusError as error:
                assert error.message
                counts["named"] += 1
            proxy.times = 0
            assert act(name), (position, kind)
            if way == "publish":
                assert_published(ready, proxy, f"{base}/{name}")
    assert counts["overcome"] or not slow  # the few faults of a quick run may all be lasting ones
    if slow and request.config.getoption("--regenerate-golden"):
        results = json.loads(FAULTS.read_text()) if FAULTS.exists() else {}
        results[way] = {"requests": requests, "faults": counts.total(), **counts}
        FAULTS.write_text(json.dumps(results, indent=1) + "\n")


@needs("cosign")
def test_a_cache_that_only_reads_is_a_sentence_and_the_image_is_built(
    cached: Cached, tmp_path: Path
) -> None:
    with Proxy(cached.port) as proxy:
        unsigned(cached)
        proxy.what, proxy.times, proxy.fault = "PUT|POST", -1, say(405)
        words = ("--cache-sign", str(cached.root / "ours.key"))
        result = cached.build(tmp_path / "store", *words, port=proxy.server_port)
        assert (result.code, "status 405" in result.err) == (3, True), result.err
        assert (
            cached.kit.primus("build", "demo", "--store", str(tmp_path / "store")).digest
            == cached.digest
        )
    assert "1 result sent" in cached.build(tmp_path / "store", *words).err
    assert_built(cached, cached.build(tmp_path / "other"), tmp_path / "other", downloaded=3)


@pytest.mark.parametrize(
    ("words", "reason"), table_of("publish_faults.options_of_a_cache_fit_together")
)
def test_options_of_a_cache_fit_together(
    tmp_path: Path, words: tuple[str, ...], reason: str
) -> None:
    result = make_project(tmp_path / "project").primus("build", "demo", *words)
    assert (result.code, reason in result.err) == (2, True), result.err
