"""Image registries and git hosts on 127.0.0.1: each row names the public source of a behaviour, and what the lock does.

The lock either works or says one sentence. The table of registries is in ``twin_registries``.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from gits import commit, git

OCI = "https://github.com/opencontainers/distribution-spec/blob/main/spec.md"
HUB = "https://docs.docker.com/docker-hub/usage/pulls/"
TOKEN = "https://distribution.github.io/distribution/spec/auth/token/"


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """One way to answer. ``way`` is what is locked: an image or a commit; ``says`` is the sentence that must end it
    (None: it works), ``warns`` a line that must be said on the way.
    """

    name: str
    source: str
    answer: Callable[[Answer, str], None]
    way: str = "git"
    says: str | None = None
    warns: str | None = None
    check: Callable[[Twins, Any], bool] = lambda _, __: True


Part = Callable[["Answer", str], None]


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


@dataclass
class Twins:
    folder: Path
    port: int = 0
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    seen: dict[str, list[tuple[str, str, dict[str, str]]]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    guard: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)
    commits: dict[str, str] = field(default_factory=dict)
    tops: dict[str, str] = field(default_factory=dict)

    def address(self, behaviour: Behaviour) -> str:
        """The behaviour's image or repository."""
        name = behaviour.name
        if behaviour.way == "image":
            return f"127.0.0.1:{self.port}/{name}/x@sha256:{self.tops[name]}"
        return f"http://127.0.0.1:{self.port}/{name}/main.git"

    def token(self, answer: Answer) -> None:
        """The registry's token service."""
        scope = unquote(urlsplit(answer.path).query)
        number = len(self.seen["token"])
        issued = f"t{number}-{'x' if 'token-expires' in scope else 'y'}"
        answer.reply(200, json.dumps({"token": issued, "expires_in": 300}).encode(), Content_Type="application/json")


@contextmanager
def twins(folder: Path, behaviours: Sequence[Behaviour]) -> Iterator[Twins]:
    """All twins on one port."""
    here = Twins(folder, behaviours={behaviour.name: behaviour for behaviour in behaviours})

    class Quiet(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *args: object) -> None:
            pass

    with Quiet(("127.0.0.1", 0), type("Handler", (Answer,), {"twins": here})) as server:
        here.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield here
        finally:
            here.done.set()
            server.shutdown()


def hangs(answer: Answer, _: str) -> None:
    answer.hang()


def status(number: int, **headers: str) -> Part:
    return lambda answer, _: answer.reply(number, **headers)


def smart(one: Answer, rest: str, protocol: bool = True) -> None:
    """git's own server for http."""
    query = urlsplit(one.path).query
    environment = {
        **os.environ,
        "GIT_PROJECT_ROOT": str(one.twins.folder / "git"),
        "GIT_HTTP_EXPORT_ALL": "1",
        "PATH_INFO": f"/{rest}",
        "QUERY_STRING": query,
        "REQUEST_METHOD": one.command,
        "CONTENT_TYPE": one.headers.get("Content-Type", ""),
        "HTTP_CONTENT_ENCODING": one.headers.get("Content-Encoding", ""),
    }
    if protocol and (version := one.headers.get("Git-Protocol")):
        environment["GIT_PROTOCOL"] = version
    length = int(one.headers.get("Content-Length") or 0)
    body = one.rfile.read(length)
    done = subprocess.run(["git", "http-backend"], input=body, capture_output=True, check=False, env=environment)
    head, _, data = done.stdout.partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().splitlines())
    status = int(headers.pop("Status", "200").split()[0])
    one.reply(status, data, **{name.replace("-", "_"): value for name, value in headers.items()})


def old_protocol(one: Answer, rest: str) -> None:
    """A server that gives only what its branches point to."""
    smart(one, rest, protocol=False)


def dumb(one: Answer, rest: str) -> None:
    """A repository as plain files."""
    path = one.twins.folder / "git" / rest
    one.reply(200, path.read_bytes()) if path.is_file() else one.reply(404)


def renamed(one: Answer, rest: str) -> None:
    if rest.startswith("main.git/"):
        query = urlsplit(one.path).query
        return one.reply(301, Location=f"/{one.name}/new.git/{rest[9:]}{f'?{query}' if query else ''}")
    return smart(one, rest.replace("new.git/", "main.git/"))


def git_429(one: Answer, rest: str) -> None:
    one.reply(429, b"Too many requests", Retry_After="60")


def make_repositories(here: Twins) -> None:
    """``main`` with a submodule and a pointer of Git LFS; its second-last commit is on no branch's tip."""

    work, served = here.folder / "work", here.folder / "git"
    module = "3rdparty/part", commit(work / "part", {"inside.txt": "of the submodule\n"})
    modules = '[submodule "part"]\n\tpath = 3rdparty/part\n\turl = ../part.git\n'
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
    here.commits["with-submodule"] = commit(work / "main", {"setup.py": "pass\n", ".gitmodules": modules}, module)
    here.commits["with-pointer"] = commit(work / "main", {"weights.bin": pointer, ".gitmodules": modules}, module)
    commit(work / "main", {"later.txt": "later\n"}, module)
    for name in ("part", "main"):
        served.mkdir(exist_ok=True)
        git(here.folder, "clone", "-q", "--bare", str(work / name), str(served / f"{name}.git"))
        git(served / f"{name}.git", "update-server-info")


GITHUB = "https://docs.github.com/en/repositories/creating-and-managing-repositories/renaming-a-repository"
GIT = "https://git-scm.com/docs/{}"
REPOSITORIES = (
    Behaviour(name="submodules", source=GIT.format("gitmodules"), answer=smart),
    Behaviour(
        name="commit-by-digits-refused",
        source=GIT.format("git-config") + "#Documentation/git-config.txt-uploadpackallowReachableSHA1InWant",
        answer=old_protocol,
        warns="does not send single commits",
    ),
    Behaviour(
        name="dumb-http",
        source="https://github.com/xiph/vorbis/issues/56",
        answer=dumb,
        warns="does not send single commits",
    ),
    Behaviour(
        name="lfs-pointer",
        source="https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md",
        answer=smart,
        warns="stores weights.bin in Git LFS",
    ),
    Behaviour(name="renamed", source=GITHUB, answer=renamed),
    Behaviour(name="commit-of-nobody", source=GIT.format("git-upload-pack"), answer=smart, says="has no commit"),
    Behaviour(
        name="repository-404",
        source=GIT.format("http-protocol"),
        answer=status(404),
        says="there is no such repository",
    ),
    Behaviour(
        name="repository-401",
        source=GIT.format("http-protocol"),
        answer=status(401, WWW_Authenticate='Basic realm="x"'),
        says="it wants credentials",
    ),
    Behaviour(
        name="repository-429",
        source="https://github.blog/changelog/2025-05-08-updated-rate-limits-for-unauthenticated-requests/",
        answer=git_429,
        says="limits requests",
    ),
    Behaviour(
        name="repository-silent",
        source=GIT.format("git-config") + "#Documentation/git-config.txt-httplowSpeedLimit",
        answer=hangs,
        says="no answer in time",
    ),
    Behaviour(
        name="fetch-silent",
        source=GIT.format("git-config") + "#Documentation/git-config.txt-httplowSpeedLimit",
        answer=lambda one, rest: (
            smart(one, rest) if one.command == "GET" or b"ls-refs" in one.rfile.peek(30) else one.hang()
        ),
        says="no answer in time",
    ),
)
