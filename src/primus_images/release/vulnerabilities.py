"""Known vulnerabilities: OSV data against a bill of materials, with accepted ones, and OpenVEX.

https://ossf.github.io/osv-schema, https://github.com/openvex/spec. Debian's entries are about
source packages.
"""

import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

from debian.debian_support import NativeVersion
from packaging.version import Version

from primus_images.errors import InputError
from primus_images.schema import build
from primus_images.terminal import counted
from primus_images.versions.lock import normalised
from primus_images.yamlfile import read

_LONGEST = 120
_UNMENDED = "no version is known to mend it"
_SOURCE = re.compile(r"source package (\S+) (\S+)")


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A vulnerability that a release may have, until somebody has looked again."""

    id: str
    package: str = ""
    status: Literal["not_affected", "affected"] = "not_affected"
    reason: str
    review: str


@dataclass(frozen=True, kw_only=True)
class _List:
    accepted: tuple[Accepted, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Vulnerability:
    """One entry of OSV that concerns one package.

    ``fixed`` is the version that mends it; "" if there is none.
    """

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
        return self.accepted is None or self.accepted.review < today.isoformat()

    def sentence(self, today: date) -> str:
        """Return what it is, and what to do."""
        names = ", ".join((self.id, *self.aliases[:1]))
        mended = f"{self.fixed} mends it" if self.fixed else _UNMENDED
        text = f"{self.package} {self.version}: {names}: {self.summary} ({mended})"
        if self.accepted is None:
            return text
        until = f"accepted until {self.accepted.review}"
        if self.is_open(today):
            return f"{text}; it was {until}: review it"
        return f"{text}; {until}: {self.accepted.reason}"


def load_accepted(path: Path | str | None) -> tuple[Accepted, ...]:
    """Read a file of accepted vulnerabilities. Raises InputError."""
    if not path:
        return ()
    accepted = build(_List, read(Path(path))).accepted
    counts = Counter((rule.id, rule.package) for rule in accepted)
    for (identifier, package), count in counts.items():
        if count > 1:
            raise InputError(
                f"{identifier} is judged twice for {package or 'every package'}",
                where=str(path),
                hint="keep one of the two",
            )
    return accepted


@dataclass(frozen=True)
class _Package:
    """A package of a bill that an ecosystem of OSV knows.

    ``name`` and ``version`` are those of the ecosystem: for Debian, of the source package.
    """

    ecosystem: str
    name: str
    version: str
    shown: str
    purl: str


def audit(
    bill: Mapping[str, Any], osv: Path, accepted: Sequence[Accepted]
) -> tuple[list[Vulnerability], list[str]]:
    """Return the vulnerabilities in ``osv`` of the packages in an SPDX document.

    ``osv`` is a file, a folder or a zip archive. Returns also a sentence for each ecosystem of the
    packages that no entry is about. What only a build needed is left out. Raises InputError if the
    data cannot be read.
    """
    packages: dict[tuple[str, str], list[_Package]] = {}
    unseen = Counter[str]()
    debian = ""
    for package in _packages(bill):
        packages.setdefault((package.ecosystem, package.name), []).append(package)
        unseen[package.ecosystem] += 1
        if package.name == "base-files":
            debian = package.version.partition(".")[0]
    findings: set[Vulnerability] = set()
    for where, entry in _entries(osv):
        try:
            for affected in _affected_packages(entry):
                ecosystem, release, name = _about(affected)
                unseen.pop(ecosystem, None)
                # Debian's entries have a row for each of its releases that has the vulnerability.
                if debian and release not in ("", debian):
                    continue
                for package in packages.get((ecosystem, name), ()):
                    fixed = _fixed_in(affected, ecosystem, package.version)
                    if fixed is not None:
                        findings.add(_finding(entry, package, fixed, accepted))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError("not an OSV entry", where=where) from None
    sentences = []
    for ecosystem, number in unseen.items():
        looked_up = f"{counted(number, 'package')} not looked up"
        sentences.append(f"no entry is about {ecosystem}: {looked_up}")
    return sorted(findings, key=lambda finding: (finding.package, finding.id)), sentences


def _packages(bill: Mapping[str, Any]) -> Iterator[_Package]:
    try:
        tools = set()
        for relation in bill["relationships"]:
            if relation["relationshipType"] == "BUILD_TOOL_OF":
                tools.add(relation["spdxElementId"])
        for entry in bill["packages"]:
            if entry["SPDXID"] in tools:
                continue
            name = entry["name"]
            version = entry["versionInfo"]
            references = entry.get("externalRefs") or [{"referenceLocator": ""}]
            purl = references[0]["referenceLocator"]
            kind = purl.lower()
            if kind.startswith("pkg:pypi/"):
                yield _Package("PyPI", normalised(name), version, name, purl)
            elif kind.startswith("pkg:deb/"):
                source = _SOURCE.fullmatch(entry.get("sourceInfo", ""))
                if source:
                    yield _Package("Debian", source[1], source[2], name, purl)
                else:
                    yield _Package("Debian", name, version, name, purl)
    except (KeyError, TypeError, AttributeError):
        raise InputError(
            "not an SPDX document in JSON",
            hint="name a target, or a file that `primus sbom TARGET --json` wrote",
        ) from None


def _affected_packages(entry: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if not entry["id"] or entry.get("withdrawn"):
        return ()
    return entry.get("affected") or ()


def _about(affected: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return ecosystem, release of it, and name of an affected package.

    Records about commits alone name no package.
    """
    package = affected.get("package") or {}
    ecosystem, _, release = package.get("ecosystem", "").partition(":")
    name = package.get("name", "")
    if ecosystem == "PyPI":
        name = normalised(name)
    return ecosystem, release, name


def _finding(
    entry: Mapping[str, Any], package: _Package, fixed: str, accepted: Sequence[Accepted]
) -> Vulnerability:
    names = [str(entry["id"]), *map(str, entry.get("aliases") or ())]
    upstream: Sequence[Any] = entry.get("upstream") or ()
    # Debian's entries name their CVE as upstream. An advisory for several is none of them.
    if len(upstream) == 1:
        names.append(str(upstream[0]))
    unique = tuple(dict.fromkeys(names))
    summary = entry.get("summary") or entry.get("details") or "no summary"
    return Vulnerability(
        id=unique[0],
        aliases=unique[1:],
        summary=shorten(summary, _LONGEST, placeholder=" …"),
        package=package.shown,
        version=package.version,
        purl=package.purl,
        fixed=fixed,
        accepted=_rule_for(names, package.shown, accepted),
    )


def _rule_for(names: Sequence[str], package: str, accepted: Sequence[Accepted]) -> Accepted | None:
    for rule in accepted:
        if rule.id in names and rule.package in ("", package):
            return rule
    return None


def _entries(osv: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each entry with the name of its file."""
    name = ""
    try:
        for name, text in _texts(osv):
            content = json.loads(text)
            for entry in content if isinstance(content, list) else [content]:
                yield name, entry
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"OSV data cannot be read: {error}", where=str(osv)) from None
    except (ValueError, RecursionError):
        raise InputError("not an OSV entry", where=name) from None
    if not name:
        raise InputError("no OSV data: there is no .json file", where=str(osv))


def _texts(osv: Path) -> Iterator[tuple[str, bytes]]:
    if osv.suffix == ".zip":
        with zipfile.ZipFile(osv) as archive:
            for name in archive.namelist():
                if name.endswith(".json"):
                    yield name, archive.read(name)
        return
    paths = [osv]
    if osv.is_dir():
        paths = sorted(osv.rglob("*.json"))
    for path in paths:
        yield str(path), path.read_bytes()


def _fixed_in(affected: Mapping[str, Any], ecosystem: str, version: str) -> str | None:
    """Return the version that mends it, "" if none is known, None if ``version`` is unaffected.

    OSV lists affected versions, or states ranges of them, or both.
    """
    order: Callable[[str], Any] = NativeVersion
    if ecosystem == "PyPI":
        order = Version
        version = version.partition("+")[0]  # a local build has the faults of its version
    listed = affected.get("versions") or ()
    is_affected = version in listed
    fixes: list[str] = []
    try:
        for affected_range in affected.get("ranges") or ():
            if affected_range["type"] == "ECOSYSTEM":
                inside, later = _in_range(affected_range["events"], version, order)
                is_affected = is_affected or inside
                fixes += later
    except ValueError:
        # A version that cannot be compared with a range counts as affected. If the entry also has a
        # list, which names every affected version, the list decides.
        return "" if is_affected or not listed else None
    if is_affected:
        return min(fixes, key=order, default="")
    return None


def _in_range(
    events: Sequence[Mapping[str, str]], version: str, order: Callable[[str], Any]
) -> tuple[bool, list[str]]:
    """Return whether ``version`` is in a range of versions, and the later ones that mend it."""
    mine = order(version)
    steps = []
    for event in events:
        for kind, at in event.items():
            if kind != "limit":
                steps.append((kind, at))
    # 0 is before every version.
    steps.sort(key=lambda step: (step[1] != "0", order(step[1])))
    inside = False
    fixes = []
    for kind, at in steps:
        reached = at == "0" or mine >= order(at)
        if kind == "fixed" and not reached:
            fixes.append(at)
        if kind == "last_affected" and mine == order(at):
            continue
        if reached:
            inside = kind == "introduced"
    return inside, fixes


def openvex(findings: Sequence[Vulnerability], name: str, now: str) -> dict[str, Any]:
    """Return the findings as OpenVEX 0.2.0, at the time ``now``."""
    safe_name = re.sub(r"[^A-Za-z0-9.-]", "-", name)
    return {
        "@context": "https://openvex.dev/ns/v0.2.0",
        "@id": f"https://openvex.dev/docs/primus-{safe_name}-{now}",
        "author": "primus-images",
        "timestamp": now,
        "version": 1,
        "statements": [_vex_statement(finding) for finding in findings],
    }


def _vex_statement(finding: Vulnerability) -> dict[str, Any]:
    content: dict[str, Any] = {
        "vulnerability": {"name": finding.id, "aliases": list(finding.aliases)},
        "products": [{"@id": finding.purl}],
        "status": "affected",
    }
    accepted = finding.accepted
    if accepted is None:
        content["action_statement"] = f"update to {finding.fixed}" if finding.fixed else _UNMENDED
    elif accepted.status == "affected":
        content["action_statement"] = accepted.reason
    else:
        content["status"] = accepted.status
        content["impact_statement"] = accepted.reason
    return content
