"""Known vulnerabilities of an image: OSV data against its bill of materials, with accepted ones, and OpenVEX.

https://ossf.github.io/osv-schema, https://github.com/openvex/spec. Debian's entries are about source packages.
"""

import itertools
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from debian.debian_support import NativeVersion
from packaging.version import InvalidVersion, Version

from primus.errors import InputError
from primus.release.documents import SPDX
from primus.release.policy import Policy
from primus.release.registry import Document
from primus.schema import build, described
from primus.yamlfile import read

_SOURCE = re.compile(r"source package (\S+) (\S+)")


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A vulnerability that a release may have, until somebody has looked again."""

    id: str = described("its OSV id or an alias, such as CVE-2026-1234")
    package: str = described("only in this package", default="")
    status: Literal["not_affected", "affected"] = described("whether the image is affected", default="not_affected")
    reason: str = described("why it is accepted", pattern=r"(?s).{10,}", shape="a sentence")
    review: str = described("day on which it must be reviewed", pattern=r"\d{4}-\d\d-\d\d", shape="a date: 2027-01-31")


@dataclass(frozen=True, kw_only=True)
class _List:
    accepted: tuple[Accepted, ...] = described("accepted vulnerabilities", default=())


@dataclass(frozen=True, kw_only=True)
class Vulnerability:
    """One entry of OSV that concerns one package. ``fixed`` is the version that mends it; "" if there is none."""

    id: str
    aliases: tuple[str, ...]
    summary: str
    package: str
    version: str
    purl: str
    fixed: str
    accepted: Accepted | None = None

    def is_open(self, today: date) -> bool:
        """Whether it is not accepted, or must be reviewed."""
        return self.accepted is None or date.fromisoformat(self.accepted.review) < today

    def sentence(self, today: date) -> str:
        """Return what it is, and what to do."""
        names = ", ".join((self.id, *self.aliases[:1]))
        mended = f"{self.fixed} mends it" if self.fixed else "no version mends it"
        late = ""
        if self.accepted:
            until = f"accepted until {self.accepted.review}"
            late = f"; it was {until}: review it" if self.is_open(today) else f"; {until}: {self.accepted.reason}"
        return f"{self.package} {self.version}: {names}: {self.summary or 'no summary'} ({mended}){late}"


def load_accepted(path: Path | None) -> tuple[Accepted, ...]:
    """Read a file of accepted vulnerabilities. Raises InputError."""
    return build(_List, read(path)).accepted if path else ()


def audit(bill: Mapping[str, Any], osv: Path, accepted: Sequence[Accepted]) -> list[Vulnerability]:
    """Return the vulnerabilities in ``osv`` (a file, a folder or a zip archive) of the packages in an SPDX document.

    What only a build needed is left out. Raises InputError if the data cannot be read.
    """
    packages: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for name, ecosystem, version, package, purl in _packages(bill):
        packages.setdefault((ecosystem, name), []).append((version, package, purl))
    findings = []
    for entry in _entries(osv):
        for affected in entry.get("affected", ()) if "withdrawn" not in entry else ():
            about = affected.get("package", {})
            ecosystem = str(about.get("ecosystem", "")).partition(":")[0]
            for version, package, purl in packages.get((ecosystem, str(about.get("name", "")).lower()), ()):
                if (fixed := _affects(affected, ecosystem, version)) is None:
                    continue
                aliases = (*entry.get("aliases", ()), *entry.get("upstream", ()))
                names = {entry["id"], *aliases}
                matching = (rule for rule in accepted if rule.id in names and rule.package in ("", package))
                findings.append(
                    Vulnerability(
                        id=entry["id"], aliases=aliases, summary=entry.get("summary", ""), package=package,
                        version=version, purl=purl, fixed=fixed, accepted=next(matching, None),
                    )
                )  # fmt: skip
    return sorted(set(findings), key=lambda finding: (finding.package, finding.id))


def _packages(bill: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    try:
        tools = {r["spdxElementId"] for r in bill["relationships"] if r["relationshipType"] == "BUILD_TOOL_OF"}
        for package in bill["packages"]:
            purl = next((r["referenceLocator"] for r in package.get("externalRefs", ())), "")
            if purl.startswith("pkg:pypi/") and package["SPDXID"] not in tools:
                yield package["name"], "PyPI", package["versionInfo"], package["name"], purl
            if purl.startswith("pkg:deb/") and package["SPDXID"] not in tools:
                source = _SOURCE.fullmatch(package.get("sourceInfo", ""))
                name, version = source.groups() if source else (package["name"], package["versionInfo"])
                yield name, "Debian", version, package["name"], purl
    except (KeyError, TypeError, AttributeError):
        raise InputError("not an SPDX document of `primus sbom --json`") from None


def _entries(osv: Path) -> Iterator[dict[str, Any]]:
    try:
        if osv.suffix == ".zip":
            with zipfile.ZipFile(osv) as archive:
                texts = [(name, archive.read(name)) for name in archive.namelist() if name.endswith(".json")]
        else:
            paths = sorted(osv.rglob("*.json")) if osv.is_dir() else [osv]
            texts = [(str(path), path.read_bytes()) for path in paths]
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"OSV data cannot be read: {error}", where=str(osv)) from None
    if not texts:
        raise InputError("no OSV data: there is no .json file", where=str(osv))
    for name, text in texts:
        try:
            content = json.loads(text)
            for entry in content if isinstance(content, list) else [content]:
                _ = entry["id"], entry.get("affected")
                yield entry
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError("not an OSV entry", where=name) from None


def _affects(affected: Mapping[str, Any], ecosystem: str, version: str) -> str | None:
    """Return the version that mends it, "" if there is none, or None if ``version`` is not affected."""
    order = NativeVersion if ecosystem == "Debian" else Version
    listed, inside = version in affected.get("versions", ()), False
    try:
        ranges = [r["events"] for r in affected.get("ranges", ()) if r.get("type") == "ECOSYSTEM"]
        events = [[pair for event in events for pair in [*event.items()][:1]] for events in ranges]
        mine, fixes = order(version), []
        for kind, at in itertools.chain(*(sorted(of, key=lambda e: (e[1] != "0", order(e[1]))) for of in events)):
            reached = at == "0" or mine >= order(at)
            fixes += [at] if kind == "fixed" else []
            if kind == "introduced" and reached:
                inside = True
            elif (kind == "fixed" and reached) or (kind == "last_affected" and reached and mine != order(at)):
                inside = False
        return next((fix for fix in fixes if order(fix) > mine), "") if inside or listed else None
    except (InvalidVersion, ValueError):
        return "" if listed else None


def openvex(findings: Sequence[Vulnerability], name: str, now: str) -> dict[str, Any]:
    """Return the findings as OpenVEX 0.2.0, at the time ``now``."""
    statements = []
    for finding in findings:
        acceptance = finding.accepted
        affected = acceptance is None or acceptance.status == "affected"
        update = f"update to {finding.fixed}" if finding.fixed else "no version mends it"
        statements.append(
            {
                "vulnerability": {"name": finding.id, "aliases": list(finding.aliases)},
                "products": [{"@id": finding.purl}],
                "status": "affected" if affected else "not_affected",
                "action_statement" if affected else "impact_statement": acceptance.reason if acceptance else update,
            }
        )
    about = {"author": "primus-images", "timestamp": now, "version": 1}
    identity = f"https://openvex.dev/docs/primus-{re.sub(r'[^A-Za-z0-9.-]', '-', name)}-{now}"
    return {"@context": "https://openvex.dev/ns/v0.2.0", "@id": identity, **about, "statements": statements}


def forbidden_in(documents: Sequence[Document], policy: Policy) -> list[str]:
    """Return the licences and vulnerabilities that a policy forbids, and an SPDX document names, one sentence each."""
    reasons, today = [], date.today()
    for bill in (json.loads(document.data) for document in documents if document.media_type == SPDX):
        for package in bill["packages"]:
            licences = set(re.findall(r"[A-Za-z0-9.+-]+", package["licenseDeclared"])) & {*policy.refused_licences}
            reasons += [f"{package['name']} {package['versionInfo']} is under {name}" for name in sorted(licences)]
        if policy.osv:
            findings = audit(bill, Path(policy.osv), load_accepted(Path(policy.accepted) if policy.accepted else None))
            reasons += [finding.sentence(today) for finding in findings if finding.is_open(today)]
    return reasons
