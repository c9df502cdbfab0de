"""A registry, or a proxy in its place, that names other addresses: none of them sees a login."""

import json
import ssl
import subprocess
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from host_tools import missing, needs
from loopback import make_certificate
from primus_images.errors import HostError, PrimusError
from primus_images.oci.store import digest_of
from primus_images.release import transport
from primus_images.release.artifact import EMPTY
from primus_images.release.certificates import context_for
from primus_images.release.logins import login_for
from primus_images.release.registry import Repository
from primus_images.release.transport import Origin

pytestmark = needs("openssl")

SECRETS = ("me:word", b64encode(b"me:word").decode(), "again", "granted")
Answer = tuple[int, dict[str, str], bytes]
# What the registry answers to a method and a path; None: what an honest one does.
Lie = Callable[["Place", str, str], Answer | None]


class Place(ThreadingHTTPServer):
    """A registry that wants a token and lies, and two other servers, one with TLS, that listen."""

    daemon_threads = True

    def __init__(self, certificate: Path | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name = f"127.0.0.1:{self.server_port}"
        self.url = f"http://{self.name}"
        self.heard: list[str] = []
        self.secure: Place | None = None
        self.clear: Place | None = None
        self.lie: Lie | None = None
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self.url = f"https://{self.name}"

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that break off."""


class Handler(BaseHTTPRequestHandler):
    server: Place

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode("latin-1")
        self.server.heard.append(f"{self.command} {self.path}\n{self.headers}\n{body}")
        path = self.path.partition("?")[0]
        answer = None
        if self.server.lie:
            answer = self.server.lie(self.server, self.command, path)
        status, headers, content = answer or self._honest(path)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_POST = do_PUT = do_PATCH = do_HEAD = do_GET

    def _honest(self, path: str) -> Answer:
        if self.server.secure is None or path == "/token":
            return 200, {}, b'{"token": "granted"}'
        if self.headers["Authorization"] != "Bearer granted":
            return challenge(f"{self.server.url}/token")
        if "/uploads/" in path:
            return 202, {"Location": "/v2/a/b/blobs/uploads/1"}, b""
        return 200, {}, b'{"tags": [], "manifests": []}'

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def challenge(realm: str) -> Answer:
    return 401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="s"'}, b""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls") / "server.pem")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "XDG_RUNTIME_DIR/containers").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def place(certificate: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    netrc = home / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password word\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with Place(certificate) as registry, Place(certificate) as secure, Place() as clear:
        registry.secure = secure
        registry.clear = clear
        for server in (registry, secure, clear):
            Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield registry
        for server in (registry, secure, clear):
            server.shutdown()


def log_in(home: Path, name: str, **login: str) -> None:
    path = home / "XDG_RUNTIME_DIR/containers/auth.json"
    path.write_text(json.dumps({"auths": {name: login}}))


def realm(address: str, only: str = "") -> Lie:
    """Name this address as token service, or only to who asks for one path."""

    def lie(place: Place, _method: str, path: str) -> Answer | None:
        wanted = only == path or not only
        if path == "/token" or not wanted:
            return None
        return challenge(filled(address, place))

    return lie


def after_login(path: str, status: int, header: str, address: str, method: str = "") -> Lie:
    """Answer one path with a header that names this address."""

    def lie(place: Place, asked: str, asked_path: str) -> Answer | None:
        logged_in = "Bearer granted" in place.heard[-1]
        if not (logged_in or path == "/token") or not asked_path.startswith(path):
            return None
        if method not in ("", asked):
            return None
        return status, {header: filled(address, place)}, b'{"tags": [], "manifests": []}'

    return lie


def ping_moved(place: Place, _method: str, path: str) -> Answer | None:
    """Send who asks for the way to log in to another server, which wants the login."""
    if path != "/v2/":
        return None
    assert place.secure
    place.secure.lie = lambda there, _method, asked: (
        None if asked == "/token" else challenge(f"{there.url}/token")
    )
    return 307, {"Location": f"{place.secure.url}/v2/"}, b""


def cookie(place: Place, _method: str, path: str) -> Answer | None:
    """Set a session's cookie, and then move a list to another server."""
    if "Bearer granted" not in place.heard[-1]:
        return None
    assert place.secure
    if path.startswith("/v2/a/b/tags"):
        return 307, {"Location": f"https://{place.secure.name}/tags"}, b""
    return 404, {"Set-Cookie": "sid=again; Path=/"}, b""


def filled(address: str, place: Place) -> str:
    assert place.secure
    assert place.clear
    return address.format(
        me=place.name,
        secure=place.secure.name,
        clear=place.clear.name,
        port=place.secure.server_port,
    )


UPLOADS = "/v2/a/b/blobs/uploads/"
LIES: dict[str, Lie] = {
    "realm in clear": realm("http://{clear}/token"),
    "realm on another port": realm("https://{secure}/token"),
    "realm under another name": realm("https://localhost:{port}/token"),
    "realm on an address with the same end": realm("https://1.0.0.1:{port}/token"),
    "realm with the registry as user": realm("https://{me}@{secure}/token"),
    "realm with a backslash": realm("https://{me}\\@{secure}/token"),
    "realm with another backslash": realm("https://{secure}\\@{me}/token"),
    "realm in capitals": realm("HTTP://{clear}/token"),
    "realm without a scheme": realm("//{secure}/token"),
    "realm for other programs": realm("https://{secure}/token", only="/v2/"),
    "realm in clear for other programs": realm("http://{clear}/token", only="/v2/"),
    "realm of uploads": realm("https://{secure}/token", only=UPLOADS),
    "token moved": after_login("/token", 302, "Location", "https://{secure}/token"),
    "token moved for good": after_login("/token", 308, "Location", "http://{clear}/token"),
    "token moved with its form": after_login("/token", 307, "Location", "https://{secure}/token"),
    "realm twice": realm('https://{me}/token",realm="https://{secure}/token'),
    "realm after a space": realm(" https://{secure}/token"),
    "realm after a fragment": realm("https://{secure}#@{me}/token"),
    "realm with one slash": realm("https:/{secure}/token"),
    "ping moved": ping_moved,
    "upload elsewhere by the same scheme": after_login(
        UPLOADS, 202, "Location", "//{secure}/upload"
    ),
    "upload elsewhere": after_login(UPLOADS, 202, "Location", "https://{secure}/upload"),
    "upload in clear": after_login(UPLOADS, 202, "Location", "http://{clear}/upload"),
    "upload elsewhere later": after_login(
        UPLOADS, 202, "Location", "https://{secure}/upload", method="PATCH"
    ),
    "upload as another user": after_login(UPLOADS, 202, "Location", "https://{me}@{secure}/upload"),
    "blob moved in clear": after_login("/v2/a/b/blobs/sha", 302, "Location", "http://{clear}/"),
    "upload moved": after_login(UPLOADS, 307, "Location", "https://{secure}/upload"),
    "manifest moved": after_login("/v2/a/b/manifests", 307, "Location", "https://{secure}/m"),
    "manifest moved in clear": after_login("/v2/a/b/manifests", 302, "Location", "http://{clear}/"),
    "list moved after a cookie": cookie,
    "list goes on elsewhere": after_login(
        "/v2/a/b/tags", 200, "Link", '<https://{secure}/x>; rel="next"'
    ),
    "list goes on in clear": after_login(
        "/v2/a/b/tags", 200, "Link", '<http://{clear}/x>; rel="next"'
    ),
}
# A registry may keep a manifest elsewhere, such as in a cloud's storage.
NO_ERROR = {"manifest moved", "list moved after a cookie"}


# Only what asks for a token sends an identity token.
KINDS = [(name, "password") for name in LIES]
KINDS += [(name, "identity token") for name in LIES if name.startswith("token")]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_no_other_address_sees_a_login(place: Place, home: Path, name: str, kind: str) -> None:
    if kind == "password":
        log_in(home, place.name, auth=b64encode(b"me:word").decode())
    else:
        log_in(home, place.name, auth="", identitytoken="again")
    place.lie = LIES[name]
    there = Repository(f"{place.name}/a/b")
    errors = []
    asks = (
        lambda: there.digest("v1"),
        lambda: there.blob(digest_of(EMPTY), home / "blob", len(EMPTY)),
        there.tags,
        there.check_uploads,
    )
    for ask in asks:
        try:
            ask()
        except PrimusError as error:
            errors.append(error)
    assert place.secure
    assert place.clear
    for other in (place.secure, place.clear):
        for request in other.heard:
            assert not any(secret in request for secret in SECRETS), request
    if name not in NO_ERROR:
        named = "\n".join(map(str, errors))
        addresses = (place.secure.name, place.clear.name, str(place.secure.server_port))
        assert any(address in named for address in (*addresses, "an address that is none")), named


def test_an_honest_registry_with_tls_on_this_machine_gets_its_login(
    place: Place, home: Path
) -> None:
    log_in(home, place.name, auth=b64encode(b"me:word").decode())
    there = Repository(f"{place.name}/a/b")
    assert there.tags() == []
    there.check_uploads()
    there.upload(digest_of(EMPTY), EMPTY)
    assert not there.plain


@pytest.mark.parametrize(
    "offers",
    [
        ('Bearer realm="URL/token",service="s"', 'Basic realm="Registry"'),
        ('Basic realm="Registry"', 'Bearer realm="URL/token",service="s"'),
        ('bearer Realm = "URL/token" , Service=s',),
        ("Negotiate", 'Bearer realm="URL/token",service="s",scope="repository:a/b:pull,push"'),
    ],
)
def test_of_several_ways_to_log_in_the_token_service_is_taken(
    place: Place, home: Path, offers: tuple[str, ...]
) -> None:
    """Azure's and Nexus' registries offer two."""
    log_in(home, place.name, auth=b64encode(b"me:word").decode())

    def lie(place: Place, _method: str, path: str) -> Answer | None:
        if path == "/token" or place.heard[-1].count("Bearer granted"):
            return None
        return 401, {"WWW-Authenticate": ", ".join(offers).replace("URL", place.url)}, b""

    place.lie = lie
    there = Repository(f"{place.name}/a/b")
    assert there.tags() == []
    there.require_login_stays()


@pytest.mark.parametrize("kind", ["Basic", "Negotiate"])
def test_a_second_way_to_log_in_may_lie_no_less(place: Place, home: Path, kind: str) -> None:
    log_in(home, place.name, auth=b64encode(b"me:word").decode())
    assert place.clear
    elsewhere = f'{kind} realm="x", Bearer realm="{place.clear.url}/token"'
    place.lie = lambda *_: (401, {"WWW-Authenticate": elsewhere}, b"")
    there = Repository(f"{place.name}/a/b")
    for ask in (there.tags, there.require_login_stays):
        with pytest.raises(HostError, match=place.clear.name):
            ask()
    assert place.clear.heard == []


def test_a_login_of_dockers_oldest_file_is_read(home: Path) -> None:
    path = home / "HOME/.dockercfg"
    path.parent.mkdir(exist_ok=True)
    entry = {"auth": b64encode(b"me:word").decode()}
    path.write_text(json.dumps({"registry.example.com": entry}))
    assert login_for("registry.example.com/rocm/primus").username == "me"


@pytest.mark.parametrize(
    ("service", "registry", "allowed"),
    [
        ("https://auth.docker.io/token", "https://registry-1.docker.io/", True),
        ("https://gitlab.com/jwt/auth", "https://registry.gitlab.com/", True),
        ("https://ghcr.io/token", "https://ghcr.io/", True),
        ("https://auth.ghcr.io/token", "https://ghcr.io/", True),
        ("https://quay.io/v2/auth", "https://quay.io/", True),
        ("https://mine.azurecr.io/oauth2/token", "https://mine.azurecr.io/", True),
        ("https://gitlab.example.com/jwt/auth", "https://registry.example.com/", True),
        ("https://gitlab.example.co.uk/jwt/auth", "https://registry.example.co.uk/", True),
        ("https://auth.shop.co.uk/token", "https://shop.co.uk/", True),
        ("https://registry.corp.example/token", "https://registry.corp.example:5000/", True),
        ("http://registry.corp.example/token", "https://registry.corp.example/", False),
        ("https://evil.io/token", "https://ghcr.io/", False),
        ("https://evil.azurecr.io/oauth2/token", "https://mine.azurecr.io/", False),
        ("https://azurecr.io/oauth2/token", "https://mine.azurecr.io/", False),
        ("https://evil.co.uk/token", "https://shop.co.uk/", False),
        ("https://evil.com.au/token", "https://registry.com.au/", False),
        ("https://evil.github.io/token", "https://mine.github.io/", False),
        (
            "https://2.dkr.ecr.eu-west-1.amazonaws.com/token",
            "https://1.dkr.ecr.eu-west-1.amazonaws.com/",
            False,
        ),
        ("https://notgitlab.com/token", "https://registry.gitlab.com/", False),
        ("https://gitlab.com.evil.example/token", "https://registry.gitlab.com/", False),
        ("https://auth.docker.io./token", "https://registry-1.docker.io/", False),
        ("https://1.0.0.1/token", "https://127.0.0.1/", False),
        ("https://[::1]/token", "https://127.0.0.1/", False),
        ("http://127.0.0.1:5001/token", "http://127.0.0.1:5000/", False),
    ],
)
def test_the_token_service_is_in_the_domain_of_the_registry(
    service: str, registry: str, allowed: bool
) -> None:
    assert Origin.of(service).serves_logins_of(Origin.of(registry)) is allowed


@pytest.mark.parametrize(
    "address",
    ["https://me@registry.example", "https://registry.example\\@elsewhere", "https:\\\\registry"],
)
def test_an_address_that_two_readers_may_understand_differently_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="a name or a backslash"):
        Origin.of(address)


@pytest.mark.parametrize("verify", [True, False])
def test_certificates_are_verified_unless_the_user_says_otherwise(verify: bool) -> None:
    context = context_for("registry.example", verify=verify)
    assert context.check_hostname is verify
    assert (context.verify_mode == ssl.CERT_REQUIRED) is verify


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("certificate has expired", "renew the certificate, or set the clock"),
        ("certificate is not yet valid", "renew the certificate, or set the clock"),
        ("Hostname mismatch: it does not match", "use a name that the certificate is for"),
        ("self-signed certificate", "/etc/containers/certs.d/registry.example/ca.crt"),
    ],
)
def test_a_certificate_that_is_not_trusted_has_its_remedy(said: str, hint: str) -> None:
    error = ssl.SSLCertVerificationError()
    error.verify_message = said
    reason, remedy = transport._reason(error, "registry.example")
    assert reason == f"has a certificate at registry.example that is not trusted: {said}"
    assert hint in remedy


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(113, "No route to host"), "No route to host"),
        (OSError(), "the request failed"),
        (ValueError("odd"), "the request failed"),
    ],
)
def test_a_request_that_fails_in_another_way_has_the_systems_reason(
    error: Exception, said: str
) -> None:
    reason, remedy = transport._reason(error, "registry.example")
    assert reason == f"does not answer: registry.example: {said}"
    assert remedy == "check name and network, and try again"


def test_an_authority_of_ones_own_is_read_where_podman_reads_it(
    place: Place, home: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    there = f"{place.name}/a/b"
    with pytest.raises(HostError, match=r"has a certificate at .* that is not trusted") as refused:
        Repository(there).tags()
    assert f"/etc/containers/certs.d/{place.name}/ca.crt" in str(refused.value.hint)
    folder = home / "HOME/.config/containers/certs.d" / place.name
    folder.mkdir(parents=True)
    (folder / "ca.crt").write_text("no certificate")
    with pytest.raises(HostError, match=r"the certificate .*ca\.crt cannot be used"):
        Repository(there).tags()
    (folder / "ca.crt").write_bytes(certificate.read_bytes())
    log_in(home, place.name, auth=b64encode(b"me:word").decode())
    assert Repository(there).tags() == []


def test_a_helper_that_hangs_is_a_sentence(
    place: Place, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = home / "docker-credential-slow"
    helper.write_text("#!/bin/sh\nsleep 60\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(home), prepend=":")
    monkeypatch.setattr("primus_images.release.logins._HELPER_PATIENCE", 0.2)
    path = home / "XDG_RUNTIME_DIR/containers/auth.json"
    path.write_text(json.dumps({"credHelpers": {place.name: "slow"}}))
    with pytest.raises(HostError, match=r"docker-credential-slow, .* does not answer within"):
        Repository(f"{place.name}/a/b").tags()


ENDS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "ends the connection"),
    "no head": (b"hello\r\n\r\n", "does not speak HTTP"),
    "half an answer": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
        "breaks off its answer at",
    ),
    "half a chunk": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{",
        "breaks off its answer at",
    ),
    "no chunk": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "breaks off its answer at",
    ),
    "broken compression": (
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        "what cannot be read",
    ),
    "a circle": (
        b"HTTP/1.1 302 Found\r\nConnection: close\r\nContent-Length: 0\r\n"
        b"Location: /v2/a/b/tags/list\r\n\r\n",
        "a circle of redirections",
    ),
    "a long pause": (
        b"HTTP/1.1 503 Busy\r\nRetry-After: 900\r\nContent-Length: 0\r\n\r\n",
        "refuses tags/list: status 503",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_failure_is_a_sentence_without_names_of_classes(name: str, home: Path) -> None:
    data, expected = ENDS[name]

    class Broken(BaseHTTPRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                self.connection.recv(1 << 16)
                self.connection.sendall(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with pytest.raises(HostError, match=expected) as failed:
            Repository(f"127.0.0.1:{server.server_port}/a/b").tags()
        server.shutdown()
    assert not any(word in str(failed.value) for word in ("Error", "Exception", "urllib3"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("localhost:1/a/b", "localhost:1 refuses connections"),
        ("none.invalid/a/b", "no address is known of none.invalid"),
    ],
)
def test_a_registry_that_is_not_there_is_a_sentence(name: str, expected: str, home: Path) -> None:
    with pytest.raises(HostError, match=expected):
        Repository(name).tags()


def test_skopeo_and_primus_read_the_same_login(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "special": home / "special.json",
        "docker": home / "DOCKER_CONFIG/config.json",
        "runtime": home / "XDG_RUNTIME_DIR/containers/auth.json",
        "config": home / "XDG_CONFIG_HOME/containers/auth.json",
        "home": home / "HOME/.docker/config.json",
    }
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(files["special"]))
    monkeypatch.setenv("DOCKER_CONFIG", str(home / "DOCKER_CONFIG"))
    for user, path in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        auths = {}
        for name in ("r.example", "r.example/a"):
            word = f"{user}-{name.partition('/')[2]}:word"
            auths[name] = {"auth": b64encode(word.encode()).decode()}
        path.write_text(json.dumps({"auths": auths}))
    for user, path in files.items():
        assert login_for("r.example/c").username == f"{user}-"
        assert login_for("r.example/a/b").username == f"{user}-a"
        if not missing("skopeo"):
            assert skopeo_login("r.example") == f"{user}-"
        path.unlink()
        if user == "special":
            monkeypatch.delenv("REGISTRY_AUTH_FILE")
        if user == "docker":
            monkeypatch.delenv("DOCKER_CONFIG")
    assert login_for("r.example/c").username == ""


def skopeo_login(host: str) -> str:
    command = ["skopeo", "login", "--get-login", host]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
