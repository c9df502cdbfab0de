"""A commit of a git repository, submodules included, as one archive whose bytes depend on the commit alone.

``git archive`` would leave out submodules and obey attributes of the tree; here every blob goes in as it is.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from primus.errors import HostError, InputError
from primus.versions.lock import Commit, LockedFile

__all__ = ["archive_commit", "probe", "resolve_commit"]

# 1980-01-01, the oldest time a wheel can hold.
_MTIME = 315532800
_WAIT_S = 4.0


def probe(url: str) -> None:
    """Raise HostError when the repository does not answer."""
    _git("ls-remote", "--quiet", "--", url, "HEAD", timeout=_WAIT_S, about=url)


def resolve_commit(name: str, one: Commit) -> LockedFile:
    """The archive of the commit of package ``name``. Raises InputError when the repository has no such commit."""
    with tempfile.TemporaryDirectory(prefix="primus-git-") as folder:
        path = Path(folder, "archive.tar")
        archive_commit(one.url, one.commit, path)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = path.stat().st_size
    return LockedFile(
        kind="git", name=name, version=one.version, file=f"{name}-{one.commit}.tar", size=size, sha256=sha256
    )


def archive_commit(url: str, commit: str, target: Path) -> None:
    """Write the archive of the commit to ``target``. InputError for an unknown commit, HostError without an answer."""
    with (
        tempfile.TemporaryDirectory(prefix="primus-git-") as folder,
        tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for path, mode, data in _files(url, commit, "source/", Path(folder)):
            member = tarfile.TarInfo(path)
            member.mtime = _MTIME
            if mode == "120000":
                member.type, member.linkname, member.mode = tarfile.SYMTYPE, os.fsdecode(data), 0o777
                archive.addfile(member)
            else:
                member.size, member.mode = len(data), 0o755 if mode == "100755" else 0o644
                archive.addfile(member, io.BytesIO(data))


def _files(url: str, commit: str, prefix: str, folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """(path, mode, bytes) of every file of the commit, in the tree's own order."""
    here = folder / commit
    if not here.is_dir():
        _git("init", "--quiet", "--bare", str(here), about=url)
        _git("-C", str(here), "fetch", "--quiet", "--depth=1", "--no-tags", "--", url, commit, about=url)
    listing = _git("-C", str(here), "ls-tree", "-r", "-z", "--full-tree", commit, about=url)
    places = dict(_submodules(here, commit, url))
    with subprocess.Popen(
        ["git", "-C", str(here), "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_env()
    ) as batch:
        assert batch.stdin is not None
        assert batch.stdout is not None
        for row in listing.split(b"\0"):
            if not row:
                continue
            head, _, name = row.partition(b"\t")
            mode, _, digest = os.fsdecode(head).split(" ")
            path = os.fsdecode(name)
            if mode == "160000":
                if path not in places:
                    raise InputError(f"{url} at {commit} has a submodule {path} without an address")
                yield from _files(places[path], digest, f"{prefix}{path}/", folder)
                continue
            batch.stdin.write(f"{digest}\n".encode())
            batch.stdin.flush()
            size = int(batch.stdout.readline().split()[2])
            data = batch.stdout.read(size)
            batch.stdout.read(1)
            yield prefix + path, mode, data


def _submodules(here: Path, commit: str, url: str) -> Iterator[tuple[str, str]]:
    """Path and address of each submodule that the commit names."""
    words = ["config", "--blob", f"{commit}:.gitmodules", "--get-regexp", r"^submodule\..*\.(path|url)$"]
    done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False, env=_env())
    found: dict[str, dict[str, str]] = {}
    for name, key, value in re.findall(r"^submodule\.(.*)\.(path|url) (.*)$", done.stdout, re.M):
        found.setdefault(name, {})[key] = value
    for module in found.values():
        if len(module) == 2:
            yield module["path"], _meant(url, module["url"])


def _meant(url: str, address: str) -> str:
    """A submodule's address; a relative one is meant from the repository's own."""
    if not address.startswith(("./", "../")):
        return address
    base = url.rstrip("/")
    while address.startswith("../"):
        base, address = base.rpartition("/")[0], address[3:]
    return f"{base}/{address.removeprefix('./')}"


def _git(*words: str, about: str, timeout: float | None = None) -> bytes:
    if shutil.which("git") is None:
        raise HostError("git is missing; it is needed to fetch repositories", hint="apt-get install git")
    try:
        done = subprocess.run(
            ["git", *words], capture_output=True, check=False, env=_env(), stdin=subprocess.DEVNULL, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise HostError(f"the repository {about} does not answer: no answer in time", hint="run it again") from None
    if done.returncode != 0:
        text = done.stderr.decode("utf-8", "replace")
        if "not our ref" in text or "unadvertised object" in text:
            raise InputError(f"{about} has no commit {words[-1]}", hint="correct `commit` in versions.yaml")
        raise HostError(f"the repository {about} does not answer: {_reason(text)}", hint="check the network")
    return done.stdout


def _env() -> dict[str, str]:
    return os.environ | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8"}


def _reason(text: str) -> str:
    known = {
        "Could not resolve host": "its name is not known",
        "Connection refused": "connection refused",
        "Failed to connect": "no connection",
        "could not read Username": "it wants credentials",
        "does not exist": "there is no such repository",
        "not found": "there is no such repository",
        "does not appear to be a git repository": "there is no such repository",
    }
    lines = [line for line in text.splitlines() if line.startswith("fatal:")]
    return next((words for mark, words in known.items() if mark in text), lines[0][7:] if lines else "git failed")
