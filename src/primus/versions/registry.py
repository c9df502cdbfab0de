"""Images of a registry: the layers of a digest, and their bytes.

skopeo accesses the registry with this host's mirrors (containers-registries.conf), certificates and logins. It compares
every manifest with its digest.
"""

import gzip
import json
import re
import tarfile
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from primus.errors import HostError, InputError
from primus.versions.lock import ARCHITECTURE, LockedFile
from primus.versions.traffic import run_tool

_STATUS = "var/lib/dpkg/status"


def resolve_image(base: str, image: str) -> tuple[tuple[LockedFile, ...], str]:
    """Return the layers of ``image`` (``name@sha256:…``), lowest first, and dpkg's status in it (empty without dpkg).

    Raises InputError for an image of another platform or with unsupported layers.
    """
    # A copy may take long, but a registry that does not answer is named within seconds.
    skopeo("inspect", "--command-timeout", "15s", "--raw", f"docker://{image}")
    with tempfile.TemporaryDirectory(prefix="primus-image-") as name:
        folder = Path(name)
        try:
            copy_image(image, folder)
        except HostError as error:
            if "no image found" not in error.message:
                raise
            raise InputError(
                f"{image} has no image for linux/{ARCHITECTURE}", hint=f"choose another for base {base}", about=image
            ) from None
        layers = _layers(base, image, json.loads((folder / "manifest.json").read_bytes()))
        return layers, _dpkg_status(image, layers, folder)


def _layers(base: str, image: str, manifest: Mapping[str, Any]) -> tuple[LockedFile, ...]:
    name = image.partition("@")[0]
    layers = manifest.get("layers", ())
    if not layers:
        hint = f"name the digest of an OCI or Docker schema 2 image for base {base}"
        raise InputError(f"{image} is not an image with layers", hint=hint, about=name)
    types = (str(layer.get("mediaType")) for layer in layers)
    if other := next((kind for kind in types if not kind.endswith(("tar+gzip", "diff.tar.gzip"))), None):
        raise InputError(f"{image} has a layer of type {other}", hint="only gzip layers are supported", about=name)
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


def copy_image(image: str, folder: Path) -> None:
    """Copy the image to ``folder``: one file per layer, named by the 64 digits of its digest, with unchanged bytes."""
    platform = ("--override-os", "linux", "--override-arch", ARCHITECTURE)
    skopeo("copy", "--quiet", *platform, f"docker://{image}", f"dir:{folder}")


def _dpkg_status(image: str, layers: Sequence[LockedFile], folder: Path) -> str:
    status = ""
    for layer in layers:
        try:
            with tarfile.open(folder / layer.sha256, "r:gz") as archive:
                for member in archive:
                    if member.name.removeprefix("./") == _STATUS and (file := archive.extractfile(member)):
                        status = file.read().decode("utf-8", "replace")
        # tarfile passes on what gzip, the numbers of a sparse file and thousands of extended headers raise.
        except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, RecursionError) as error:
            message = f"layer sha256:{layer.sha256} of {image} is not a gzip-compressed tar archive: {error}"
            raise InputError(message, hint="choose another image", about=image.partition("@")[0]) from None
    return status


def skopeo(command: str, *words: str) -> str:
    """Return the output of ``skopeo COMMAND WORDS``. Raises HostError with skopeo's own words for a failure."""
    address = next(word for word in words if word.startswith("docker://"))
    image = address.removeprefix("docker://").partition("@")[0]
    for pause in (0.5, 2.0, None):
        # Only the debug log tells that skopeo waits because of a rate limit.
        done = run_tool(["skopeo", "--debug", command, "--retry-times", "2", *words], address, command)
        if done.returncode == 0:
            return done.stdout
        reason = _reason(done.stderr)
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
