"""The documents about an image: bill of materials, provenance, lock, and findings of the gates.

They depend only on the image, its lock and the commit, and contain neither times nor host names, so
a rebuild of the commit gives the same documents, byte for byte.

Licences are SPDX expressions of what packages declare: metadata of wheels, and copyright files of
Debian. None is guessed: what names no licence of SPDX's list, such as "BSD", is a reference to its
own words (``LicenseRef-…``).
"""

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from license_expression import ExpressionError, get_spdx_licensing

from primus_images import __version__
from primus_images.errors import InputError
from primus_images.gates.check import Outcome
from primus_images.gates.examined import LayerFacts
from primus_images.oci.store import canonical_json, digest_of
from primus_images.plan.action import Composed
from primus_images.release.artifact import Document
from primus_images.terminal import Screen
from primus_images.versions.lock import LockedFile
from primus_images.yamlfile import filled, read_values

GATES = "application/vnd.primus.gates.v1+json"
LOCK = "application/vnd.primus.lock.v1+json"
SPDX = "application/spdx+json"
CYCLONEDX = "application/vnd.cyclonedx+json"
IN_TOTO = "application/vnd.in-toto+json"
VALIDATION = "application/vnd.primus.validation.v1+json"
_UNKNOWN = "NOASSERTION"
_IMAGE = "SPDXRef-image"
_WORDS = {
    "CONTAINS": "inside",
    "GENERATED_FROM": "built from",
    "BUILD_TOOL_OF": "needed by a build",
}
_GNU = r"(A?GPL|LGPL|GFDL)[- ]?v?([0-9](?:\.[0-9])?)(?:\.0)?(\+|-or-later)?"
_SHORT = 60
_FORMS: Any = read_values(Path(__file__).with_name("documents.yaml")).data
_spdx = cache(get_spdx_licensing)


@dataclass
class Licences:
    """``declared`` maps ``wheel NAME`` and ``deb NAME`` to expressions, ``texts`` each LicenseRef
    in them to words, and ``sources`` Debian packages to name and version of their source.
    """

    declared: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


def documents(
    image: Composed,
    outcome: Outcome,
    facts: Mapping[str, LayerFacts],
    commit: str | None,
    edited: Sequence[str],
) -> tuple[Document, ...]:
    """Return the image's bills of materials, lock, gate findings, and provenance, which names the
    others' hashes.

    ``facts`` are those of its layers. ``edited`` are the files that differ from ``commit``.
    """
    resolved = image.plan.resolved
    files = [Document(media_type=GATES, name="gates.json", data=canonical_json(outcome.as_json()))]
    if resolved.lock:
        spdx = bill(image, commit, edited, licences(facts))
        files.append(
            Document(media_type=LOCK, name="lock.json", data=resolved.lock_path.read_bytes())
        )
        files.append(Document(media_type=SPDX, name="sbom.spdx.json", data=canonical_json(spdx)))
        files.append(
            Document(
                media_type=CYCLONEDX, name="sbom.cdx.json", data=canonical_json(cyclonedx(spdx))
            )
        )
    provenance = statement(image, None if edited else commit, files)
    return (
        *files,
        Document(media_type=IN_TOTO, name="provenance.json", data=canonical_json(provenance)),
    )


def checkout(root: Path) -> tuple[str | None, list[str]]:
    """Return the commit checked out at ``root`` (None outside git) and the files that differ from
    it.
    """
    commit = git(root, "rev-parse", "--verify", "HEAD").decode()
    return commit or None, [
        line[3:] for line in git(root, "status", "--porcelain").decode().splitlines()
    ]


def git(root: Path, *words: str) -> bytes:
    """Return what git prints, without line ends at its end; nothing if it fails or is missing."""
    try:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, check=True
        ).stdout.rstrip(b"\n")
    except (OSError, subprocess.CalledProcessError):
        return b""


def statement(image: Composed, commit: str | None, others: Sequence[Document]) -> dict[str, Any]:
    """Return the provenance of the image: an in-toto statement with SLSA's predicate.

    ``commit`` is that of the repository, or None if unknown. ``others`` are the other documents
    about the image. The key of a layer's action is a hash of everything that can affect the layer's
    bytes.
    """
    resolved = image.plan.resolved
    origin = {
        "release": resolved.versions.release,
        "target": resolved.name,
        "channel": resolved.choice.channel,
        "preview": resolved.choice.preview or "",
        "gpu": resolved.gpu.name if resolved.gpu else None,
        "recipes": list(resolved.target.recipes),
        "components": resolved.trained_with,
    }
    if commit:
        source = [{"name": "source", "digest": {"gitCommit": commit}}]
    else:
        source = []
    locked = ()
    if resolved.lock:
        locked = resolved.lock.files
    files = [{"uri": purl(file), "digest": {"sha256": file.sha256}} for file in locked]
    products = {other.name: digest_of(other.data).removeprefix("sha256:") for other in others}
    return form(
        "provenance",
        ref=resolved.ref,
        sha256=image.digest.removeprefix("sha256:"),
        origin=origin,
        layers={action.name: action.key for action in image.plan.layers},
        dependencies=[*source, *files],
        version=__version__,
        byproducts=[
            {"name": name, "digest": {"sha256": sha256}} for name, sha256 in products.items()
        ],
    )


def bill(
    image: Composed, commit: str | None, edited: Sequence[str], licensed: Licences
) -> dict[str, Any]:
    """Return the bill of materials of the image, as SPDX 2.3. Raises InputError if its target has
    no lock.

    A file that only a build needed is ``BUILD_TOOL_OF`` the image. The image is ``GENERATED_FROM``
    a source that was built into a wheel. Components from the repository have its ``commit`` as
    their version.
    """
    resolved = image.plan.resolved
    if resolved.lock is None:
        raise InputError(
            f"{resolved.name} has no lock, so its contents are unknown", hint=resolved.lock_command
        )
    checksum = image.digest.removeprefix("sha256:")
    whole = _package(_IMAGE, "primus", resolved.ref, sha256=checksum, purpose="CONTAINER")
    packages = [whole]
    relations = []
    for file in resolved.lock.files:
        name = _identifier("-".join(filter(None, (file.kind, file.base, file.name, file.version))))
        kind = "wheel"
        if file.kind == "deb":
            kind = "deb"
        source = None
        if kind == "deb":
            source = licensed.sources.get(file.name)
        licence = licensed.declared.get(f"{kind} {file.name}", _UNKNOWN)
        reference = {
            "referenceCategory": "PACKAGE-MANAGER",
            "referenceType": "purl",
            "referenceLocator": purl(file),
        }
        if source:
            source = f"source package {source}"
        else:
            source = None
        more = {"file": file.file, "source": source, "references": [reference]}
        packages.append(
            _package(name, file.name, file.version, licence=licence, sha256=file.sha256, **more)
        )
        if file.kind in ("sdist", "git"):
            relations.append(_relation(_IMAGE, "GENERATED_FROM", name))
        elif file.base in resolved.roots or (file.kind == "wheel" and file.base is None):
            relations.append(_relation(_IMAGE, "CONTAINS", name))
        else:
            relations.append(_relation(name, "BUILD_TOOL_OF", _IMAGE))
    version = (commit or "unknown") + ("+edited" if edited else "")
    for component in sorted(component for component, pin in resolved.pins.items() if pin.path):
        name = _identifier(f"local-{component}")
        packages.append(_package(name, component, version))
        relations.append(_relation(_IMAGE, "CONTAINS", name))
    return form(
        "spdx",
        ref=resolved.ref,
        namespace=f"https://spdx.org/spdxdocs/primus-{resolved.ref}-{checksum}",
        created=image.plan.config["created"],
        creators=[f"Tool: primus-images-{__version__}"],
        packages=packages,
        licences=[
            {"licenseId": reference, "name": reference[11:-9], "extractedText": text}
            for reference, text in sorted(licensed.texts.items())
        ],
        relations=relations,
    )


def cyclonedx(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of :func:`bill` as CycloneDX 1.6. What only a build needed is
    ``excluded`` from the image.
    """
    whole, *packages = document["packages"]
    tools = {
        r["spdxElementId"]
        for r in document["relationships"]
        if r["relationshipType"] == "BUILD_TOOL_OF"
    }

    def component(package: Mapping[str, Any]) -> dict[str, Any]:
        declared = package["licenseDeclared"]
        return form(
            "component",
            identifier=package["SPDXID"],
            type="container" if package is whole else "library",
            name=package["name"],
            version=package["versionInfo"],
            scope="excluded" if package["SPDXID"] in tools else "required",
            hashes=[
                {"alg": "SHA-256", "content": row["checksumValue"]}
                for row in package.get("checksums", ())
            ]
            or None,
            purl=package["externalRefs"][0]["referenceLocator"]
            if "externalRefs" in package
            else None,
            licenses=[{"expression": declared}] if declared != _UNKNOWN else None,
        )

    created = document["creationInfo"]["created"]
    return form(
        "cyclonedx", created=created, image=component(whole), components=[*map(component, packages)]
    )


def listing(document: Mapping[str, Any]) -> str:
    """Return the document of :func:`bill` as lines: package, version, and its relation to the
    image.
    """
    packages = {package["SPDXID"]: package for package in document["packages"]}
    rows = []
    for relation in document["relationships"]:
        (other,) = {relation["spdxElementId"], relation["relatedSpdxElement"]} - {_IMAGE}
        package = packages[other]
        licence = package["licenseDeclared"].replace(_UNKNOWN, "licence not declared")
        rows.append(
            (package["name"], package["versionInfo"], _WORDS[relation["relationshipType"]], licence)
        )
    return "\n".join(Screen.of().table(rows))


def purl(file: LockedFile) -> str:
    """Return the package URL of a locked file. It names no host; the checksum identifies the bytes.

    See https://github.com/package-url/purl-spec.
    """
    name = quote(file.name, safe="")
    version = quote(file.version, safe="")
    if file.kind in ("wheel", "sdist"):
        return f"pkg:pypi/{name}@{version}?file_name={quote(file.file, safe='')}"
    if file.kind == "deb":
        arch = "amd64"
        if file.file.endswith("_all.deb"):
            arch = "all"
        return f"pkg:deb/debian/{name}@{version}?arch={arch}"
    if file.kind == "layer":
        return f"pkg:oci/{name}@sha256%3A{file.sha256}"
    return f"pkg:generic/{name}@{version}?checksum=sha256%3A{file.sha256}"


def _package(
    identifier: str,
    name: str,
    version: str,
    *,
    licence: str = _UNKNOWN,
    sha256: str = "",
    **more: object,
) -> dict[str, Any]:
    checksums = None
    if sha256:
        checksums = [{"algorithm": "SHA256", "checksumValue": sha256}]
    more = {
        **dict.fromkeys(("file", "source", "purpose", "references")),
        "checksums": checksums,
        **more,
    }
    return form(
        "package", identifier=identifier, name=name, version=version, licence=licence, **more
    )


def form(name: str, /, **values: object) -> dict[str, Any]:
    """Return the form ``name`` of ``documents.yaml`` with these values. A key whose value is None
    is left out.
    """
    document: dict[str, Any] = filled(_FORMS[name], values)
    return document


def _relation(element: str, kind: str, related: str) -> dict[str, str]:
    return {"spdxElementId": element, "relationshipType": kind, "relatedSpdxElement": related}


def _identifier(text: str) -> str:
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", lambda match: f"-{ord(match[0]):x}-", text)


def licences(facts: Mapping[str, LayerFacts]) -> Licences:
    """Return what the packages in the layers declare. A package that declares nothing is left out."""
    result = Licences()
    copyrights = {name: text for layer in facts.values() for name, text in layer.copyrights.items()}
    for item in (
        item for layer in facts.values() for item in layer.stated if item.kind in ("wheel", "deb")
    ):
        if item.kind == "wheel":
            expression = _of_rows(item.licence, result.texts)
        else:
            result.sources[item.name] = item.source
            text = copyrights.get(item.name, "")
            expression = _of_copyright(copyrights.get(text, text), result.texts)
        if expression:
            result.declared[f"{item.kind} {item.name}"] = expression
    return result


def _of_rows(rows: Iterable[tuple[str, str]], texts: dict[str, str]) -> str:
    """Return the licence in the rows of a wheel's METADATA: License-Expression, else License, else
    classifiers.
    """
    fields: dict[str, list[str]] = {}
    for key, value in rows:
        fields.setdefault(key, []).append(value)
    declared = fields.get("License-Expression")
    if declared:
        return declared[0]
    words = [word for word in fields.get("License", ()) if word.upper() != "UNKNOWN"]
    words = words or [value.rpartition(" :: ")[2] for value in fields.get("Classifier", ())]
    return _all(_named(word, word, texts) for word in words)


def _of_copyright(text: str, texts: dict[str, str]) -> str:
    """Return the licences of all files, of a copyright file in Debian's format or, by reference, in
    any other.
    """
    if not text:
        return ""
    if "copyright-format/1.0" not in text[:800]:
        return _reference("copyright", text, texts)
    fields = r"^([A-Za-z-]+):[ \t]*(.*(?:\n[ \t].*)*)"
    stanzas = [dict(re.findall(fields, stanza, re.M)) for stanza in re.split(r"\n\s*\n", text)]
    licensed = [
        (name, whole)
        for s in stanzas
        if "License" in s
        for name, _, whole in [s["License"].partition("\n")]
    ]
    bodies = {name.strip().lower(): whole for name, whole in licensed if whole.strip()}
    files = [s["License"].partition("\n")[0] for s in stanzas if "Files" in s and "License" in s]
    return _all(_words(name, bodies, texts) for name in dict.fromkeys(files))


def _words(name: str, bodies: Mapping[str, str], texts: dict[str, str]) -> str:
    """Translate ``GPL-2+ or Artistic, and Expat``: `or` binds before a comma."""

    def named(part: str) -> str:
        return _named(part, bodies.get(part.strip().lower(), part), texts)

    def alternatives(part: str) -> str:
        names = re.split(r"\s+(?:and/or|or)\s+", part)
        return " OR ".join(_all(map(named, re.split(r"\s+and\s+", n))) for n in names)

    return _all(map(alternatives, re.split(r",\s*(?:and\s+)?", name.strip())))


def _named(name: str, text: str, texts: dict[str, str]) -> str:
    name = name.strip().partition("\n")[0].strip()
    gnu = re.fullmatch(_GNU, name)
    if gnu:
        if "." in gnu[2] or gnu[1] == "GFDL":
            version = gnu[2]
        else:
            version = f"{gnu[2]}.0"
        return f"{gnu[1]}-{version}-{'or-later' if gnu[3] else 'only'}"
    exact = licence_names().get(name.lower())
    return exact or (_expression(name) or _reference(name, text, texts) if name else "")


def _reference(name: str, text: str, texts: dict[str, str]) -> str:
    short = re.sub(r"[^A-Za-z0-9.]+", "-", name[:_SHORT]).strip("-")
    reference = f"LicenseRef-{short}-{sha256(text.encode()).hexdigest()[:8]}"
    texts[reference] = text
    return reference


@cache
def _expression(text: str) -> str:
    try:
        return str(_spdx().parse(text, validate=True, strict=True))
    except ExpressionError:
        return ""


@cache
def licence_names() -> dict[str, str]:
    """Return SPDX's name of each licence by its names in small letters, among them common ones of
    no standard.
    """
    names = read_values(Path(__file__).with_name("licences.yaml")).data
    return {
        **names,
        **{key.lower(): key for key in _spdx().known_symbols if not key.startswith("LicenseRef")},
    }


def _all(expressions: Iterable[str]) -> str:
    parts = dict.fromkeys(filter(None, expressions))
    return " AND ".join(
        f"({part})" if " OR " in part and len(parts) > 1 else part for part in parts
    )
