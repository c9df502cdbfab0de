"""A commit of a git repository with its submodules, as one archive whose bytes depend only on the commit.

``git archive`` would leave out submodules. Here, every file is there, and no attribute of the tree changes its bytes.
"""

import hashlib
import os
import re
import subprocess
import tarfile
import tempfile
from functools import partial
from pathlib import Path

from primus.errors import HostError, InputError
from primus.versions.lock import Commit, LockedFile
from primus.versions.traffic import bare_url, run_tool

# 1980-01-01, the earliest time that a wheel can store.
_MTIME = 315532800
_SILENCE_S = 10
# git's words for a commit that a server does not have, or does not send alone.
_UNKNOWN = ("not our ref", "unadvertised object", "remote ref")
# In a repository's own file, attributes precede those of the tree.
_ATTRIBUTES = "* -text -eol -ident -filter -working-tree-encoding\n"


def resolve_commit(name: str, pin: Commit) -> LockedFile:
    """Return the archive of the commit of package ``name``. Raises InputError if the repository has no such commit."""
    with tempfile.TemporaryDirectory(prefix="primus-git-") as folder:
        archive_commit(pin, "archive.tar", Path(folder))
        with Path(folder, "archive.tar").open("rb") as file:
            sha256, size = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
    return LockedFile(
        kind="git", name=name, version=pin.version, file=f"{name}-{pin.commit}.tar", size=size, sha256=sha256
    )


def archive_commit(pin: Commit, name: str, folder: Path) -> None:
    """Write the archive of the commit to ``folder``. InputError for an unknown commit, HostError without an answer."""
    with tempfile.TemporaryDirectory(prefix="primus-git-") as scratch:
        source = Path(scratch, "source")
        _check_out(source, pin.url, pin.commit)
        paths = (path for path in source.rglob("*") if path.is_symlink() or path.is_file())
        names = sorted(os.fsencode(path.relative_to(source)) for path in paths)
        with tarfile.open(folder / name, "w", format=tarfile.GNU_FORMAT) as archive:
            for path in map(Path, map(os.fsdecode, names)):
                # The repository of a submodule is a file or folder of the name .git.
                if ".git" not in path.parts:
                    archive.add(source / path, f"source/{path}", recursive=False, filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime, member.uid, member.gid, member.uname, member.gname = _MTIME, 0, 0, "", ""
    member.mode = 0o777 if member.issym() else 0o755 if member.mode & 0o100 else 0o644
    return member


def _check_out(source: Path, url: str, commit: str) -> None:
    template = source.parent / "template"
    (template / "info").mkdir(parents=True, exist_ok=True)
    (template / "info/attributes").write_text(_ATTRIBUTES, encoding="ascii")
    source.mkdir()
    git = partial(_git, source, url, template)
    git("init", "--quiet")
    git("remote", "add", "origin", url)
    # A host whose packets are dropped is named within seconds; fetch would wait for minutes.
    git("ls-remote", "--quiet", "origin", "HEAD", timeout=_SILENCE_S)
    try:
        git("fetch", "--quiet", "--no-tags", "--depth=1", "origin", commit)
    except HostError as error:
        if not any(words in error.message for words in _UNKNOWN):
            raise
        hint = "correct `commit` in versions.yaml; the server must send single commits (git 2.26 or newer does)"
        raise InputError(
            f"{bare_url(url)} sends no commit {commit}", hint=hint, about=Path(url).name.removesuffix(".git")
        ) from None
    git("checkout", "--quiet", "--detach", commit)
    git("submodule", "--quiet", "update", "--init", "--recursive", "--depth=1")


def _git(source: Path, url: str, template: Path, *words: str, timeout: float | None = None) -> None:
    # Another host must not name folders of this one.
    local = "always" if url.startswith("file:") else "never"
    options = ["-c", f"http.lowSpeedTime={_SILENCE_S}", "-c", "http.lowSpeedLimit=1"]
    options += ["-c", f"protocol.file.allow={local}", "-C", str(source)]
    variables = {"GIT_TERMINAL_PROMPT": "0", "GIT_TEMPLATE_DIR": str(template), "LC_ALL": "C.UTF-8"}
    try:
        done = run_tool(["git", *options, *words], url, words[0], env=os.environ | variables, timeout=timeout)
        if done.returncode == 0:
            return
        reason = (re.findall(r"^(?:fatal|error): (.*)", done.stderr, re.M) or ["git failed"])[0]
    except subprocess.TimeoutExpired:
        reason = f"no answer in {timeout:.0f} s"
    raise HostError(
        f"the repository {bare_url(url)} does not answer: {reason.replace(url, bare_url(url))}",
        hint="check the address and the network, or give git a login for it",
        about=Path(url).name.removesuffix(".git"),
    )
