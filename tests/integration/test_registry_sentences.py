"""A hundred faults of a registry: each command overcomes one, or ends soon with a good sentence.

The registry is Debian's. A proxy before it plays one fault at one step, as often as it is asked.
"""

import http.client
import json
import os
import re
import shutil
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Self

import pytest
from test_ship_release import ready as prepared

from amd_channel import registry, restore
from host_tools import needs
from loopback import body_in_chunks, make_certificate
from primus_images.errors import HostError, PrimusError
from primus_images.oci.store import Store, canonical_json
from primus_images.plan.project import Project
from primus_images.progress import Progress
from primus_images.release import sides, transport
from primus_images.release.publish import Ready, publish
from primus_images.release.registry import Repository
from primus_images.release.statement import Signer, Trust
from primus_images.release.tags import move_tag, withdraw, withdrawable
from primus_images.release.verification import verify_image
from primus_images.release.withdrawal import Withdrawal
from primus_images.versions import remotes, traffic
from project_kit import SOURCE, make_project

pytestmark = [pytest.mark.integration, needs("docker-registry", "skopeo", "cosign", "openssl")]

RESULT = SOURCE.parent / "benchmarks/results/registry-sentences.json"
# Seconds: of a command whose registry falls silent. Its own limits are made shorter below.
LONGEST = 60.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


class Proxy(ThreadingHTTPServer):
    """Stands before the registry on ``port``, and plays ``fault`` at what matches."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.port = port
        self.fault: Fault | None = None
        self.ended = Event()
        self.hits = 0

    def __enter__(self) -> Self:
        Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that break off."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        fault = self.server.fault
        hit = fault is not None and re.search(fault.what, f"{self.command} {self.path}")
        if not hit or fault is None:
            self.pass_on(self.asked())
            return
        self.server.hits += 1
        self.close_connection = True
        if not fault.before:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
        with suppress(OSError):
            fault.play(self)

    do_HEAD = do_PUT = do_POST = do_PATCH = do_GET

    def asked(self) -> "Answer":
        """What the registry answers."""
        there = http.client.HTTPConnection("127.0.0.1", self.server.port)
        left_out = {"transfer-encoding", "content-length", "connection", "host", "authorization"}
        headers = {}
        for name in self.headers:
            if name.lower() not in left_out:
                headers[name] = ", ".join(self.headers.get_all(name) or ())
        headers["Host"] = f"127.0.0.1:{self.server.server_port}"
        with closing(there):
            there.request(self.command, self.path, self.sent() or None, headers)
            answer = there.getresponse()
            body = answer.read()
            kept = {}
            for name, value in answer.getheaders():
                is_length = name.lower() == "content-length" and self.command != "HEAD"
                if not is_length and name.lower() not in ("transfer-encoding", "connection"):
                    kept[name] = value
        return Answer(answer.status, kept, body)

    def sent(self) -> bytes:
        if self.headers["Transfer-Encoding"] != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"] or 0))
        return body_in_chunks(self.rfile)

    def pass_on(self, answer: "Answer") -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


Play = Callable[[Handler], None]


@dataclass(frozen=True)
class Fault:
    """What is played at the requests that match ``what``, and the remedies that fit.

    ``before``: nothing of the request's body is read.
    """

    what: str
    play: Play
    remedy: str
    before: bool = False


# -- what is played


def say(status: int, body: bytes = b"", **headers: str) -> Play:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.pass_on(Answer(status, named, body))


def raw(data: bytes) -> Play:
    return lambda handler: handler.connection.sendall(data)


def cut(handler: Handler) -> None:
    """Half of the registry's own answer."""
    answer = handler.asked()
    length = str(len(answer.body) + 99)
    handler.pass_on(Answer(answer.status, {**answer.headers, "Content-Length": length}, b"{"))


def reset(handler: Handler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def silent(handler: Handler) -> None:
    handler.server.ended.wait(LONGEST)


def drip(start: bytes, drop: bytes) -> Play:
    """Send a bit, again and again, as long as somebody listens."""

    def play(handler: Handler) -> None:
        handler.connection.sendall(start)
        until = time.monotonic() + LONGEST
        while time.monotonic() < until and not handler.server.ended.wait(0.3):
            handler.connection.sendall(drop)

    return play


def changed(change: Callable[[Answer], Answer]) -> Play:
    return lambda handler: handler.pass_on(change(handler.asked()))


def with_headers(**headers: str) -> Play:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return changed(lambda a: Answer(a.status, {**a.headers, **named}, a.body))


def without_headers(answer: Answer) -> Answer:
    return Answer(answer.status, {}, answer.body)


def flipped(answer: Answer) -> Answer:
    middle = len(answer.body) // 2
    body = answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :]
    return Answer(answer.status, answer.headers, body if answer.body else b"?")


def challenge(header: str) -> Play:
    return lambda handler: handler.pass_on(
        Answer(401, {"WWW-Authenticate": header.replace("ME", handler.headers["Host"])}, b"")
    )


def token(play: Play) -> Play:
    """Want a token for everything, and play this where it is asked for."""

    def answer(handler: Handler) -> None:
        if handler.path.startswith("/token"):
            play(handler)
        else:
            challenge('Bearer realm="http://ME/token",service="s"')(handler)

    return answer


# -- the table

TAG = "GET .*/manifests/v26"
IMAGE = "GET .*/manifests/sha256:"
LIST = "GET .*/(referrers/|manifests/sha256-)"
TAGS = "GET .*/tags/list"
ASKS = "HEAD .*/blobs/"
BLOB = "GET .*/blobs/sha256"
START = "POST .*/uploads"
SENDS = "PATCH .*/uploads"
ENDS = "PUT .*/uploads"
PUTS = "PUT .*/manifests/sha256:"
LISTS = "PUT .*/manifests/sha256-"
SETS = "PUT .*/manifests/(v26|latest)"
STEPS = {
    "tag": TAG,
    "manifest": IMAGE,
    "list": LIST,
    "tags": TAGS,
    "question": ASKS,
    "blob": BLOB,
    "start of an upload": START,
    "upload": SENDS,
    "end of an upload": ENDS,
    "manifest put": PUTS,
    "list put": LISTS,
    "tag put": SETS,
}
LATER = r"again|later|disk"
LOGIN = r"log in|skopeo login|sign in"
WHO = r"name|proxy|PROXY|address|who runs"
NET = r"network|again|name|proxy|PROXY"
ANY = rf"{LATER}|{WHO}|{NET}|publish|raise|primus verify"
READ = [TAG, IMAGE, LIST]
JSON = b"Content-Type: application/json\r\n"


def of_steps() -> Iterator[tuple[str, Fault]]:
    """Each status at each step that it can happen at."""
    for step, what in STEPS.items():
        yield f"503 at the {step}", Fault(what, say(503), LATER)
        yield f"403 at the {step}", Fault(what, say(403, b'{"errors": []}'), LOGIN)
        yield f"418 at the {step}", Fault(what, say(418, b"<html>teapot</html>"), ANY)
        yield f"connection cut at the {step}", Fault(what, lambda _: None, NET)
    for step in ("manifest", "list", "tags", "blob"):
        lost = say(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "unknown"}]}')
        yield f"404 at the {step}", Fault(STEPS[step], lost, ANY)
    for step in ("start of an upload", "end of an upload", "manifest put", "tag put", "list put"):
        full = say(507, b'{"detail":{"Op":"mkdir","Err":28}}')
        yield f"full disk at the {step}", Fault(STEPS[step], full, ANY)
        yield f"405 at the {step}", Fault(STEPS[step], say(405), ANY)
        yield f"413 at the {step}", Fault(STEPS[step], say(413, b"too large"), ANY)
    for step in ("tag", "manifest", "list", "blob", "start of an upload"):
        yield (
            f"429 for an hour at the {step}",
            Fault(STEPS[step], say(429, Retry_After="3600"), LATER),
        )


def of_answers() -> Iterator[tuple[str, Fault]]:
    """Answers that are no answers."""
    page = say(200, b"<html>Sign in</html>", Content_Type="text/html")
    for step in ("tag", "manifest", "list", "tags", "blob"):
        what = STEPS[step]
        yield f"login page for the {step}", Fault(what, page, ANY)
        yield f"cut {step}", Fault(what, cut, ANY)
        yield f"one other bit in the {step}", Fault(what, changed(flipped), ANY)
        yield f"empty {step}", Fault(what, say(200), ANY)
        yield f"{step} in UTF-16", Fault(what, say(200, '{"a": 1}'.encode("utf-16")), ANY)
        yield f"a list in place of the {step}", Fault(what, say(200, b"[1]"), ANY)
        yield f"brackets in place of the {step}", Fault(what, say(200, b"[" * 99_999), ANY)
        yield f"huge {step}", Fault(what, say(200, b'{"a": "' + b"a" * (5 << 20) + b'"}'), ANY)
        yield f"{step} without headers", Fault(what, changed(without_headers), ANY)
    yield "list of numbers", Fault(LIST, say(200, b'{"manifests": [1, 2]}'), ANY)
    yield "list of nothing", Fault(LIST, say(200, b'{"manifests": null}'), ANY)
    yield "list of odd digests", Fault(LIST, say(200, b'{"manifests": [{"digest": "x/.."}]}'), ANY)
    yield "tags that are numbers", Fault(TAGS, say(200, b'{"tags": [1]}'), ANY)
    yield "tags that are a word", Fault(TAGS, say(200, b'{"tags": "v1"}'), ANY)
    endless = with_headers(Link='</v2/a/tags/list?n=1>; rel="next"')
    yield "tags without end", Fault(TAGS, endless, ANY)
    yield "manifest of another kind", Fault(TAG, with_headers(Content_Type="text/plain"), ANY)
    yield "lying digest", Fault(TAG, with_headers(Docker_Content_Digest="sha256:0"), ANY)
    yield "upload that starts nowhere", Fault(START, say(202), ANY)
    yield "upload to no address", Fault(START, say(202, Location="http://["), ANY)
    yield "upload to a file", Fault(START, say(202, Location="file:///etc/passwd"), ANY)
    yield "upload that ends at once", Fault(SENDS, say(201), ANY)
    yield "tag that is not kept", Fault(SETS, say(201), ANY)
    yield "list that is not kept", Fault(LISTS, say(201), ANY)
    yield "manifest that is not kept", Fault(PUTS, say(201), ANY)


def of_http() -> Iterator[tuple[str, Fault]]:
    """What is no HTTP, or too much of it."""
    plain = {
        "not HTTP": b"hello\r\n\r\n",
        "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
        "HTTP 9": b"HTTP/9.9 200 OK\r\n\r\n",
        "no status": b"HTTP/1.1 abc\r\n\r\n",
        "half a header": b"HTTP/1.1 200 OK\r\nContent-Le",
        "a header of 100 kB": HEAD + b"X: " + b"x" * 100_000 + b"\r\n\r\n",
        "a thousand headers": HEAD + b"X: y\r\n" * 1000 + b"\r\n",
        "a negative length": HEAD + b"Content-Length: -5\r\n\r\n{}",
        "a length that is a word": HEAD + b"Content-Length: many\r\n\r\n{}",
        "a broken chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",
        "half a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\n{",
        "gzip that is none": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        "an unknown encoding": HEAD + b"Content-Encoding: x\r\nContent-Length: 2\r\n\r\n{}",
        "an answer without end": HEAD + b"\r\n" + b"{" * (6 << 20),
    }
    for name, data in plain.items():
        yield name, Fault("", raw(data), ANY)
        yield f"{name} for a blob", Fault(BLOB, raw(data), ANY)
    moves = {
        "a circle": "/v2/",
        "nowhere": "",
        "a closed port": "http://127.0.0.1:1/",
        "a file": "file:///etc/passwd",
        "no address": "http://[",
        "an unknown host": "http://none.invalid/",
    }
    for name, address in moves.items():
        yield f"moved to {name}", Fault("", say(307, Location=address), ANY)
    yield (
        "a circle of one",
        Fault("", lambda handler: say(302, Location=handler.path)(handler), ANY),
    )
    yield "reset", Fault("", reset, NET)
    yield "reset in an upload", Fault(SENDS, reset, NET, before=True)
    yield "not modified", Fault("", say(304), ANY)
    yield "no content", Fault("", say(204), ANY)


def of_time() -> Iterator[tuple[str, Fault]]:
    """What takes for ever."""
    for step in ("tag", "list", "blob", "start of an upload", "manifest put"):
        yield f"silent {step}", Fault(STEPS[step], silent, NET)
    yield "silent upload", Fault(SENDS, silent, NET)
    yield "silent upload that reads nothing", Fault(SENDS, silent, NET, before=True)
    yield "headers that drip", Fault("", drip(HEAD, b"X: y\r\n"), NET)
    yield "a body that drips", Fault("", drip(HEAD + b"Content-Length: 9999\r\n\r\n", b" "), NET)
    yield (
        "chunks that drip",
        Fault("", drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"), NET),
    )
    yield "a blob that drips", Fault(BLOB, drip(HEAD + b"Content-Length: 9999\r\n\r\n", b"x"), NET)
    yield "headers of an upload that drip", Fault(SENDS, drip(HEAD, b"X: y\r\n"), NET)
    yield "statuses that drip", Fault("", drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), NET)


def of_logins() -> Iterator[tuple[str, Fault]]:
    """Challenges and token services."""
    yield "login without a challenge", Fault("", say(401), LOGIN)
    for name, header in {
        "kind": "Negotiate",
        "realm": 'Bearer service="s"',
        "address": 'Bearer realm="http://[",service="s"',
        "place": 'Bearer realm="/token",service="s"',
        "closed port": 'Bearer realm="http://127.0.0.1:1/token",service="s"',
        "word": "Bearer realm",
        "basic": 'Basic realm="x"',
    }.items():
        yield f"challenge with an odd {name}", Fault("", challenge(header), rf"{LOGIN}|{ANY}")
    for name, play in {
        "500": say(500),
        "403": say(403),
        "404": say(404),
        "a page": say(200, b"<html>"),
        "nothing": say(200),
        "no token": say(200, b"{}"),
        "a number": say(200, b'{"token": 7}'),
        "two lines": say(200, b'{"token": "a\\nb"}'),
        "a token that is refused": say(200, b'{"token": "a"}'),
        "a redirection": say(302, Location="http://127.0.0.1:1/"),
        "a cut": lambda _: None,
        "no HTTP": raw(b"hello\r\n\r\n"),
        "silence": silent,
        "drops": drip(HEAD + b"Content-Length: 9999\r\n\r\n", b" "),
    }.items():
        yield f"token service with {name}", Fault("", token(play), rf"{LOGIN}|{ANY}")


FAULTS = dict([*of_steps(), *of_answers(), *of_http(), *of_time(), *of_logins()])


# -- the commands


@dataclass(frozen=True)
class World:
    """An image that is published and signed in a registry, and how to do it again."""

    root: Path
    ready: Ready
    store: Store
    port: int
    signer: Signer
    trust: Trust

    def publish(self, base: str, word: str) -> None:
        name = f"{base}/{word}"
        publish(self.ready, self.store, name, Progress(), signing=self.signer)
        there = Repository(f"127.0.0.1:{self.port}/{name.partition('/')[2]}")
        assert there.digest(self.ready.tag) == self.ready.image.digest
        assert len(there.referrers(self.ready.image.digest)) > len(self.ready.documents)

    def verify(self, base: str, _word: str) -> None:
        result = verify_image(f"{base}/whole:{self.ready.tag}", self.trust)
        for fault in result.faults:
            assert not bad(fault), fault
        if result.faults:
            raise PrimusError(result.faults[0], hint="again, name")

    def tag(self, base: str, _word: str) -> None:
        move_tag(Repository(f"{base}/whole"), "latest-demo", self.ready.tag, self.trust)

    def withdraw(self, base: str, word: str) -> None:
        there = Repository(f"{base}/whole")
        image = withdrawable(there, self.ready.tag, None)
        withdraw(there, image, Withdrawal(reason=word, date="2026-11-29"), self.signer)

    def diff(self, base: str, _word: str) -> None:
        sides._of_registry(f"{base}/whole", self.ready.tag)


def bad(sentence: str) -> str:
    """What a user must not read in a sentence; empty if there is nothing."""
    found = re.search(
        r"\b[A-Z]\w*(Error|Exception|Warning|Timeout|Refused)\b|Traceback|urllib3|requests\.|"
        r"object at 0x|\[Errno|b'|None\b|goroutine|[\x00-\x09\x0b-\x1f]|_[A-Z]+_[A-Z]+",
        sentence,
    )
    if found:
        return f"it says {found[0]!r}"
    return "it is too long" if len(sentence) > 700 else ""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("sentences")
    words = ["cosign", "generate-key-pair", "--output-key-prefix=ours"]
    environment = {**os.environ, "COSIGN_PASSWORD": "a word"}
    subprocess.run(words, cwd=root, env=environment, check=True, capture_output=True)
    kit = make_project(root / "project", size=10_000)
    with registry(root / "registry") as port, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSIGN_PASSWORD", "a word")
        patch.setenv("DOCKER_CONFIG", str(root))
        patch.setattr(Trust, "rejects", cache(Trust.rejects))
        patch.setattr(Signer, "bundle", signed_once(Signer.bundle))
        signer = Signer(key=str(root / "ours.key"))
        trust = Trust(key=str(root / "ours.pub"))
        store = Project(kit.root).workspace.store
        made = World(root, prepared(kit), store, port, signer, trust)
        made.publish(f"127.0.0.1:{port}/rocm", "whole")
        shutil.copytree(root / "registry/data", root / "whole")
        yield made


def signed_once(sign: Callable[[Signer, object], bytes]) -> Callable[[Signer, object], bytes]:
    """Sign a statement once only: cosign takes a second."""
    made: dict[bytes, bytes] = {}

    def bundle(signer: Signer, content: object) -> bytes:
        key = canonical_json(content)
        if key not in made:
            made[key] = sign(signer, content)
        return made[key]

    return bundle


COMMANDS = ("publish", "verify", "tag", "withdraw", "diff")


Outcome = dict[str, list[str]]


@pytest.fixture(scope="module")
def played() -> dict[str, Outcome]:
    """What became of each fault. The results are written when one run has played them all."""
    return {}


def result_of(played: Mapping[str, Outcome]) -> dict[str, object]:
    """What one run found: its counts, and what became of each fault in each command."""
    counts: dict[str, int] = {}
    for outcome in played.values():
        for kind, rows in outcome.items():
            counts[kind] = counts.get(kind, 0) + len(rows)
    return {
        "generated": "pytest tests/integration/test_registry_sentences.py --slow "
        "--regenerate-golden, one run",
        "date": datetime.now(UTC).date().isoformat(),
        "faults": len(played),
        "commands": list(COMMANDS),
        **counts,
        "outcomes": dict(played),
    }


def sample() -> list[object]:
    """Every fault is played with --slow; one of each dozen always."""
    rows = []
    for number, name in enumerate(FAULTS):
        rows.append(pytest.param(name, marks=[pytest.mark.slow] * bool(number % 12)))
    return rows


@pytest.mark.parametrize("name", sample())
def test_a_fault_is_overcome_or_told_well(
    world: World,
    name: str,
    played: dict[str, Outcome],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(transport, "_TIMEOUT", (1.0, 1.5))
    monkeypatch.setattr(transport, "_PATIENCE", 2.0)
    monkeypatch.setattr(traffic, "_PATIENCE_S", 3.0)
    monkeypatch.setattr("time.sleep", lambda _: None)
    outcome: Outcome = {"overcome": [], "named": [], "bad": []}
    with Proxy(world.port) as proxy:
        base = f"127.0.0.1:{proxy.server_port}/rocm"
        for command in COMMANDS:
            proxy.fault = FAULTS[name]
            proxy.hits = 0
            begun = time.monotonic()
            kind = "overcome"
            try:
                getattr(world, command)(base, command)
            except PrimusError as error:
                kind = "named"
                outcome["bad"] += problems_of(name, command, error)
            seconds = time.monotonic() - begun
            if seconds > LONGEST:
                outcome["bad"].append(f"{command}: it took {seconds:.0f} s")
            if proxy.hits:
                outcome[kind].append(command)
    here = f"127.0.0.1:{world.port}/rocm"
    left = verify_image(f"{here}/whole:{world.ready.tag}", world.trust).faults
    outcome["bad"] += [f"afterwards: {fault}" for fault in left]
    restore(world.root)
    played[name] = outcome
    if request.config.getoption("--regenerate-golden") and played.keys() == FAULTS.keys():
        RESULT.write_text(json.dumps(result_of(played), indent=1) + "\n")
    assert not outcome["bad"], "\n".join(outcome["bad"])


def problems_of(name: str, command: str, error: PrimusError) -> list[str]:
    problems = []
    for sentence in (error.message, error.hint or ""):
        if bad(sentence):
            problems.append(f"{command}: {bad(sentence)}: {sentence}")
    if not error.hint:
        problems.append(f"{command}: it says not what to do: {error.message}")
    elif not re.search(FAULTS[name].remedy, error.hint):
        problems.append(f"{command}: {error.message}: another remedy: {error.hint}")
    return problems


def test_every_fault_was_played_and_none_told_badly() -> None:
    content = json.loads(RESULT.read_text())
    results = content["outcomes"]
    assert content == {**result_of(results), "date": content["date"]}
    assert len(FAULTS) >= 100
    assert results.keys() == FAULTS.keys()
    for name, outcome in results.items():
        assert outcome["bad"] == [], name
        assert outcome["overcome"] or outcome["named"], name


@pytest.mark.parametrize("name", ["silent blob", "a blob that drips", "manifest that is silent"])
def test_a_base_image_that_never_arrives_is_told_in_time(
    world: World, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "_PATIENCE_S", 2.0)
    monkeypatch.setattr(traffic, "_SLOWEST", 1e9)
    monkeypatch.setenv("HOME", str(tmp_path))
    with Proxy(world.port) as proxy:
        host = f"127.0.0.1:{proxy.server_port}"
        insecure = tmp_path / ".config/containers/registries.conf"
        insecure.parent.mkdir(parents=True)
        insecure.write_text(f'[[registry]]\nlocation = "{host}"\ninsecure = true\n')
        image = f"{host}/rocm/whole@{world.ready.image.digest}"
        proxy.fault = FAULTS.get(name) or Fault(IMAGE, silent, NET)
        begun = time.monotonic()
        with pytest.raises(HostError, match="does not answer in time") as failed:
            remotes.resolve_image("based", image)
        assert not bad(str(failed.value))
        assert proxy.hits
        assert time.monotonic() - begun < 30


def test_tls_that_fails_is_told_well(world: World, tmp_path: Path) -> None:
    """Registries with TLS whose certificate is unknown, or that do not speak TLS to the end."""
    certificate = make_certificate(tmp_path / "server.pem")
    told = {}
    for name in ("unknown certificate", "closed after the handshake", "another host"):
        with Proxy(world.port) as proxy:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            proxy.socket = context.wrap_socket(proxy.socket, server_side=True)
            host = "localhost" if name == "another host" else "127.0.0.1"
            with pytest.raises(PrimusError) as failed:
                world.diff(f"{host}:{proxy.server_port}/rocm", "")
            told[name] = str(failed.value)
    for sentence in told.values():
        assert not bad(sentence)
        assert "certificate" in sentence
