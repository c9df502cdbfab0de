"""Images of a registry, with the layers of a digest, and commits of git repositories.

skopeo accesses the registry with this host's mirrors (containers-registries.conf), certificates and
logins. It compares every manifest with its digest. A commit becomes one archive, whose bytes depend
only on it: unlike in that of ``git archive``, submodules are there, and no attribute of the tree
changes a file.
"""

import gzip
import hashlib
import json
import os
import re
import tarfile
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from primus_images.errors import HostError, InputError
from primus_images.versions.lock import ARCHITECTURE, Commit, LockedFile
from primus_images.versions.traffic import bare_url, run_tool, seconds_for
from primus_images.yamlfile import read_values

_FAILURES: Any = read_values(Path(__file__).with_name("skopeo.yaml")).data
_STATUS = "var/lib/dpkg/status"
# 1980-01-01, the earliest time that a wheel can store.
_MTIME = 315532800
_SILENCE_S = 10
# git's words for a commit that a server does not have, or does not send alone.
_UNKNOWN = ("not our ref", "unadvertised object", "remote ref")
# In a repository's own file, attributes precede those of the tree.
_ATTRIBUTES = "* -text -eol -ident -filter -working-tree-encoding\n"


def resolve_image(base: str, image: str) -> tuple[tuple[LockedFile, ...], str]:
    """Return the layers of ``image`` (``name@sha256:…``), lowest first, and its dpkg status.

    The status is empty without dpkg. Raises InputError for an image of another platform or with
    unsupported layers.
    """
    # A copy may take long, but a registry that does not answer is named within seconds.
    size = _size_of(image)
    with tempfile.TemporaryDirectory(prefix="primus-image-") as name:
        folder = Path(name)
        try:
            copy_image(image, folder, size)
        except HostError as error:
            if "no image found" not in error.message:
                raise
            raise InputError(
                f"{image} has no image for linux/{ARCHITECTURE}",
                hint=f"choose another for base {base}",
                about=image,
            ) from None
        layers = _layers(base, image, json.loads((folder / "manifest.json").read_bytes()))
        return layers, _dpkg_status(image, layers, folder)


def _layers(base: str, image: str, manifest: Mapping[str, Any]) -> tuple[LockedFile, ...]:
    name = image.partition("@")[0]
    layers = manifest.get("layers", ())
    if not layers:
        raise InputError(
            f"{image} is not an image with layers",
            hint=f"name the digest of an OCI or Docker schema 2 image for base {base}",
            about=name,
        )
    types = (str(layer.get("mediaType")) for layer in layers)
    other = next((kind for kind in types if not kind.endswith(("tar+gzip", "diff.tar.gzip"))), None)
    if other:
        raise InputError(
            f"{image} has a layer of type {other}",
            hint="only gzip layers are supported",
            about=name,
        )
    short = name.rpartition("/")[2].partition(":")[0]
    digests = [str(layer["digest"]).removeprefix("sha256:") for layer in layers]
    return tuple(
        LockedFile(
            kind="layer",
            name=f"{short}-{number:02}",
            version=image.partition("@")[2],
            file=f"{sha256}.tar.gz",
            size=int(layer["size"]),
            sha256=sha256,
            base=base,
        )
        for number, (sha256, layer) in enumerate(zip(digests, layers, strict=True), 1)
    )


def _size_of(image: str) -> int:
    """Return the bytes of the layers of an image for this platform; 0 if they are not stated."""
    try:
        manifest = _manifest_of(image)
        for entry in manifest.get("manifests", ()):
            platform = entry["platform"]
            if (platform["os"], platform["architecture"]) == ("linux", ARCHITECTURE):
                manifest = _manifest_of(f"{image.partition('@')[0]}@{entry['digest']}")
        return sum(int(layer["size"]) for layer in manifest.get("layers", ()))
    except (ValueError, KeyError, TypeError, AttributeError):  # its copy names what is wrong
        return 0


def _manifest_of(image: str) -> Any:
    words = ("--command-timeout", "15s", "--raw", f"docker://{image}")
    return json.loads(skopeo("inspect", *words))


def copy_image(image: str, folder: Path, size: int) -> None:
    """Copy the image to ``folder``: one file per layer, named by the digits of its digest.

    ``size``, the bytes of its layers, says how long a registry may take.
    """
    platform = ("--override-os", "linux", "--override-arch", ARCHITECTURE)
    limit = f"--command-timeout={seconds_for(size):.0f}s"
    skopeo("copy", "--quiet", limit, *platform, f"docker://{image}", f"dir:{folder}")


def _dpkg_status(image: str, layers: Sequence[LockedFile], folder: Path) -> str:
    status = ""
    for layer in layers:
        try:
            with tarfile.open(folder / layer.sha256, "r:gz") as archive:
                for member in archive:
                    if member.name.removeprefix("./") == _STATUS and member.isreg():
                        file = cast(IO[bytes], archive.extractfile(member))
                        status = file.read().decode("utf-8", "replace")
        # tarfile passes on what gzip, the numbers of a sparse file and thousands of extended
        # headers raise.
        except (
            tarfile.TarError,
            gzip.BadGzipFile,
            zlib.error,
            EOFError,
            ValueError,
            RecursionError,
        ) as error:
            raise InputError(
                f"layer sha256:{layer.sha256} of {image} is not a gzip-compressed tar archive: "
                f"{error}",
                hint="choose another image",
                about=image.partition("@")[0],
            ) from None
    return status


def skopeo(command: str, *words: str) -> str:
    """Return the output of ``skopeo COMMAND WORDS``. A HostError has skopeo's own words."""
    address = next(word for word in words if word.startswith("docker://"))
    image = address.removeprefix("docker://").partition("@")[0]
    for pause in (0.5, 2.0, None):
        # Only the debug log tells that skopeo waits because of a rate limit. Its time limit is one
        # of ``words``.
        skopeo_words = ["skopeo", "--debug", command, "--retry-times", "2", *words]
        done = run_tool(skopeo_words, address, command, timeout=None)
        if done.returncode == 0:
            return done.stdout
        reason = _reason(done.stderr)
        failing = re.search(r"(?i)status ?(?:code)?:? 5\d\d", reason)
        # skopeo itself does not try these again.
        if pause is None or not (failing or re.search(r"\bEOF\b|connection reset", reason)):
            break
        time.sleep(pause)
    raise _failure(image, reason, pushed=command == "copy" and address == words[-1])


def _failure(image: str, reason: str, *, pushed: bool) -> HostError:
    host = "docker.io"
    if re.search(r"[.:].*/", image):
        host = image.partition("/")[0]
    other = "name a mirror in containers-registries.conf"
    if pushed:
        other = "run it again: what was sent is kept"
    fault, first = next(row[1:] for row in _FAILURES if re.search(row[0], reason))
    hint = f"{first.format(host=host, image=image)}, or {other}"
    return HostError(f"the registry of {image} {fault}: {reason}", hint=hint, about=image)


def _reason(log: str) -> str:
    if re.search("too ?many ?requests", log, re.I):
        return "its rate limit is reached (HTTP status 429)"
    messages = re.findall(r'level=fatal msg="(.*)"', log) or [
        log.strip().rpartition("\n")[2] or "skopeo failed"
    ]
    # The query of an upload's address is a token, and longer than all else.
    return re.sub(r'\?[^" ]*', "", str(messages[-1]).replace('\\"', '"'))[:300]


def resolve_commit(name: str, pin: Commit) -> LockedFile:
    """Return the archive of the commit of package ``name``."""
    with tempfile.TemporaryDirectory(prefix="primus-git-") as folder:
        archive_commit(pin, "archive.tar", Path(folder))
        with Path(folder, "archive.tar").open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
    return LockedFile(
        kind="git",
        name=name,
        version=pin.version,
        file=pin.file_of(name),
        size=size,
        sha256=sha256,
    )


def archive_commit(pin: Commit, name: str, folder: Path) -> None:
    """Write the archive of the commit to ``folder``.

    Raises InputError for an unknown commit, HostError without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="primus-git-") as scratch:
        source = Path(scratch, "source")
        _check_out(source, pin.url, pin.commit)
        paths = []
        for path in source.rglob("*"):
            # The repository of a submodule is a file or folder of the name .git.
            name_in_source = path.relative_to(source)
            if (path.is_symlink() or path.is_file()) and ".git" not in name_in_source.parts:
                paths.append(name_in_source)
        with tarfile.open(folder / name, "w", format=tarfile.GNU_FORMAT) as archive:
            for path in sorted(paths, key=os.fsencode):
                archive.add(source / path, f"source/{path}", recursive=False, filter=_plain)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = _MTIME
    member.uid = 0
    member.gid = 0
    member.uname = ""
    member.gname = ""
    if member.issym():
        member.mode = 0o777
    elif member.mode & 0o100:
        member.mode = 0o755
    else:
        member.mode = 0o644
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
        name = Path(url).name.removesuffix(".git")
        raise InputError(
            f"{bare_url(url)} sends no commit {commit}",
            hint="correct `commit` in versions.yaml; the server must send single commits (git "
            "2.26 or newer does)",
            about=name,
        ) from None
    git("checkout", "--quiet", "--detach", commit)
    git("submodule", "--quiet", "update", "--init", "--recursive", "--depth=1")


def _git(source: Path, url: str, template: Path, *words: str, **options: Any) -> None:
    # Another host must not name folders of this one.
    local = "always" if url.startswith("file:") else "never"
    settings = ["-c", f"http.lowSpeedTime={_SILENCE_S}", "-c", "http.lowSpeedLimit=1"]
    settings += ["-c", f"protocol.file.allow={local}", "-C", str(source)]
    variables = {"GIT_TERMINAL_PROMPT": "0", "GIT_TEMPLATE_DIR": str(template), "LC_ALL": "C.UTF-8"}
    options["env"] = os.environ | variables
    about = Path(url).name.removesuffix(".git")
    try:
        done = run_tool(["git", *settings, *words], url, words[0], **options)
    except HostError as error:
        error.about = about
        raise
    if done.returncode == 0:
        return
    reasons = re.findall(r"^(?:fatal|error): (.*)", done.stderr, re.M)
    reason = [*reasons, "git failed"][0]
    address = bare_url(url)
    raise HostError(
        f"the repository {address} does not answer: {reason.replace(url, address)}",
        hint="check the address and the network, or give git a login for it",
        about=about,
    )
