"""How git hosts answer."""

from __future__ import annotations

import os
import subprocess
from urllib.parse import urlsplit

from gits import commit, git
from source_twins import Answer, Behaviour, Twins
from twin_indexes import hangs, status


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
    Behaviour(name="submodules", source=GIT.format("gitmodules"), answer=smart, way="git"),
    Behaviour(name="commit-by-digits", source=GIT.format("protocol-v2"), answer=smart, way="git"),
    Behaviour(
        name="commit-by-digits-refused",
        source=GIT.format("git-config") + "#Documentation/git-config.txt-uploadpackallowReachableSHA1InWant",
        answer=old_protocol,
        way="git",
        warns="does not send single commits",
    ),
    Behaviour(
        name="dumb-http",
        source="https://github.com/xiph/vorbis/issues/56",
        answer=dumb,
        way="git",
        warns="does not send single commits",
    ),
    Behaviour(
        name="lfs-pointer",
        source="https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md",
        answer=smart,
        way="git",
        warns="stores weights.bin in Git LFS",
    ),
    Behaviour(name="renamed", source=GITHUB, answer=renamed, way="git"),
    Behaviour(
        name="commit-of-nobody", source=GIT.format("git-upload-pack"), answer=smart, way="git", says="has no commit"
    ),
    Behaviour(
        name="repository-404",
        source=GIT.format("http-protocol"),
        answer=status(404),
        way="git",
        says="there is no such repository",
    ),
    Behaviour(
        name="repository-401",
        source=GIT.format("http-protocol"),
        answer=status(401, WWW_Authenticate='Basic realm="x"'),
        way="git",
        says="it wants credentials",
    ),
    Behaviour(
        name="repository-429",
        source="https://github.blog/changelog/2025-05-08-updated-rate-limits-for-unauthenticated-requests/",
        answer=git_429,
        way="git",
        says="limits requests",
    ),
    Behaviour(
        name="repository-silent",
        source=GIT.format("git-config") + "#Documentation/git-config.txt-httplowSpeedLimit",
        answer=hangs,
        way="git",
        says="no answer in time",
    ),
    Behaviour(
        name="fetch-silent",
        source=GIT.format("git-config") + "#Documentation/git-config.txt-httplowSpeedLimit",
        answer=lambda one, rest: (
            smart(one, rest) if one.command == "GET" or b"ls-refs" in one.rfile.peek(30) else one.hang()
        ),
        way="git",
        says="no answer in time",
        warns="has sent nothing",
    ),
)
