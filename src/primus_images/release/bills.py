"""The bill of materials of an image, as SPDX and CycloneDX.

Both depend only on the image, its lock and the commit, and contain no time but that of the release,
so a rebuild of the commit gives the same bills, byte for byte. The libraries that write them are
imported where they are used: they take two seconds.
"""

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from primus_images import __version__
from primus_images.errors import InputError
from primus_images.gates.contents import Stated
from primus_images.plan.action import Composed
from primus_images.plan.resolve import ResolvedTarget
from primus_images.release.git import Checkout
from primus_images.release.licences import Licences, spdx_licensing
from primus_images.terminal import Screen
from primus_images.versions.lock import LockedFile, normalised

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from spdx_tools.spdx.model import Package

Relation = Literal["CONTAINS", "GENERATED_FROM", "BUILD_TOOL_OF"]
IMAGE = "SPDXRef-image"
SYSTEM = "SPDXRef-system"
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
    ``owner`` is what contains it: the image, or the package that brings it along.
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
    owner: str = IMAGE


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What an image is made of. ``texts`` are the words of licences that SPDX's list lacks.

    ``system`` is its distribution (``debian-12``; empty if unknown), and ``needs`` are pairs of
    identifiers: a part, and one that it depends on.
    """

    ref: str
    sha256: str
    created: datetime
    parts: Sequence[Part]
    texts: dict[str, str]
    system: str = ""
    needs: Sequence[tuple[str, str]] = ()

    @property
    def namespace(self) -> str:
        """The name of its bill, which no other image has."""
        return f"https://spdx.org/spdxdocs/primus-{self.ref}-{self.sha256}"


def contents(
    image: Composed, source: Checkout, licensed: Licences, stated: Sequence[Stated] = ()
) -> Contents:
    """Return what the image is made of. Raises InputError if its target has no lock.

    ``stated`` is what its files state of packages: what they depend on, and what they bring along.

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
    parts += _of_repository(stated, parts, licensed)
    parts += _vendored(stated, parts, licensed)
    return Contents(
        ref=resolved.ref,
        sha256=image.digest.removeprefix("sha256:"),
        created=datetime.fromisoformat(str(image.plan.config["created"])),
        parts=parts,
        texts=licensed.texts,
        system=resolved.system,
        needs=_needs(stated, parts),
    )


def _of_repository(
    stated: Sequence[Stated], parts: Sequence[Part], licensed: Licences
) -> Iterator[Part]:
    """Yield the Python packages that the files state and no lock names: those of the repository."""
    locked = {part.name for part in parts if part.purl}
    for item in stated:
        if item.kind != "wheel" or item.name in locked:
            continue
        locked.add(item.name)
        yield Part(
            identifier=_identifier("stated", item.name, item.version),
            name=item.name,
            version=item.version,
            relation="CONTAINS",
            purl=_pypi(item.name, item.version),
            licence=licensed.declared.get(f"wheel {item.name}", ""),
        )


def _vendored(
    stated: Sequence[Stated], parts: Sequence[Part], licensed: Licences
) -> Iterator[Part]:
    """Yield the packages that others bring along, with metadata of their own."""
    owners = {part.name: part.identifier for part in parts if part.purl.startswith("pkg:pypi")}
    seen = set()
    for item in stated:
        owner = normalised(item.source)
        identifier = _identifier("vendored", owner, item.name, item.version)
        if item.kind != "vendored" or identifier in seen:
            continue
        seen.add(identifier)
        yield Part(
            identifier=identifier,
            name=item.name,
            version=item.version,
            relation="CONTAINS",
            purl=_pypi(item.name, item.version),
            licence=licensed.declared.get(f"vendored {owner}/{item.name}", ""),
            owner=owners.get(owner, IMAGE),
        )


def _pypi(name: str, version: str) -> str:
    from packageurl import PackageURL

    return PackageURL("pypi", None, name, version).to_string()


def _needs(stated: Sequence[Stated], parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Return the pairs of a part and one that it depends on, each once.

    A requirement for another platform leads to nothing, because that package is not inside.
    """
    inside: dict[tuple[str, str], str] = {}
    for part in parts:
        if part.relation == "CONTAINS" and part.owner == IMAGE and part.purl:
            inside[part.purl[:8], part.name] = part.identifier
    kinds = {"wheel": "pkg:pypi", "deb": "pkg:deb/"}
    pairs: dict[tuple[str, str], None] = {}
    for item in stated:
        kind = kinds.get(item.kind, "")
        first = inside.get((kind, item.name))
        for text in item.requires if first else ():
            name = text
            if item.kind == "wheel":
                name = normalised(re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0])
            second = inside.get((kind, name))
            if first and second and first != second:
                pairs[first, second] = None
    return sorted(pairs)


def _locked(file: LockedFile, resolved: ResolvedTarget, licensed: Licences) -> Part:
    kind = "deb" if file.kind == "deb" else "wheel"
    relation: Relation = "BUILD_TOOL_OF"
    if file.kind in ("sdist", "git"):
        relation = "GENERATED_FROM"
    elif file.base in resolved.roots or (file.kind == "wheel" and file.base is None):
        relation = "CONTAINS"
    source = licensed.sources.get(file.name, "") if kind == "deb" else ""
    return Part(
        identifier=_identifier(file.kind, file.base, file.name, file.version),
        name=file.name,
        version=file.version,
        relation=relation,
        file=file.file,
        sha256=file.sha256,
        purl=purl(file, resolved.system, source),
        licence=licensed.declared.get(f"{kind} {file.name}", ""),
        source=source,
    )


def _identifier(*words: str | None) -> str:
    text = "-".join(filter(None, words))
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", lambda match: f"-{ord(match[0]):x}-", text)


def purl(file: LockedFile, system: str = "", source: str = "") -> str:
    """Return the package URL of a locked file. It names no host; the checksum identifies the bytes.

    ``system`` is the distribution of its Debian packages, such as ``debian-12``, and ``source``
    name and version of the source package, by which scanners find vulnerabilities.

    See https://github.com/package-url/purl-spec.
    """
    from packageurl import PackageURL

    if file.kind in ("wheel", "sdist"):
        url = PackageURL("pypi", None, file.name, file.version, {"file_name": file.file})
    elif file.kind == "deb":
        arch = "all" if file.file.endswith("_all.deb") else "amd64"
        qualifiers = {"arch": arch}
        if system:
            qualifiers["distro"] = system
        upstream = _upstream(file, source)
        if upstream:
            qualifiers["upstream"] = upstream
        maker = system.partition("-")[0] or "debian"
        url = PackageURL("deb", maker, file.name, file.version, qualifiers)
    elif file.kind == "layer":
        url = PackageURL("oci", None, file.name, f"sha256:{file.sha256}")
    else:
        checksum = {"checksum": f"sha256:{file.sha256}"}
        url = PackageURL("generic", None, file.name, file.version, checksum)
    return url.to_string()


def _upstream(file: LockedFile, source: str) -> str:
    """Return what a Debian package says of its source: empty if name and version are the same."""
    name, _, version = source.partition(" ")
    if version not in ("", file.version):
        return f"{name}@{version}"
    return name if name != file.name else ""


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
        ends = (part.owner, part.identifier)
        if part.relation == "BUILD_TOOL_OF":
            ends = (part.identifier, IMAGE)
        relations.append(model.Relationship(ends[0], kind[part.relation], ends[1]))
    if inside.system:
        packages.append(_spdx_package(_system(inside), model.PackagePurpose.OPERATING_SYSTEM))
        relations.append(model.Relationship(IMAGE, kind.CONTAINS, SYSTEM))
    for first, second in inside.needs:
        relations.append(model.Relationship(first, kind.DEPENDS_ON, second))
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


def _system(inside: Contents) -> Part:
    """Return the distribution as a package."""
    name, _, version = inside.system.partition("-")
    return Part(identifier=SYSTEM, name=name, version=version, relation="CONTAINS")


def _spdx_package(part: Part, purpose: Any = None) -> "Package":
    from spdx_tools.spdx import model

    licence = model.SpdxNoAssertion()
    if part.licence:
        licence = spdx_licensing().parse(part.licence)
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
    by_part = {part.identifier: _component(part, ComponentType.LIBRARY) for part in inside.parts}
    components = [*by_part.values()]
    if inside.system:
        components.append(_component(_system(inside), ComponentType.OPERATING_SYSTEM))
    below: dict[str, list[Component]] = {}
    for part in inside.parts:
        if part.relation == "CONTAINS":
            below.setdefault(part.owner, []).append(by_part[part.identifier])
    for first, second in inside.needs:
        below.setdefault(first, []).append(by_part[second])
    bom = Bom(
        components=components,
        metadata=BomMetaData(component=image, timestamp=inside.created),
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, inside.namespace),
    )
    bom.register_dependency(image, below.pop(IMAGE, []))
    for identifier, others in below.items():
        bom.register_dependency(by_part[identifier], others)
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
