"""The bill of materials of an image, as SPDX and CycloneDX.

Both depend only on the image, its lock and the commit, and contain no time but that of the release,
so a rebuild of the commit gives the same bills, byte for byte. The libraries that write them are
imported where they are used: they take two seconds.
"""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from primus_images import __version__
from primus_images.errors import InputError
from primus_images.plan.action import Composed
from primus_images.plan.resolve import ResolvedTarget
from primus_images.release.git import Checkout
from primus_images.release.licences import Licences
from primus_images.terminal import Screen
from primus_images.versions.lock import LockedFile

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from spdx_tools.spdx.model import Package

Relation = Literal["CONTAINS", "GENERATED_FROM", "BUILD_TOOL_OF"]
IMAGE = "SPDXRef-image"
_WORDS: dict[Relation, str] = {
    "CONTAINS": "inside",
    "GENERATED_FROM": "built from",
    "BUILD_TOOL_OF": "needed by a build",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A package that an image contains, is generated from, or was built with.

    ``licence`` is an SPDX expression, and ``source`` name and version of Debian's source package.
    Both are empty if they are unknown. What comes from the repository has no file and no purl.
    """

    identifier: str
    name: str
    version: str
    relation: Relation
    file: str = ""
    sha256: str = ""
    purl: str = ""
    licence: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What an image is made of. ``texts`` are the words of licences that SPDX's list lacks."""

    ref: str
    sha256: str
    created: datetime
    parts: Sequence[Part]
    texts: dict[str, str]

    @property
    def namespace(self) -> str:
        """The name of its bill, which no other image has."""
        return f"https://spdx.org/spdxdocs/primus-{self.ref}-{self.sha256}"


def contents(image: Composed, source: Checkout, licensed: Licences) -> Contents:
    """Return what the image is made of. Raises InputError if its target has no lock.

    A file that only a build needed is ``BUILD_TOOL_OF`` the image. The image is ``GENERATED_FROM``
    a source that was built into a wheel. Components from the repository have its commit as version.
    """
    resolved = image.plan.resolved
    if resolved.lock is None:
        raise InputError(
            f"{resolved.name} has no lock, so its contents are unknown", hint=resolved.lock_command
        )
    parts = [_locked(file, resolved, licensed) for file in resolved.lock.files]
    for component in sorted(name for name, pin in resolved.pins.items() if pin.path):
        parts.append(
            Part(
                identifier=_identifier("local", component),
                name=component,
                version=source.version,
                relation="CONTAINS",
            )
        )
    return Contents(
        ref=resolved.ref,
        sha256=image.digest.removeprefix("sha256:"),
        created=datetime.fromisoformat(str(image.plan.config["created"])),
        parts=parts,
        texts=licensed.texts,
    )


def _locked(file: LockedFile, resolved: ResolvedTarget, licensed: Licences) -> Part:
    kind = "deb" if file.kind == "deb" else "wheel"
    relation: Relation = "BUILD_TOOL_OF"
    if file.kind in ("sdist", "git"):
        relation = "GENERATED_FROM"
    elif file.base in resolved.roots or (file.kind == "wheel" and file.base is None):
        relation = "CONTAINS"
    return Part(
        identifier=_identifier(file.kind, file.base, file.name, file.version),
        name=file.name,
        version=file.version,
        relation=relation,
        file=file.file,
        sha256=file.sha256,
        purl=purl(file),
        licence=licensed.declared.get(f"{kind} {file.name}", ""),
        source=licensed.sources.get(file.name, "") if kind == "deb" else "",
    )


def _identifier(*words: str | None) -> str:
    text = "-".join(filter(None, words))
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", lambda match: f"-{ord(match[0]):x}-", text)


def purl(file: LockedFile) -> str:
    """Return the package URL of a locked file. It names no host; the checksum identifies the bytes.

    See https://github.com/package-url/purl-spec.
    """
    from packageurl import PackageURL

    if file.kind in ("wheel", "sdist"):
        url = PackageURL("pypi", None, file.name, file.version, {"file_name": file.file})
    elif file.kind == "deb":
        arch = "all" if file.file.endswith("_all.deb") else "amd64"
        url = PackageURL("deb", "debian", file.name, file.version, {"arch": arch})
    elif file.kind == "layer":
        url = PackageURL("oci", None, file.name, f"sha256:{file.sha256}")
    else:
        checksum = {"checksum": f"sha256:{file.sha256}"}
        url = PackageURL("generic", None, file.name, file.version, checksum)
    return url.to_string()


def spdx(inside: Contents) -> dict[str, Any]:
    """Return the bill as SPDX 2.3."""
    from spdx_tools.spdx import model
    from spdx_tools.spdx.jsonschema.document_converter import DocumentConverter

    created = model.CreationInfo(
        "SPDX-2.3",
        "SPDXRef-DOCUMENT",
        inside.ref,
        inside.namespace,
        [model.Actor(model.ActorType.TOOL, f"primus-images-{__version__}")],
        inside.created.replace(tzinfo=None),
    )
    packages = [_spdx_package(_whole(inside), model.PackagePurpose.CONTAINER)]
    kind = model.RelationshipType
    relations = [model.Relationship("SPDXRef-DOCUMENT", kind.DESCRIBES, IMAGE)]
    for part in inside.parts:
        packages.append(_spdx_package(part))
        ends = (IMAGE, part.identifier)
        if part.relation == "BUILD_TOOL_OF":
            ends = (part.identifier, IMAGE)
        relations.append(model.Relationship(ends[0], kind[part.relation], ends[1]))
    texts = []
    for reference, text in sorted(inside.texts.items()):
        name = reference.removeprefix("LicenseRef-").rpartition("-")[0]
        texts.append(model.ExtractedLicensingInfo(reference, text, name))
    document = model.Document(
        created, packages, relationships=relations, extracted_licensing_info=texts
    )
    converted: dict[str, Any] = DocumentConverter().convert(document)
    return converted


def _whole(inside: Contents) -> Part:
    """Return the image itself as a package."""
    return Part(
        identifier=IMAGE,
        name="primus",
        version=inside.ref,
        relation="CONTAINS",
        sha256=inside.sha256,
    )


def _spdx_package(part: Part, purpose: Any = None) -> "Package":
    from license_expression import get_spdx_licensing
    from spdx_tools.spdx import model

    licence = model.SpdxNoAssertion()
    if part.licence:
        licence = get_spdx_licensing().parse(part.licence)
    checksums = []
    if part.sha256:
        checksums.append(model.Checksum(model.ChecksumAlgorithm.SHA256, part.sha256))
    references = []
    if part.purl:
        category = model.ExternalPackageRefCategory.PACKAGE_MANAGER
        references.append(model.ExternalPackageRef(category, "purl", part.purl))
    return model.Package(
        spdx_id=part.identifier,
        name=part.name,
        version=part.version,
        download_location=model.SpdxNoAssertion(),
        file_name=part.file or None,
        files_analyzed=False,
        checksums=checksums,
        source_info=f"source package {part.source}" if part.source else None,
        license_concluded=model.SpdxNoAssertion(),
        license_declared=licence,
        copyright_text=model.SpdxNoAssertion(),
        external_references=references,
        primary_package_purpose=purpose,
    )


def cyclonedx(inside: Contents) -> dict[str, Any]:
    """Return the bill as CycloneDX 1.6. What only a build needed is ``excluded`` from the image."""
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import ComponentType
    from cyclonedx.output.json import JsonV1Dot6

    image = _component(_whole(inside), ComponentType.CONTAINER)
    components = []
    contained = []
    for part in inside.parts:
        component = _component(part, ComponentType.LIBRARY)
        components.append(component)
        if part.relation == "CONTAINS":
            contained.append(component)
    bom = Bom(
        components=components,
        metadata=BomMetaData(component=image, timestamp=inside.created),
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, inside.namespace),
    )
    bom.register_dependency(image, contained)
    document: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    return document


def _component(part: Part, kind: Any) -> "Component":
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component, ComponentScope
    from cyclonedx.model.license import LicenseExpression
    from packageurl import PackageURL

    scope = ComponentScope.REQUIRED
    if part.relation == "BUILD_TOOL_OF":
        scope = ComponentScope.EXCLUDED
    return Component(
        bom_ref=part.identifier,
        type=kind,
        name=part.name,
        version=part.version,
        scope=scope,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=part.sha256)] if part.sha256 else (),
        purl=PackageURL.from_string(part.purl) if part.purl else None,
        licenses=[LicenseExpression(part.licence)] if part.licence else (),
    )


def listing(inside: Contents) -> str:
    """Return the parts as lines: package, version, its relation to the image, and licence."""
    rows = []
    for part in inside.parts:
        licence = part.licence or "licence not declared"
        rows.append((part.name, part.version, _WORDS[part.relation], licence))
    return "\n".join(Screen.of().table(rows))
