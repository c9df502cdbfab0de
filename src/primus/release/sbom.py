"""The bill of materials of an image as SPDX 2.3 (https://spdx.github.io/spdx-spec/v2.3/): all files with checksums.

It depends only on the lock and the pins, so the same image has the same document, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from primus import __version__
from primus.release.purl import purl
from primus.versions.lock import Lock, LockedFile

_UNKNOWN = "NOASSERTION"
_IMAGE = "SPDXRef-image"
_WORDS = {"CONTAINS": "inside", "GENERATED_FROM": "built from", "BUILD_TOOL_OF": "needed by a build"}


def spdx(
    lock: Lock, *, ref: str, digest: str, roots: Collection[str], local: Mapping[str, str], created: str
) -> dict[str, Any]:
    """Return the document of the image called ``ref`` with manifest ``digest``.

    ``roots`` are the base and the extras of the image, as the lock calls them. ``local`` maps components from the
    repository to their commit. ``created`` is the time of the release in ISO 8601. A file that only a build needed is
    ``BUILD_TOOL_OF`` the image. The image is ``GENERATED_FROM`` a source that was built into a wheel.
    """
    packages, relations = [_image(ref, digest)], []
    for file in lock.files:
        name = _name("-".join(filter(None, (file.kind, file.base, file.name, file.version))))
        packages.append(_package(name, file))
        relations.append(_relation(name, file, roots))
    for component, commit in sorted(local.items()):
        name = _name(f"local-{component}")
        packages.append({**_plain(name, component, commit), "filesAnalyzed": False})
        relations.append(_say(_IMAGE, "CONTAINS", name))
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": ref,
        "documentNamespace": f"https://spdx.org/spdxdocs/primus-{ref}-{digest.removeprefix('sha256:')}",
        "creationInfo": {"created": created, "creators": [f"Tool: primus-images-{__version__}"]},
        "documentDescribes": [_IMAGE],
        "packages": packages,
        "relationships": relations,
    }


def listing(document: Mapping[str, Any]) -> str:
    """Return the document of :func:`spdx` as lines: package, version, and its relation to the image."""
    packages = {package["SPDXID"]: package for package in document["packages"]}
    rows = []
    for relation in document["relationships"]:
        other = {relation["spdxElementId"], relation["relatedSpdxElement"]} - {_IMAGE}
        package = packages[other.pop()]
        rows.append((package["name"], package["versionInfo"], _WORDS[relation["relationshipType"]]))
    wide = max((len(name) for name, _, _ in rows), default=0), max((len(version) for _, version, _ in rows), default=0)
    return "\n".join(f"{name:<{wide[0]}}  {version:<{wide[1]}}  {how}" for name, version, how in rows)


def _image(ref: str, digest: str) -> dict[str, Any]:
    return {
        **_plain(_IMAGE, "primus", ref),
        "filesAnalyzed": False,
        "primaryPackagePurpose": "CONTAINER",
        "checksums": [{"algorithm": "SHA256", "checksumValue": digest.removeprefix("sha256:")}],
    }


def _package(name: str, file: LockedFile) -> dict[str, Any]:
    return {
        **_plain(name, file.name, file.version),
        "packageFileName": file.file,
        "filesAnalyzed": False,
        "checksums": [{"algorithm": "SHA256", "checksumValue": file.sha256}],
        "externalRefs": [
            {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl(file)}
        ],
    }


def _plain(name: str, title: str, version: str) -> dict[str, Any]:
    return {
        "SPDXID": name,
        "name": title,
        "versionInfo": version,
        "downloadLocation": _UNKNOWN,
        "licenseConcluded": _UNKNOWN,
        "licenseDeclared": _UNKNOWN,
        "copyrightText": _UNKNOWN,
    }


def _relation(name: str, file: LockedFile, roots: Collection[str]) -> dict[str, str]:
    if file.kind in ("sdist", "git"):
        return _say(_IMAGE, "GENERATED_FROM", name)
    if file.base in roots or (file.kind == "wheel" and file.base is None):
        return _say(_IMAGE, "CONTAINS", name)
    return _say(name, "BUILD_TOOL_OF", _IMAGE)


def _say(one: str, kind: str, other: str) -> dict[str, str]:
    return {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}


def _name(text: str) -> str:
    """Return an SPDX identifier, which may contain letters, digits, dots and hyphens."""
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", lambda found: f"-{ord(found[0]):x}-", text)
