"""A bill of materials, and advisories about what it names."""

from typing import Any


def package(name: str, version: str, purl: str, **more: str) -> dict[str, Any]:
    references = [
        {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}
    ]
    return {
        "SPDXID": f"SPDXRef-{name}",
        "name": name,
        "versionInfo": version,
        "externalRefs": references,
        **more,
    }


def bill(version: str, deb: str = "1.0-1") -> dict[str, Any]:
    tool = package("tool", "1.0", "pkg:pypi/tool@1.0")
    relation = {
        "spdxElementId": "SPDXRef-tool",
        "relationshipType": "BUILD_TOOL_OF",
        "relatedSpdxElement": "x",
    }
    library = package(
        "libdemo1", "9", "pkg:deb/debian/libdemo1@9", sourceInfo=f"source package demo {deb}"
    )
    small = [
        package(name, version, f"pkg:pypi/{name}@{version}") for name in ("small", "small-tool-kit")
    ]
    base = package(
        "base-files", "12.4+deb12u15", "pkg:deb/debian/base-files@12.4%2Bdeb12u15?arch=amd64"
    )
    return {
        "name": "v26.11-cpu",
        "packages": [*small, library, tool, base],
        "relationships": [relation],
    }


def entry(
    name: str, ecosystem: str = "PyPI", *, versions: tuple[str, ...] = (), **events: str
) -> dict[str, Any]:
    ranges = [
        {"type": "ECOSYSTEM", "events": [{kind: at} if at else {} for kind, at in events.items()]}
    ]
    affected = {
        "package": {"name": name, "ecosystem": ecosystem},
        "ranges": ranges,
        "versions": list(versions),
    }
    names = {"id": "GHSA-1", "aliases": ["CVE-2026-1"], "upstream": ["CVE-2026-1"]}
    return {**names, "summary": "It breaks", "affected": [affected]}
