"""Publishing through a registry that answers wrongly or not at all: one sentence, and the next run
heals.
"""

import http.client
import json
import os
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Self

import pytest
from test_ship_release import ready as prepared

from amd_channel import registry
from host_tools import needs
from loopback import body_in_chunks, make_certificate
from primus_images.errors import HostError, PrimusError
from primus_images.oci.store import Store, digest_of
from primus_images.plan.project import Project
from primus_images.progress import Progress
from primus_images.release import sides
from primus_images.release.artifact import EMPTY, WITHDRAWAL, artifact, predicate_of
from primus_images.release.publish import Ready, publish
from primus_images.release.registry import Repository
from primus_images.release.statement import BUNDLE, SIGNATURE, Signer, Trust
from primus_images.release.tags import move_tag, withdraw, withdrawable
from primus_images.release.verification import verify_image
from primus_images.release.withdrawal import Withdrawal
from project_kit import SOURCE, make_project

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
            body_in_chunks(self.rfile)
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
        (r"PUT .*/manifests/v26\.11-demo$", say(201), r"names nothing after it was set to sha256:"),
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
        pytest.param("PATCH .*/uploads", CUT, "ends the connection|EOF", marks=pytest.mark.slow),
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


@needs("cosign")
@pytest.mark.parametrize("what", ["bundle", "contents", "everything"])
def test_publishing_again_heals_a_list_that_names_what_is_gone(
    built: tuple[Ready, Store],
    proxy: Proxy,
    files: Path,
    keys: Path,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A registry's own clean-up removes manifests, and leaves the list, which is a tag."""
    monkeypatch.setenv("COSIGN_PASSWORD", "a word")
    (ready, store), name = built, repository(proxy)
    signer = Signer(key=str(keys / "ours.key"))
    publish(ready, store, name, Progress(), signing=signer)
    there = Repository(name)
    entries = there.referrers(ready.image.digest)
    bundles = [entry["digest"] for entry in entries if entry["artifactType"] == BUNDLE]
    every = [entry["digest"] for entry in entries]
    lost = {"bundle": bundles[:1], "everything": every}.get(what, [])
    place = files / "data/docker/registry/v2/repositories" / name.partition("/")[2]
    for digest in lost:
        shutil.rmtree(place / f"_manifests/revisions/sha256/{digest[7:]}")
    if what == "contents":
        (layer,) = json.loads(there.manifest(bundles[0]) or b"")["layers"]
        shutil.rmtree(place / f"_layers/sha256/{layer['digest'][7:]}")
    trust = Trust(key=str(keys / "ours.pub"))
    assert verify_image(f"{name}:{ready.tag}", trust).faults
    publish(ready, store, name, Progress(), signing=signer)
    assert verify_image(f"{name}:{ready.tag}", trust).faults == []


@pytest.fixture
def withdrawn(
    built: tuple[Ready, Store], proxy: Proxy, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Signer, Trust]:
    """Publish the image through the proxy, signed, and withdraw it."""
    monkeypatch.setenv("COSIGN_PASSWORD", "a word")
    signer = Signer(key=str(keys / "ours.key"))
    publish(*built, repository(proxy), Progress(), signing=signer)
    take_back(proxy, built[0], signer)
    return signer, Trust(key=str(keys / "ours.pub"))


def take_back(proxy: Proxy, ready: Ready, signer: Signer) -> None:
    there = Repository(repository(proxy))
    image = withdrawable(there, ready.tag, None)
    withdraw(there, image, Withdrawal(reason="wrong", date="2026-11-29"), signer)


NOT_FOUND = say(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}')


@needs("cosign")
def test_a_list_that_is_denied_is_no_empty_list(
    built: tuple[Ready, Store], proxy: Proxy, withdrawn: tuple[Signer, Trust]
) -> None:
    """Neither a reader nor a writer takes a lost answer for a list of nothing."""
    signer, trust = withdrawn
    name = repository(proxy)
    attached = len(Repository(name).referrers(built[0].image.digest))
    proxy.what, proxy.times, proxy.fault = "GET .*/manifests/sha256-", -1, NOT_FOUND
    denied = r"says that the tag sha256-\S+ does not exist, and shows it among its tags"
    for command in (
        lambda: verify_image(f"{name}:{built[0].tag}", trust),
        lambda: publish(*built, name, Progress(), signing=signer),
        lambda: take_back(proxy, built[0], signer),
        lambda: sides._of_registry(name, built[0].tag),
        lambda: move_tag(Repository(name), "latest-demo", built[0].tag, trust),
    ):
        with pytest.raises(HostError, match=denied):
            command()
    proxy.times = 0
    assert len(Repository(name).referrers(built[0].image.digest)) == attached
    result = verify_image(f"{name}:{built[0].tag}", trust)
    assert (result.faults, "wrong" in result.withdrawn) == ([], True)


def test_tags_that_are_denied_hide_no_other_publisher(
    built: tuple[Ready, Store], proxy: Proxy
) -> None:
    proxy.what, proxy.times, proxy.fault = "GET .*/tags/list", -1, NOT_FOUND
    with pytest.raises(HostError, match=r"has the tag \S+\.by-\S+, and does not list it"):
        publish(*built, repository(proxy), Progress())
    proxy.times = 0
    publish(*built, repository(proxy), Progress())
    proxy.times = -1
    with pytest.raises(HostError, match=r"has the tag v26\.11-demo, and does not list it"):
        withdrawable(Repository(repository(proxy)), built[0].tag, None)


@needs("cosign")
def test_lists_that_are_all_denied_leave_nothing_that_counts(
    built: tuple[Ready, Store], proxy: Proxy, withdrawn: tuple[Signer, Trust]
) -> None:
    proxy.what, proxy.times = "GET .*/(referrers/|manifests/sha256-|tags/)", -1
    proxy.fault = NOT_FOUND
    result = verify_image(f"{repository(proxy)}:{built[0].tag}", withdrawn[1])
    assert not result.passed
    assert "nothing is attached" in result.faults[0]


@needs("cosign")
def test_a_registry_that_denies_what_it_has_loses_nothing(
    built: tuple[Ready, Store], proxy: Proxy, withdrawn: tuple[Signer, Trust]
) -> None:
    """Who attaches one more statement does not take the others from the list."""
    signer, trust = withdrawn
    there = Repository(repository(proxy))
    before = {entry["digest"] for entry in there.referrers(built[0].image.digest)}
    image = withdrawable(there, built[0].tag, None)
    again = Withdrawal(reason="again", date="2026-11-30")
    for method in ("GET", "(GET|HEAD)"):
        proxy.what, proxy.times, proxy.fault = f"{method} .*/manifests/sha256:", -1, NOT_FOUND
        with suppress(HostError):
            withdraw(there, image, again, signer)
        proxy.times = 0
        after = {entry["digest"] for entry in there.referrers(built[0].image.digest)}
        assert before < after
    assert verify_image(f"{there.name}:{built[0].tag}", trust).faults == []


@needs("cosign")
def test_a_lost_withdrawal_never_leaves_the_list_in_silence(
    built: tuple[Ready, Store],
    proxy: Proxy,
    files: Path,
    withdrawn: tuple[Signer, Trust],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (ready, store), name = built, repository(proxy)
    signer, trust = withdrawn
    place = files / "data/docker/registry/v2/repositories" / name.partition("/")[2]

    def lose(kind: str) -> str:
        for entry in Repository(name).referrers(ready.image.digest):
            if predicate_of(entry) == kind:
                shutil.rmtree(place / f"_manifests/revisions/sha256/{entry['digest'][7:]}")
                return str(entry["digest"])
        raise AssertionError(kind)

    lose(WITHDRAWAL)
    faults = verify_image(f"{name}:{ready.tag}", trust).faults
    assert any(f"the statement of type {WITHDRAWAL} with digest" in fault for fault in faults)
    gone = lose(SIGNATURE)
    with pytest.raises(HostError, match="has lost the signed withdrawal of this image"):
        publish(ready, store, name, Progress(), signing=signer)
    take_back(proxy, ready, signer)
    assert gone in capsys.readouterr().err
    publish(ready, store, name, Progress(), signing=signer)
    result = verify_image(f"{name}:{ready.tag}", trust)
    assert (result.faults, "wrong" in result.withdrawn) == ([], True)


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


@needs("openssl")
def test_a_registry_with_tls_and_an_authority_of_its_own(
    built: tuple[Ready, Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine, as elsewhere: we and skopeo take the same certificates."""
    certificate = make_certificate(tmp_path / "server.pem")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    with registry(tmp_path / "registry", certificate=certificate) as port:
        name = f"127.0.0.1:{port}/rocm/primus"
        with pytest.raises(HostError, match="that is not trusted"):
            publish(*built, name, Progress())
        folder = tmp_path / f".config/containers/certs.d/127.0.0.1:{port}"
        folder.mkdir(parents=True)
        (folder / "ca.crt").write_bytes(certificate.read_bytes())
        publish(*built, name, Progress())
        there = Repository(name)
        assert there.digest(built[0].tag) == built[0].image.digest
        assert len(there.referrers(built[0].image.digest)) == len(built[0].documents)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pair of keys, whose password is `a word`."""
    root = tmp_path_factory.mktemp("keys")
    words = ["cosign", "generate-key-pair", "--output-key-prefix=ours"]
    environment = {**os.environ, "COSIGN_PASSWORD": "a word"}
    subprocess.run(words, cwd=root, env=environment, check=True, capture_output=True)
    return root


def flip(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


NOTHING = f"sha256:{'0' * 64}"
# What can happen to any one request: of a publish, of `verify --image`.
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
    built: tuple[Ready, Store], proxy: Proxy, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "a word")
    signer = Signer(key=str(keys / "ours.key"))
    publish(*built, repository(proxy), Progress(), signing=signer)
    tags = [line for line in proxy.seen if re.match("PUT .*/manifests/(?!sha256:)", line)]
    assert len(tags) == len({*tags}) == 3, "the list of referrers, the announcement, the release"


@needs("cosign")
@pytest.mark.parametrize("way", ["publish", "verify"])
def test_a_fault_of_any_request_is_overcome_or_a_sentence_and_nothing_is_corrupt(
    built: tuple[Ready, Store],
    port: int,
    keys: Path,
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
    trust = Trust(key=str(keys / "ours.pub"))
    signer = Signer(key=str(keys / "ours.key"))
    publish(ready, store, f"127.0.0.1:{port}/rocm/verified", Progress(), signing=signer)
    with Proxy(port) as proxy:
        base = f"127.0.0.1:{proxy.server_port}/rocm"

        def act(name: str) -> bool:
            if way == "verify":
                return verify_image(f"{base}/verified:{ready.tag}", trust).passed
            done = publish(ready, store, f"{base}/{name}", Progress())
            return done["digest"] == ready.image.digest

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
