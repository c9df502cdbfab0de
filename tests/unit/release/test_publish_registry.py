"""Logging in to a registry: what is asked, what is shown to whom."""

import gc
import json
import os
import warnings
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter

from primus_images.cli.main import _report
from primus_images.errors import HostError, PrimusError
from primus_images.oci.store import digest_of
from primus_images.release import transport
from primus_images.release.artifact import Document, artifact
from primus_images.release.registry import Repository
from primus_images.release.statement import BUNDLE


class Server(ThreadingHTTPServer):
    """A registry that wants a token, and the service that gives one: to ``me``, to who refreshes,
    or to anybody.
    """

    anybody = False
    token = "yes"
    location = ""
    padding = 0
    status = 200
    another_length = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str, str | None]] = []
        self.name = f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        url, login = urlsplit(self.path), self.headers["Authorization"]
        self.server.seen.append((self.command, url.path, login))
        if url.path == "/token":
            known = login == "Basic " + b64encode(b"me:word").decode() or self.server.anybody
            if self.command == "POST":
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                known = form["refresh_token"] == ["again"] and form["scope"] == [
                    "repository:a/b:pull,push"
                ]
            self._say(200 if known else 401, {"token": self.server.token} if known else {})
        elif login == "Bearer yes":
            self._say(
                self.server.status,
                {"fine": True, **({"x": "y" * self.server.padding} if self.server.padding else {})},
            )
        else:
            self._say(401, {})

    do_POST = do_PATCH = do_PUT = do_GET

    def _say(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        if status == 401:
            realm = f"http://{self.server.name}/token"
            self.send_header("WWW-Authenticate", f'Bearer realm="{realm}",service="s",scope="x:y"')
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", str(len(data)))
        if self.server.another_length:
            self.send_header("Content-Length", self.server.another_length)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with Server() as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def know(folder: Path, server: Server, **login: str) -> None:
    (folder / "config.json").write_text(json.dumps({"auths": {server.name: login}}))


def test_a_login_becomes_a_token_once(server: Server, tmp_path: Path) -> None:
    know(tmp_path, server, auth=b64encode(b"me:word").decode())
    registry = Repository(f"{server.name}/a/b")
    for _ in range(2):
        assert registry.request("GET", "manifests/x").json() == {"fine": True}
    assert [path for _, path, _ in server.seen] == [
        "/v2/a/b/manifests/x",
        "/token",
        *["/v2/a/b/manifests/x"] * 2,
    ]


def test_an_identity_token_is_refreshed(server: Server, tmp_path: Path) -> None:
    know(tmp_path, server, auth="", identitytoken="again")
    assert Repository(f"{server.name}/a/b").request("GET", "manifests/x").json() == {"fine": True}


def test_nobody_gets_what_anybody_may_have(server: Server) -> None:
    server.anybody = True
    assert Repository(f"{server.name}/a/b").request("GET", "manifests/x").json() == {"fine": True}


def test_a_wrong_word_is_a_sentence(server: Server, tmp_path: Path) -> None:
    know(tmp_path, server, auth=b64encode(b"me:other").decode())
    with pytest.raises(HostError, match="denied access") as refused:
        Repository(f"{server.name}/a/b").request("GET", "manifests/x")
    assert refused.value.hint == f"log in: skopeo login {server.name}"


def test_two_lengths_of_an_answer_are_no_matter_of_addresses(server: Server) -> None:
    server.another_length = "99"
    with pytest.raises(HostError, match="its headers state two lengths"):
        Repository(f"{server.name}/a/b").tags()
    # urllib3 refuses the headers before anybody has the answer that could be closed. Another test
    # must not be told of its socket.
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def test_another_host_does_not_see_the_login(server: Server, tmp_path: Path) -> None:
    know(tmp_path, server, auth=b64encode(b"me:word").decode())
    registry = Repository(f"{server.name}/a/b")
    registry.request("GET", "manifests/x")
    with pytest.raises(HostError):
        registry.request("GET", f"http://localhost:{server.server_port}/elsewhere")
    assert [login for _, path, login in server.seen if path == "/elsewhere"] == [None]


def test_an_upload_to_another_host_is_refused_before_the_login_goes_there(
    server: Server, tmp_path: Path
) -> None:
    """skopeo would send the login along."""
    know(tmp_path, server, auth=b64encode(b"me:word").decode())
    registry = Repository(f"{server.name}/a/b")
    server.location = "/v2/a/b/blobs/uploads/1"
    registry.check_uploads()
    with Server() as other:
        server.location = f"http://{other.name}/upload"
        with pytest.raises(
            HostError,
            match=f"directs uploads to http://{other.name}/upload, which the login is not for",
        ):
            registry.check_uploads()
        assert other.seen == []


@pytest.mark.parametrize("token", ["a\nb", 7, ["a"], ""])
def test_an_odd_token_is_a_sentence(server: Server, token: Any) -> None:
    server.anybody, server.token = True, token
    with pytest.raises(HostError, match="a token that is not one line of text"):
        Repository(f"{server.name}/a/b").request("GET", "manifests/x")


def test_an_answer_without_end_is_a_sentence(server: Server) -> None:
    server.anybody, server.padding = True, 5_000_000
    with pytest.raises(HostError, match=r"sends at .* what cannot be read"):
        Repository(f"{server.name}/a/b").request("GET", "manifests/x")


@pytest.mark.parametrize("status", [400, 403, 404, 500])
def test_a_refusal_is_a_sentence(server: Server, status: int) -> None:
    server.anybody, server.status = True, status
    with pytest.raises(HostError):
        Repository(f"{server.name}/a/b").request("GET", "manifests/x")


def test_absence_is_an_answer_where_it_is_asked_for(server: Server) -> None:
    server.anybody, server.status = True, 404
    assert Repository(f"{server.name}/a/b").find("GET", "manifests/x") is None


def test_a_credential_helper_is_asked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "docker-credential-test"
    login = json.dumps({"ServerURL": "x", "Username": "me", "Secret": "word"})
    helper.write_text(f"#!/bin/sh\n[ \"$(cat)\" = {server.name} ] && echo '{login}'\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "config.json").write_text(json.dumps({"credHelpers": {server.name: "test"}}))
    assert Repository(f"{server.name}/a/b").request("GET", "manifests/x").json() == {"fine": True}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '{"auths": []}',
        '{"auths": {"HOST": {"auth": "a"}}}',
        '{"auths": {"HOST": {"auth": "bWU="}}}',  # a name without a colon
        '{"credsStore": "none"}',
    ],
)
def test_damaged_logins_are_a_sentence(server: Server, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text.replace("HOST", server.name))
    # In no words of Python's, such as "'list' object has no attribute".
    with pytest.raises(
        HostError, match=r"the login for \S+ cannot be read: (?!.*(Errno|object has no|codec))"
    ):
        Repository(f"{server.name}/a/b").request("GET", "manifests/x")


NOWHERE = "//["
OddAnswer = tuple[int, dict[str, str], bytes, Callable[[Repository], object]]


def attached(manifest: bytes) -> OddAnswer:
    return 200, {}, manifest, lambda there: there.document({"digest": digest_of(manifest)})


ODD_ANSWERS: list[OddAnswer] = [
    (202, {"Location": NOWHERE}, b"", lambda there: there.check_uploads()),
    (202, {}, b"", lambda there: there.check_uploads()),
    (307, {"Location": NOWHERE}, b"", lambda there: there.digest("v1")),
    (307, {"Location": "http://\udcff/"}, b"", lambda there: there.digest("v1")),
    (401, {"WWW-Authenticate": f'Bearer realm="{NOWHERE}"'}, b"", lambda there: there.digest("v1")),
    (200, {}, b'{"tags": 5}', lambda there: there.tags()),
    (200, {}, b'{"tags": "v1"}', lambda there: there.tags()),
    (200, {}, b'{"manifests": [{"digest": 5}]}', lambda there: there.referrers("sha256:0")),
    *map(
        attached,
        (
            b"[]",
            b"{}",
            b'{"layers": []}',
            b'{"layers": [1]}',
            b"\xff",
            b"[" * 100_000,
            b'{"layers": [{"digest": 5, "mediaType": "x", "annotations": []}]}',
        ),
    ),
]


@pytest.mark.parametrize("number", range(len(ODD_ANSWERS)))
def test_an_odd_answer_is_a_sentence(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    status, headers, body, call = ODD_ANSWERS[number]

    def send(_: object, request: PreparedRequest, **__: object) -> Response:
        answer = Response()
        answer.status_code, answer.raw, answer.url, answer.request = (
            status,
            BytesIO(body),
            str(request.url),
            request,
        )
        answer.headers.update(headers)
        return answer

    monkeypatch.setattr(HTTPAdapter, "send", send)
    with pytest.raises(PrimusError):
        call(Repository("localhost:1/a/b"))


def paged(monkeypatch: pytest.MonkeyPatch, rest: Callable[[int], str]) -> Repository:
    """A registry whose lists have one entry a page; ``rest`` returns the address of the page after
    a number.
    """

    def send(_: object, request: PreparedRequest, **__: object) -> Response:
        number = int((parse_qs(urlsplit(str(request.url)).query).get("page") or ["1"])[0])
        answer = Response()
        answer.status_code, answer.url, answer.request = 200, str(request.url), request
        content = {"manifests": [{"digest": f"sha256:{number}"}], "tags": [f"v{number}"]}
        answer.raw = BytesIO(json.dumps(content).encode())
        answer.headers["Link"] = f'<{rest(number)}>; rel="next"' if rest(number) else ""
        return answer

    monkeypatch.setattr(HTTPAdapter, "send", send)
    return Repository("localhost:1/a/b")


def test_lists_are_read_to_their_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    there = paged(monkeypatch, lambda number: f"/v2/a/b/x?page={number + 1}" if number < 3 else "")
    assert [row["digest"] for row in there.referrers("sha256:0")] == [
        "sha256:1",
        "sha256:2",
        "sha256:3",
    ]
    assert there.tags() == ["v1", "v2", "v3"]


@pytest.mark.parametrize(
    ("rest", "reason"),
    [("?page=1", "has no end"), ("http://localhost:2/?page=2", "goes on at http://localhost:2/")],
)
def test_a_list_without_end_or_elsewhere_is_a_sentence(
    rest: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in (lambda there: there.referrers("sha256:0"), lambda there: there.tags()):
        with pytest.raises(HostError, match=reason):
            call(paged(monkeypatch, lambda _: rest))


def answering(
    monkeypatch: pytest.MonkeyPatch, answers: Callable[[str], tuple[int, Any]]
) -> Repository:
    """A registry that answers a path and its query with a status and JSON."""

    def send(_: object, request: PreparedRequest, **__: object) -> Response:
        status, content = answers(str(request.url).partition("/a/b/")[2])
        answer = Response()
        answer.status_code, answer.url, answer.request = status, str(request.url), request
        answer.raw = BytesIO(json.dumps(content).encode())
        if isinstance(content, dict) and "next" in content:
            answer.headers["Link"] = f'<{content["next"]}>; rel="next"'
        return answer

    monkeypatch.setattr(HTTPAdapter, "send", send)
    return Repository("localhost:1/a/b")


IMAGE_DIGEST = f"sha256:{'a' * 64}"


def rows(*digests: str) -> dict[str, Any]:
    return {"manifests": [{"digest": digest} for digest in digests]}


def test_a_page_that_is_not_there_does_not_end_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(path: str) -> tuple[int, Any]:
        if "page=2" in path:
            return 404, {}
        return 200, {**rows("sha256:1"), "tags": ["v1"], "next": "/v2/a/b/x?page=2"}

    for call in (lambda there: there.referrers(IMAGE_DIGEST), lambda there: there.tags()):
        with pytest.raises(HostError, match=r"the next page of \S+ does not exist"):
            call(answering(monkeypatch, answers))


def test_a_list_that_the_referrers_api_denies_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answers(path: str) -> tuple[int, Any]:
        if path.startswith("referrers/") and IMAGE_DIGEST not in path:
            return 200, rows()
        return 404, {}

    with pytest.raises(HostError, match="does not exist, and shows the list for another digest"):
        answering(monkeypatch, answers).referrers(IMAGE_DIGEST)


def test_what_was_attached_before_a_registry_got_the_api_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answers(path: str) -> tuple[int, Any]:
        if path.startswith("referrers/"):
            return 200, rows("sha256:2", "sha256:3")
        return 200, rows("sha256:1", "sha256:2")

    found = answering(monkeypatch, answers).referrers(IMAGE_DIGEST)
    assert sorted(row["digest"] for row in found) == ["sha256:1", "sha256:2", "sha256:3"]


@pytest.mark.parametrize("listed", [BUNDLE, "application/vnd.oci.empty.v1+json", None])
def test_a_document_whose_list_states_no_type_is_found(
    listed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GitHub's registry lists the type of the config."""
    document = Document(media_type=BUNDLE, name="", data=b"{}", predicate="urn:x")
    subject = {"mediaType": "m", "digest": IMAGE_DIGEST, "size": 1}
    manifest = artifact(document, subject)
    entry = {"digest": digest_of(manifest), "artifactType": listed}

    def answers(path: str) -> tuple[int, Any]:
        if path.startswith("manifests/sha256:"):
            return 200, json.loads(manifest)
        return (
            (404, {}) if path.startswith(("tags", "manifests")) else (200, {"manifests": [entry]})
        )

    there = answering(monkeypatch, answers)
    monkeypatch.setattr(there, "manifest", lambda _digest: manifest)
    monkeypatch.setattr(there, "_contents", lambda _layer: b"{}")
    assert there.documents(IMAGE_DIGEST, BUNDLE) == [document]
    assert there.whole_documents(IMAGE_DIGEST, "text/plain") == []


def test_an_answer_byte_by_byte_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dripping(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while not ended.wait(0.02):
                    self.wfile.write(b" ")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    monkeypatch.setattr(transport, "_PATIENCE", 0.5)
    ended = Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Dripping) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with pytest.raises(HostError, match="does not answer in time at 127"):
            Repository(f"127.0.0.1:{server.server_port}/a/b").referrers("sha256:0")
        ended.set()
        server.shutdown()


def test_what_a_registry_sends_does_not_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    _report("status 418: \x1b[31mred\x07\n  → café")
    assert capsys.readouterr().err == "status 418: \ufffd[31mred\ufffd\n  → café\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'bob:pw@host.example/x' is no repository", "'…@host.example/x' is no repository"),
        ("--to bob:pw@host.example:5000/x", "--to …@host.example:5000/x"),
        ("--to=bob:pw@host.example/x", "--to=…@host.example/x"),
        ("https://bob:pw@host.example/x", "https://…@host.example/x"),
        ("primus:v26.11@sha256:0a is not there", "primus:v26.11@sha256:0a is not there"),
        ("rocm/primus:v26.11@sha256:0a", "rocm/primus:v26.11@sha256:0a"),
        ("versions.yaml:3:4: a@b", "versions.yaml:3:4: a@b"),
    ],
)
def test_a_login_is_not_shown(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    _report(text)
    assert capsys.readouterr().err == f"{shown}\n"
