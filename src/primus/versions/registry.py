"""Images of a registry: the layers of a digest, and their bytes.

skopeo accesses the registry with this host's mirrors (containers-registries.conf), certificates and logins.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import time
import zlib
from pathlib import Path
from typing import Any

from primus.errors import HostError, InputError
from primus.versions.lock import LockedFile
from primus.versions.traffic import requesting

_GZIP = {
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
}
_STATUS = "var/lib/dpkg/status"


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
    skopeo("copy", "--quiet", *platform, f"docker://{image}", f"dir:{folder}")


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
    data = skopeo("inspect", "--command-timeout", "15s", "--raw", f"docker://{name}@{digest}")
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


def skopeo(command: str, *words: str) -> bytes:
    """Return the output of ``skopeo COMMAND WORDS``. Raises HostError with skopeo's own words for a failure."""
    if shutil.which("skopeo") is None:
        raise HostError("skopeo is missing; it is needed to copy images", hint="apt-get install skopeo")
    address = next(word for word in words if word.startswith("docker://"))
    image = address.removeprefix("docker://").partition("@")[0]
    for pause in (0.5, 2.0, None):
        with requesting("skopeo", address, image, command) as request:
            # Only the debug log tells that skopeo waits because of a rate limit.
            run = ["skopeo", "--debug", command, "--retry-times", "2", *words]
            done = subprocess.run(run, capture_output=True, check=False, stdin=subprocess.DEVNULL)
            if done.returncode == 0:
                request.answer(None, size=len(done.stdout))
                return done.stdout
        reason = _reason(done.stderr.decode("utf-8", "replace"))
        # skopeo itself does not try these again.
        if pause is None or not re.search(r"status(?: code)?:? 5\d\d|\bEOF\b|connection reset", reason):
            break
        time.sleep(pause)
    host = image.partition("/")[0] if re.search(r"[.:].*/", image) else "docker.io"
    refused = re.search("rate limit|unauthorized|authentication|denied", reason)
    first = f"sign in (skopeo login {host})" if refused else "check the network"
    pushed = command == "copy" and address == words[-1]
    other = "run it again: what was sent is kept" if pushed else "name a mirror in containers-registries.conf"
    raise HostError(f"the registry of {image} does not answer: {reason}", hint=f"{first}, or {other}", about=image)


def _reason(log: str) -> str:
    if re.search("too ?many ?requests", log, re.I):
        return "its rate limit is reached (HTTP status 429)"
    messages = re.findall(r'level=fatal msg="(.*)"', log) or [log.strip().rpartition("\n")[2] or "skopeo failed"]
    # The query of an upload's address is a token, and longer than all else.
    return re.sub(r'\?[^" ]*', "", str(messages[-1]).replace('\\"', '"'))[:300]
