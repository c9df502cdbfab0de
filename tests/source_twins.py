"""Twins of the sources on 127.0.0.1: they replay how AMD's and PyTorch's indexes, registries and git hosts answer.

The tables lie beside it: ``twin_indexes``, ``twin_wheels``, ``twin_registries``, ``twin_repositories``. Each row
names the public source of the behaviour, and what the lock must do: work, or say one sentence.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import socket
import ssl
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from loopback import make_certificate, make_wheel

RFC = "https://www.rfc-editor.org/rfc/rfc9110"
PEP = "https://peps.python.org/pep-{}/"
OCI = "https://github.com/opencontainers/distribution-spec/blob/main/spec.md"
HUB = "https://docs.docker.com/docker-hub/usage/pulls/"
TOKEN = "https://distribution.github.io/distribution/spec/auth/token/"
FILE = hashlib.shake_256(b"rocm").digest(200_000)
SHA = hashlib.sha256(FILE).hexdigest()
VERSION = "10.0.0"


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """One way to answer. ``way`` is what is locked: an sdist, a wheel (through pip), an image or a commit; ``says`` is
    the sentence that must end it (None: it works), ``warns`` a line that must be said on the way.
    """

    name: str
    source: str
    answer: Callable[[Answer, str], None]
    way: str = "sdist"
    says: str | None = None
    warns: str | None = None
    package: str = "rocm"
    version: str = VERSION
    check: Callable[[Twins, Any], bool] = lambda _, __: True


class Answer(http.server.BaseHTTPRequestHandler):
    """One request to a twin: the first part of its path names the behaviour."""

    protocol_version = "HTTP/1.1"
    twins: Twins

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.lstrip("/")
        if path.startswith("v2/"):
            path = path[3:]
        name, _, rest = path.partition("/")
        self.name = name
        self.twins.began.setdefault(name, time.monotonic())
        self.twins.seen[name].append((self.command, rest, dict(self.headers)))
        if name in ("", "token"):
            return self.twins.token(self) if name else self.challenge()
        behaviour = self.twins.behaviours.get(name)
        if behaviour is None:
            return self.reply(404)
        return behaviour.answer(self, rest)

    do_HEAD = do_POST = do_GET

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Answer with these headers (``_`` stands for ``-``)."""
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if "Content_Length" not in headers and "Transfer_Encoding" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def challenge(self) -> None:
        """A registry's 401."""
        host = self.headers["Host"]
        realm = f'Bearer realm="http://{host}/token",service="twin",scope="repository:{self.name}/x:pull"'
        self.reply(401, b"{}", WWW_Authenticate=realm, Content_Type="application/json")

    def nth(self, what: str = "") -> int:
        """How often this was asked before."""
        with self.twins.guard:
            self.twins.counts[self.name, what] += 1
            return self.twins.counts[self.name, what] - 1

    def hang(self) -> None:
        """Send nothing more."""
        self.twins.done.wait(30)
        self.close_connection = True

    def reset(self) -> None:
        """End the connection as a broken middle box does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


@dataclass
class Twins:
    folder: Path
    port: int = 0
    tls_port: int = 0
    untrusted_port: int = 0
    certificate: Path = Path()
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    seen: dict[str, list[tuple[str, str, dict[str, str]]]] = field(default_factory=lambda: defaultdict(list))
    began: dict[str, float] = field(default_factory=dict)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    guard: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)
    wheel: Path = Path()
    commits: dict[str, str] = field(default_factory=dict)
    tops: dict[str, str] = field(default_factory=dict)

    def address(self, behaviour: Behaviour) -> str:
        """The behaviour's index, image or repository."""
        name = behaviour.name
        if behaviour.way == "image":
            return f"127.0.0.1:{self.port}/{name}/x@sha256:{self.digest(name)}"
        if behaviour.way == "git":
            return f"http://127.0.0.1:{self.port}/{name}/main.git"
        if name == "name-unknown":
            return "https://index.twin.invalid/simple"
        if name == "refused":
            return "http://127.0.0.1:9/simple"
        if name == "redirect-to-http":
            return f"https://127.0.0.1:{self.tls_port}/{name}/simple"
        if name == "certificate":
            return f"https://127.0.0.1:{self.untrusted_port}/{name}/simple"
        if name == "no-tls":
            return f"https://127.0.0.1:{self.port}/{name}/simple"
        return f"http://127.0.0.1:{self.port}/{name}/simple"

    def digest(self, name: str) -> str:
        """The digest that the image is pinned to."""
        return self.tops[name]

    def token(self, answer: Answer) -> None:
        """The registry's token service."""
        scope = unquote(urlsplit(answer.path).query)
        number = len(self.seen["token"])
        issued = f"t{number}-{'x' if 'token-expires' in scope else 'y'}"
        answer.reply(200, json.dumps({"token": issued, "expires_in": 300}).encode(), Content_Type="application/json")


@contextmanager
def twins(folder: Path, behaviours: Sequence[Behaviour]) -> Iterator[Twins]:
    """All twins, on a port for http and two for https, of which one has a certificate that nobody trusts."""
    here = Twins(folder)
    here.behaviours = {one.name: one for one in behaviours}
    here.certificate = make_certificate(folder / "trusted.pem")
    other = make_certificate(folder / "other.pem")
    (folder / "files").mkdir()
    here.wheel = make_wheel(folder / "files", "torch", "2.12.0+rocm10.0.0", needs=())
    make_wheel(folder / "files", "ROCm_Thing", "1.0")
    handler = type("Handler", (Answer,), {"twins": here})
    servers = [_server(handler, None), _server(handler, here.certificate), _server(handler, other)]
    here.port, here.tls_port, here.untrusted_port = (server.server_address[1] for server in servers)
    try:
        yield here
    finally:
        here.done.set()
        for server in servers:
            server.shutdown()
            server.server_close()


def _server(handler: Any, certificate: Path | None) -> http.server.ThreadingHTTPServer:
    class Quiet(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *args: object) -> None:
            pass

    server = Quiet(("127.0.0.1", 0), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server
