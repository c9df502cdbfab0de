"""A commit of a git repository with its submodules, as one archive whose bytes depend only on the commit.

``git archive`` would leave out submodules and apply attributes of the tree. Here, every blob is included unchanged.
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
from primus.versions.traffic import bare_url, notify, requesting

# 1980-01-01, the earliest time that a wheel can store.
_MTIME = 315532800
_SILENCE_S = 10
_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
# git's messages if it must fetch more than one commit.
_REFUSALS = ("not our ref", "unadvertised object", "does not support shallow", "no shallow")


def short_name(url: str) -> str:
    """Return the repository's short name for messages: ``aiter`` for ``https://HOST/ROCm/aiter.git``."""
    return url.rstrip("/").rpartition("/")[2].removesuffix(".git")


def resolve_commit(name: str, pin: Commit) -> LockedFile:
    """Return the archive of the commit of package ``name``. Raises InputError if the repository has no such commit."""
    with tempfile.TemporaryDirectory(prefix="primus-git-") as folder:
        path = Path(folder, "archive.tar")
        archive_commit(pin.url, pin.commit, path)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = path.stat().st_size
    return LockedFile(
        kind="git", name=name, version=pin.version, file=f"{name}-{pin.commit}.tar", size=size, sha256=sha256
    )


def archive_commit(url: str, commit: str, target: Path) -> None:
    """Write the archive of the commit to ``target``. InputError for an unknown commit, HostError without an answer."""
    pointers: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="primus-git-") as folder,
        tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for path, mode, data in _files(url, commit, "source/", Path(folder)):
            if data.startswith(_POINTER):
                pointers.append(path.removeprefix("source/"))
            member = tarfile.TarInfo(path)
            member.mtime = _MTIME
            if mode == "120000":
                member.type, member.linkname, member.mode = tarfile.SYMTYPE, os.fsdecode(data), 0o777
                archive.addfile(member)
            else:
                member.size, member.mode = len(data), 0o755 if mode == "100755" else 0o644
                archive.addfile(member, io.BytesIO(data))

    if pointers:
        more = f" and {len(pointers) - 1} more" if len(pointers) > 1 else ""
        notify(
            f"{bare_url(url)} at {commit[:12]} stores {pointers[0]}{more} in Git LFS; its archive contains only the "
            "pointer, so a build that reads the file fails"
        )


def _files(url: str, commit: str, prefix: str, folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield (path, mode, bytes) of every file of the commit, in the tree's order."""
    here = folder / commit
    if not here.is_dir():
        _git("init", "--quiet", "--bare", str(here), about=url)
        _fetch(here, url, commit)
    listing = _git("-C", str(here), "ls-tree", "-r", "-z", "--full-tree", commit, about=url)
    places = dict(_submodules(here, commit, url))
    cat = ["git", "-C", str(here), "cat-file", "--batch"]
    with subprocess.Popen(cat, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as batch:
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
                    raise InputError(f"{url} at {commit} has a submodule {path} without a URL")
                yield from _files(places[path], digest, f"{prefix}{path}/", folder)
                continue
            batch.stdin.write(f"{digest}\n".encode())
            batch.stdin.flush()
            size = int(batch.stdout.readline().split()[2])
            data = batch.stdout.read(size)
            batch.stdout.read(1)
            yield prefix + path, mode, data


def _fetch(here: Path, url: str, commit: str) -> None:
    """Fetch the commit. If the server offers no single commits, fetch the history of all branches and tags."""
    # A host whose packets are dropped is named within seconds; fetch would wait for minutes.
    _git("ls-remote", "--quiet", "--", url, "HEAD", about=url, timeout=_SILENCE_S)
    silence = ("-c", f"http.lowSpeedTime={_SILENCE_S}", "-c", "http.lowSpeedLimit=1")
    fetch = ("-C", str(here), *silence, "fetch", "--quiet", "--no-tags")
    try:
        _git(*fetch, "--depth=1", "--", url, commit, about=url)
    except HostError as error:
        if not any(mark in error.message for mark in _REFUSALS):
            raise
        notify(f"{bare_url(url)} does not send single commits; fetching its whole history")
        _git(*fetch, "--", url, "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*", about=url)
    if _run("-C", str(here), "cat-file", "-e", f"{commit}^{{commit}}").returncode != 0:
        raise InputError(
            f"{bare_url(url)} has no commit {commit}", hint="correct `commit` in versions.yaml", about=short_name(url)
        )


def _submodules(here: Path, commit: str, url: str) -> Iterator[tuple[str, str]]:
    """Yield path and address of each submodule of the commit."""
    blob = f"{commit}:.gitmodules"
    done = _run("-C", str(here), "config", "--blob", blob, "--get-regexp", r"^submodule\..*\.(path|url)$")
    modules: dict[str, dict[str, str]] = {}
    for name, key, value in re.findall(r"^submodule\.(.*)\.(path|url) (.*)$", os.fsdecode(done.stdout), re.M):
        modules.setdefault(name, {})[key] = value
    for module in modules.values():
        if len(module) == 2:
            yield module["path"], _resolve_url(url, module["url"])


def _resolve_url(url: str, address: str) -> str:
    """Return a submodule's address. A relative one starts from the repository's own."""
    if not address.startswith(("./", "../")):
        return address
    base = url.rstrip("/")
    while address.startswith("../"):
        base, address = base.rpartition("/")[0], address[3:]
    return f"{base}/{address.removeprefix('./')}"


def _git(*words: str, about: str, timeout: float | None = None) -> bytes:
    """Return git's output. Raises HostError with git's own words; ``about`` is the repository's address."""
    method = next((word for word in ("ls-remote", "fetch") if word in words), "")
    with requesting("git", about, short_name(about), method):
        try:
            done = _run(*words, timeout=timeout)
            if done.returncode == 0:
                return done.stdout
            lines = re.findall(r"^(?:fatal|error): (.*)", done.stderr.decode("utf-8", "replace"), re.M)
            reason = (lines or ["git failed"])[-1]
        except subprocess.TimeoutExpired:
            reason = f"no answer in {timeout:.0f} s"
        raise HostError(
            f"the repository {bare_url(about)} does not answer: {reason.replace(about, bare_url(about))}",
            hint="check the address and the network, or give git a login for it",
            about=short_name(about),
        )


def _run(*words: str, timeout: float | None = None) -> subprocess.CompletedProcess[bytes]:
    if shutil.which("git") is None:
        raise HostError("git is missing; it is needed to fetch repositories", hint="apt-get install git")
    environment = os.environ | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        ["git", *words], capture_output=True, check=False, env=environment, stdin=subprocess.DEVNULL, timeout=timeout
    )
