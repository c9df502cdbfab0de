"""Images of a registry: the layers of a digest, and their bytes.

skopeo accesses the registry with this host's mirrors (containers-registries.conf), certificates and logins.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primus.errors import HostError, InputError
from primus.files import text_if_readable
from primus.versions import traffic
from primus.versions.lock import LockedFile
from primus.versions.traffic import Request, notify, requesting
from primus.versions.traffic import cause as known_cause

_GZIP = {
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
}
_STATUS = "var/lib/dpkg/status"
# A registry may copy and hash a blob of gigabytes before it confirms it.
_COMMIT_S = 300.0
_MIRROR = "name a mirror in containers-registries.conf"


def probe(image: str) -> None:
    """Raise HostError if the registry does not return the image's manifest."""
    skopeo("--command-timeout", "3.5s", "inspect", "--raw", f"docker://{image}")


def resolve_image(base: str, image: str, architecture: str) -> tuple[LockedFile, ...]:
    """Return the layers of ``image`` (``name@sha256:…``), lowest first.

    Raises InputError for an image of another platform or with unsupported layers, HostError if the registry does
    not answer or sends other bytes.
    """
    try:
        return _layers(base, image, architecture)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        hint = f"name another image for base {base}"
        raise InputError(f"{image} has a damaged manifest: {error!r}"[:300], hint=hint, about=image) from None


def _layers(base: str, image: str, architecture: str) -> tuple[LockedFile, ...]:
    name, _, digest = image.partition("@")
    manifest = _manifest(name, digest)
    if "manifests" in manifest:
        platform = {"os": "linux", "architecture": architecture}
        fits = [m for m in manifest["manifests"] if platform.items() <= m.get("platform", {}).items()]
        if not fits:
            raise InputError(
                f"{image} has no image for linux/{architecture}", hint=f"choose another for base {base}", about=name
            )
        manifest = _manifest(name, str(fits[0]["digest"]))
    if not manifest.get("layers"):
        kind = manifest.get("mediaType") or f"schema {manifest.get('schemaVersion', 'unknown')}"
        raise InputError(
            f"{image} is not an image with layers, but {kind}",
            hint=f"name the digest of an OCI or Docker schema 2 image for base {base}",
            about=name,
        )
    short = name.rpartition("/")[2].partition(":")[0]
    layers = []
    for number, layer in enumerate(manifest.get("layers", ()), 1):
        if layer["mediaType"] not in _GZIP:
            raise InputError(
                f"{image} has a layer of type {layer['mediaType']}", hint="only gzip layers are supported", about=name
            )
        sha256 = str(layer["digest"]).removeprefix("sha256:")
        layers.append(
            LockedFile(
                kind="layer",
                name=f"{short}-{number:02}",
                version=digest,
                file=f"{sha256}.tar.gz",
                size=int(layer["size"]),
                sha256=sha256,
                base=base,
            )
        )
    return tuple(layers)


def copy_image(image: str, architecture: str, folder: Path) -> None:
    """Copy the image to ``folder``: one file per layer, named by the 64 digits of its digest, with unchanged bytes."""
    platform = ("--override-os", "linux", "--override-arch", architecture)
    skopeo(*platform, "copy", "--quiet", f"docker://{image}", f"dir:{folder}", grows=folder)


def dpkg_status(image: str, architecture: str, layers: tuple[LockedFile, ...], folder: Path) -> str:
    """Return dpkg's status in the image, which lists its packages. Empty for an image without dpkg.

    Raises InputError for a layer that is not a gzip-compressed tar archive.
    """
    copy_image(image, architecture, folder)
    status = ""
    for layer in layers:
        try:
            with tarfile.open(folder / layer.sha256, "r:gz") as archive:
                for member in archive:
                    if member.name.removeprefix("./") == _STATUS and (file := archive.extractfile(member)):
                        status = file.read().decode("utf-8", "replace")
        # tarfile passes on what gzip, the numbers of a sparse file and thousands of extended headers raise.
        except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, RecursionError) as error:
            raise InputError(
                f"layer sha256:{layer.sha256} of {image} is not a gzip-compressed tar archive: {error}",
                hint="choose another image",
                about=image.partition("@")[0],
            ) from None
    return status


def _manifest(name: str, digest: str) -> dict[str, Any]:
    data = skopeo("inspect", "--raw", f"docker://{name}@{digest}")
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise HostError(
            f"the registry of {name} sent different bytes for {digest}", hint="do not trust that registry", about=name
        )
    try:
        manifest = json.loads(data)
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict):
        raise InputError(f"{name}@{digest} is not a manifest", hint="correct `image` in versions.yaml", about=name)
    return manifest


def skopeo(*words: str, grows: Path | None = None) -> bytes:
    """Return the output of ``skopeo WORDS``. Raises HostError with the reason for a failure.

    ``inspect`` is ended after ``PATIENCE.read_s`` seconds. A copy to the folder ``grows`` is ended if it has not
    grown for as long, and a copy to a registry if nothing was sent for ``_COMMIT_S``.
    """
    if shutil.which("skopeo") is None:
        raise HostError("skopeo is missing; it is needed to copy images", hint="apt-get install skopeo")
    address = next((word for word in words if word.startswith("docker://")), words[-1])
    image = address.removeprefix("docker://").partition("@")[0]
    patience = traffic.PATIENCE
    for number in range(1, patience.tries + 1):
        out, cause = _skopeo(words, address, image, grows)
        if out is not None:
            return out
        # An expired token looks like a missing login. The next run requests a new one.
        if number == patience.tries or not (cause.startswith("HTTP status 5") or (cause in _PASSING and number == 1)):
            break
        notify(f"{address} ({image}): {cause}; retrying")
        time.sleep(patience.pause_s * 2 ** (number - 1))
    login = f"sign in (skopeo login {image.partition('/')[0] if '.' in image or ':' in image else 'docker.io'})"
    hint = f"{login} or wait" if "rate limit" in cause else "check the network"
    more = "run the command again: what was sent is kept" if address is words[-1] else _MIRROR
    raise HostError(f"the registry of {image} does not answer: {cause}", hint=f"{hint}, or {more}", about=image)


# Causes of :func:`_reason` that may be gone in a second run.
_PASSING = ("it wants credentials", "the connection was reset", "it ended early")


def _skopeo(words: Sequence[str], address: str, image: str, grows: Path | None) -> tuple[bytes | None, str]:
    """Return the output of one run, or None and the cause of its failure."""
    # skopeo itself waits minutes for a rate limit; its log names it.
    with tempfile.TemporaryFile() as log, requesting("skopeo", address, image, words[-2]) as request:
        command = ["skopeo", "--debug", *words]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log) as process:
            try:
                out = _communicate(
                    process, request, grows, traffic.PATIENCE.read_s if grows or "inspect" in words else _COMMIT_S
                )
            except BaseException:
                process.kill()
                raise
        log.seek(0)
        text = log.read().decode("utf-8", "replace")
        if process.returncode == 0 and out is not None:
            request.answer(None, size=len(out))
            return out, ""
        text = text.replace(image, "IMAGE")
        cause = _reason(text if out is not None else f"{text} deadline exceeded")
        request.verdict = f"failed: {cause}"
    return None, cause


def _communicate(
    process: subprocess.Popen[bytes], request: Request, grows: Path | None, silence_s: float
) -> bytes | None:
    """Return the tool's output; None if it was ended because of ``silence_s`` seconds of silence."""
    size = -1
    sent = Path(f"/proc/{process.pid}/io")
    while True:
        try:
            return process.communicate(timeout=0.2)[0]
        except subprocess.TimeoutExpired:
            # "wchar: N" is the number of bytes written, also to sockets. The log has a few lines per request.
            wrote = text_if_readable(sent).partition("wchar: ")[2].partition("\n")[0]
            now = _size(grows) if grows else int(wrote or 0)
            if now > size:
                size = now
                request.hear()
            if time.monotonic() - request.heard > silence_s:
                process.kill()
                process.communicate()
                return None


def _size(folder: Path) -> int:
    """Return the bytes of the files in the folder; 0 if it does not exist."""
    size = 0
    for file in folder.iterdir() if folder.is_dir() else ():
        # skopeo renames its temporary files meanwhile.
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


def _reason(text: str) -> str:
    last = (re.findall(r'level=fatal msg="(.*)"', text) or re.findall(r'msg="(.*)"', text) or ["skopeo failed"])[-1]
    faults = "\n".join(line for line in text.splitlines() if "level=debug" not in line or "Too many" in line)
    status = re.search(r"status(?: code)?:? (5\d\d)|(5\d\d) \((?:Internal|Bad|Service|Gateway)", faults)
    if status:
        return f"HTTP status {status[1] or status[2]}"
    return known_cause("skopeo", faults) or last.replace('\\"', '"')[:300]
