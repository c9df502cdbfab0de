"""Images of a registry: which layers a digest stands for, and the bytes; through skopeo, which knows this host's
mirrors (containers-registries.conf), certificates and logins.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from primus.errors import HostError, InputError
from primus.versions.lock import LockedFile

__all__ = ["copy_image", "installed", "probe", "resolve_image", "skopeo"]

_GZIP = {
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
}


def probe(image: str) -> None:
    """Raise HostError when the registry does not give the image's manifest."""
    skopeo("--command-timeout", "4s", "inspect", "--raw", f"docker://{image}")


def resolve_image(base: str, image: str, architecture: str) -> tuple[LockedFile, ...]:
    """The layers of ``image`` (``name@sha256:…``), lowest first.

    Raises InputError for an image of another platform or with layers of a kind that is not taken, HostError when the
    registry does not answer or sends other bytes.
    """
    name, _, digest = image.partition("@")
    manifest = _manifest(name, digest)
    if "manifests" in manifest:
        wanted = {"os": "linux", "architecture": architecture}
        fits = [m for m in manifest["manifests"] if wanted.items() <= m.get("platform", {}).items()]
        if not fits:
            raise InputError(f"{image} has no image for linux/{architecture}", hint=f"choose another for base {base}")
        manifest = _manifest(name, str(fits[0]["digest"]))
    short = name.rpartition("/")[2].partition(":")[0]
    layers = []
    for number, layer in enumerate(manifest.get("layers", ()), 1):
        if layer["mediaType"] not in _GZIP:
            raise InputError(f"{image} has a layer of type {layer['mediaType']}", hint="only gzip layers are taken")
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
    """Bring the image into ``folder``: one file per layer, called by the 64 digits of its digest, bytes unchanged."""
    platform = ("--override-os", "linux", "--override-arch", architecture)
    skopeo(*platform, "copy", "--quiet", f"docker://{image}", f"dir:{folder}")


def installed(image: str, architecture: str, layers: tuple[LockedFile, ...], folder: Path) -> str:
    """dpkg's status in the image: the packages that it brings already. Empty for an image without dpkg."""
    copy_image(image, architecture, folder)
    status = ""
    for layer in layers:
        with tarfile.open(folder / layer.sha256, "r:gz") as archive:
            for member in archive:
                if member.name.removeprefix("./") == "var/lib/dpkg/status" and (file := archive.extractfile(member)):
                    status = file.read().decode("utf-8", "replace")
    return status


def _manifest(name: str, digest: str) -> dict[str, Any]:
    data = skopeo("inspect", "--raw", f"docker://{name}@{digest}")
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise HostError(f"the registry of {name} sent different bytes for {digest}", hint="do not trust that registry")
    manifest: dict[str, Any] = json.loads(data)
    return manifest


def skopeo(*words: str) -> bytes:
    """What ``skopeo WORDS`` prints; the last word is the image. HostError says why the registry does not do it."""
    if shutil.which("skopeo") is None:
        raise HostError("skopeo is missing; it is needed to copy images", hint="apt-get install skopeo")
    done = subprocess.run(["skopeo", *words], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise HostError(
            f"the registry of {words[-1].removeprefix('docker://').partition('@')[0]} does not answer: "
            f"{_reason(done.stderr.decode('utf-8', 'replace'))}",
            hint="check the network, or name a mirror in containers-registries.conf",
        )
    return done.stdout


def _reason(text: str) -> str:
    known = {
        "no such host": "its name is not known",
        "connection refused": "connection refused",
        "deadline exceeded": "no answer in time",
        "timeout": "no answer in time",
        "manifest unknown": "it has no such image",
        "unauthorized": "it wants credentials",
        "denied": "it wants credentials",
        "x509": "its certificate is not trusted",
        "HTTP response to HTTPS client": "it speaks no TLS",
    }
    last = (re.findall(r'msg="(.*)"', text) or ["skopeo failed"])[-1].replace('\\"', '"')
    return next((words for mark, words in known.items() if mark in text), last[:300])
