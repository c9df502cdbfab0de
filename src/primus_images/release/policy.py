"""What a release needs: the rules of ``policy.yaml``, and what the evidence about an image lacks of
them. Known vulnerabilities: OSV data against a bill of materials, with accepted ones, and OpenVEX.

https://ossf.github.io/osv-schema, https://github.com/openvex/spec. Debian's entries are about
source packages.
"""

import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

from debian.debian_support import NativeVersion
from packaging.version import Version

from primus_images.errors import CheckFailed, InputError, nearest
from primus_images.gates.rules import gates
from primus_images.refusals import refusal
from primus_images.release.artifact import Document
from primus_images.release.documents import GATES, IN_TOTO, SPDX, VALIDATION, form, licence_names
from primus_images.schema import build
from primus_images.terminal import counted, some
from primus_images.versions.lock import normalised
from primus_images.yamlfile import read

# Seconds of a run of a proxy on two cores, the median of benchmarks/results/healthy-seeds.json.
_SECONDS_OF_RUN = 19
_LONGEST = 120
_UNMENDED = "no version is known to mend it"
_SOURCE = re.compile(r"source package (\S+) (\S+)")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a release needs; fields.yaml describes it. Without a file, the defaults apply."""

    runs: tuple[str, ...] = ("base", "repeat", "resume", "accumulation")
    forgiven: tuple[str, ...] = ("coverage",)
    driver: str | None = None
    firmware: str | None = None
    found: float = 0.0
    alarms: float = 1.0
    refused_licences: tuple[str, ...] = ()
    osv: str | None = None
    accepted: str | None = None


def load(path: Path) -> Policy:
    """Read a policy. Paths in it are relative to it. Raises InputError."""
    policy = build(Policy, document := read(path))
    licences = [
        *licence_names().values(),
        *(n for n in policy.refused_licences if n.startswith("LicenseRef-")),
    ]
    for key, names in (("forgiven", [*gates()]), ("refused_licences", licences)):
        for index, name in enumerate(getattr(policy, key)):
            if name not in names:
                words = {"name": name, "nearest": nearest(name, names)}
                if key == "forgiven":
                    raise refusal(
                        "no_gate",
                        document.where((key, index)),
                        **words,
                    )
                raise refusal(
                    "no_licence",
                    document.where((key, index)),
                    **words,
                )
    places: dict[str, Any] = {
        k: str(path.parent / value) for k in ("osv", "accepted") if (value := getattr(policy, k))
    }
    for key, place in places.items():
        if not Path(place).exists():
            raise InputError(
                f"there is no file or folder {place}",
                where=document.where((key,)),
                hint="correct the path, which is relative to the policy",
            )
    return replace(policy, **places)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence about an image.

    ``components`` is the name of each → the package or library that a training run with it loads.
    ``preview`` is the reason why it is a preview; empty for a release. ``gpu`` is the GPU
    generation that it is for. ``recipes`` are those that its ``target`` names. ``records`` are its
    validations. ``commit`` is that of the repository, and ``edited`` are files that differ from it.
    """

    target: str
    preview: str
    gpu: str | None
    recipes: Sequence[str]
    components: Mapping[str, str]
    failed_gates: Sequence[str]
    records: Sequence[Mapping[str, Any]]
    commit: str | None
    edited: Sequence[str] = ()


def evidence_in(documents: Sequence[Document]) -> Evidence:
    """Return the evidence in the documents about an image. Raises CheckFailed without a provenance
    and findings of gates.
    """

    def of(media_type: str) -> list[Any]:
        return [
            json.loads(document.data) for document in documents if document.media_type == media_type
        ]

    provenances = of(IN_TOTO)
    if not provenances or not (outcomes := of(GATES)):
        raise CheckFailed(
            "the image has no provenance or no findings of gates, so nothing is known of it"
        )
    definition = provenances[-1]["predicate"]["buildDefinition"]
    source = definition["resolvedDependencies"][:1]
    parameters = definition["externalParameters"]
    return Evidence(
        **{
            name: parameters[name] for name in ("target", "preview", "gpu", "recipes", "components")
        },
        failed_gates=[gate["gate"] for gate in outcomes[-1]["gates"] if not gate["passed"]],
        records=of(VALIDATION),
        commit=source[0]["digest"].get("gitCommit") if source else None,
    )


def objections(evidence: Evidence, policy: Policy, *, preview: bool) -> tuple[str, ...]:
    """Return the reasons why the image may not be published, one sentence each; empty if it may.

    A release for a GPU must have passed its validations on that GPU. With ``preview``, a CPU is
    sufficient, the forgiven gates may fail, and files of the repository may be edited.
    """
    reasons = []
    if evidence.preview and not preview:
        reasons.append(f"it is a preview: {evidence.preview}")
    reasons += [
        f"gate {gate} fails"
        for gate in evidence.failed_gates
        if not (preview and gate in policy.forgiven)
    ]
    reasons += _of_validation(evidence, policy, preview)
    if evidence.commit is None and not preview:
        reasons.append("the commit it was built from is unknown: this is not a git repository")
    elif evidence.commit and evidence.edited and not preview:
        reasons.append(
            f"files differ from commit {evidence.commit[:12]}: {some(evidence.edited, 3)}"
        )
    return tuple(reasons)


def _of_validation(evidence: Evidence, policy: Policy, preview: bool) -> list[str]:
    if not evidence.recipes:
        return ["its target names no recipe to validate it with"]
    records = [record for record in evidence.records if _passed(record, policy, preview)]
    where = ""
    if evidence.gpu and not preview:
        records = [record for record in records if record["gpu"] == evidence.gpu]
        where = f" on {evidence.gpu}"
        if not records:
            return [refusal("nothing_trained", gpu=evidence.gpu, target=evidence.target).message]
    trained = {record["recipe"]["name"] for record in records}
    reasons = []
    lacking = [name for name in evidence.recipes if name not in trained]
    if lacking:
        words = {
            "recipes": some(lacking, 3),
            "minutes": max(1, round(len(lacking) * _SECONDS_OF_RUN / 60)),
        }
        reasons.append(refusal("not_passed", where=where, target=evidence.target, **words).message)
    if not any(
        {job["name"] for job in record["jobs"] if job["ran"]} >= {*policy.runs}
        for record in records
    ):
        reasons.append(refusal("runs_lacking", where=where, target=evidence.target).message)
    loaded = {name for record in records for name in record["facts"].get("loaded", ())}
    if not preview and (
        idle := [name for name, package in evidence.components.items() if package not in loaded]
    ):
        reasons.append(refusal("not_loaded", where=where, components=some(idle, 3)).message)
    return [*reasons, *(reason for record in records for reason in unmet(record, policy))]


def unmet(record: Mapping[str, Any], policy: Policy) -> list[str]:
    """Return what the validation lacks of the policy's rules for machines and for the suite."""
    reasons = []
    machine = record.get("machine", {})
    rates = record.get("suite", {}).get("rates")
    for part in ("driver", "firmware"):
        needed = getattr(policy, part)
        there = machine.get(part)
        if needed and record["gpu"] != "none" and there != needed:
            reasons.append(
                f"{record['recipe']['name']} was validated with {part} {there or 'unknown'}, "
                f"not {needed}"
            )
    if policy.found > 0 or policy.alarms < 1:
        if not rates:
            return [
                *reasons,
                f"the validation of {record['recipe']['name']} says nothing about its suite's "
                "own faults",
            ]
        if rates["named"] < policy.found * rates["faults"]:
            reasons.append(refusal("few_found", rates=rates, least=policy.found).message)
        if rates["refused"] > policy.alarms * rates["healthy"]:
            share = f"{rates['refused']} of {rates['healthy']}"
            reasons.append(f"the suite refuses {share} healthy runs, more than {policy.alarms:.1%}")
    return reasons


def _passed(record: Mapping[str, Any], policy: Policy, preview: bool) -> bool:
    if not preview:
        return record["passed"] is True
    failed = {verdict["name"] for verdict in record["verdicts"] if not verdict["passed"]}
    ran = all(job["ran"] for job in record["jobs"])
    return (
        bool(record["verdicts"]) and ran and failed <= {f"gate {gate}" for gate in policy.forgiven}
    )


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
    """One entry of OSV that concerns one package. ``fixed`` is the version that mends it; "" if
    there is none.
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
        if self.fixed:
            mended = f"{self.fixed} mends it"
        else:
            mended = _UNMENDED
        late = ""
        if self.accepted:
            until = f"accepted until {self.accepted.review}"
            if self.is_open(today):
                late = f"; it was {until}: review it"
            else:
                late = f"; {until}: {self.accepted.reason}"
        return f"{self.package} {self.version}: {names}: {self.summary} ({mended}){late}"


def load_accepted(path: Path | str | None) -> tuple[Accepted, ...]:
    """Read a file of accepted vulnerabilities. Raises InputError."""
    accepted = ()
    if path:
        accepted = build(_List, read(Path(path))).accepted
    for number, rule in enumerate(accepted):
        if any((rule.id, rule.package) == (other.id, other.package) for other in accepted[:number]):
            package = rule.package or "every package"
            raise InputError(
                f"{rule.id} is judged twice for {package}",
                where=str(path),
                hint="keep one of the two",
            )
    return accepted


def audit(
    bill: Mapping[str, Any], osv: Path, accepted: Sequence[Accepted]
) -> tuple[list[Vulnerability], list[str]]:
    """Return the vulnerabilities in ``osv`` (a file, a folder or a zip archive) of the packages in
    an SPDX document, and a sentence for each ecosystem of its packages that no entry is about.

    What only a build needed is left out. Raises InputError if the data cannot be read.
    """
    packages: dict[tuple[str, str], list[dict[str, Any]]] = {}
    release = ""
    unseen = Counter[str]()
    for ecosystem, name, place in _packages(bill):
        unseen[ecosystem] += 1
        packages.setdefault((ecosystem, name), []).append(place)
        if name == "base-files":
            release = place["version"].partition(".")[0]
    findings: set[Vulnerability] = set()
    for where, entry in _entries(osv):
        try:
            for affected in (
                entry["id"] and not entry.get("withdrawn") and entry.get("affected")
            ) or ():
                # Records about commits alone name no package.
                about = {"ecosystem": "", "name": "", **(affected.get("package") or {})}
                ecosystem, _, of = about["ecosystem"].partition(":")
                unseen.pop(ecosystem, None)
                if ecosystem == "PyPI":
                    name = normalised(about["name"])
                else:
                    name = about["name"]
                # Debian's entries have a row for each of its releases that has the vulnerability.
                elsewhere = release and of not in ("", release)
                for place in () if elsewhere else packages.get((ecosystem, name), ()):
                    fixed = _affects(affected, ecosystem, place["version"])
                    if fixed is not None:
                        findings.add(_finding(entry, place, fixed, accepted))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError("not an OSV entry", where=where) from None
    missing = (
        f"no entry is about {name}: {counted(n, 'package')} not looked up"
        for name, n in unseen.items()
    )
    return sorted(findings, key=lambda finding: (finding.package, finding.id)), [*missing]


def _finding(
    entry: Mapping[str, Any], place: Any, fixed: str, accepted: Sequence[Accepted]
) -> Vulnerability:
    # Debian's entries name their CVE as upstream. An advisory for several is none of them.
    upstream = entry.get("upstream") or ()
    names = (entry["id"], *(entry.get("aliases") or ()), *(upstream if len(upstream) == 1 else ()))
    name, *aliases = dict.fromkeys(map(str, names))
    summary = shorten(
        entry.get("summary") or entry.get("details") or "no summary", _LONGEST, placeholder=" …"
    )
    rule = next(
        (r for r in accepted if r.id in names and r.package in ("", place["package"])), None
    )
    return Vulnerability(
        id=name, aliases=tuple(aliases), summary=summary, fixed=fixed, accepted=rule, **place
    )


def _packages(bill: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    try:
        tools = {
            r["spdxElementId"]
            for r in bill["relationships"]
            if r["relationshipType"] == "BUILD_TOOL_OF"
        }
        for package in bill["packages"]:
            purl = next((r["referenceLocator"] for r in package.get("externalRefs", ())), "")
            place = {"package": package["name"], "version": package["versionInfo"], "purl": purl}
            if purl.lower().startswith("pkg:pypi/") and package["SPDXID"] not in tools:
                yield "PyPI", normalised(package["name"]), place
            if purl.lower().startswith("pkg:deb/") and package["SPDXID"] not in tools:
                source = _SOURCE.fullmatch(package.get("sourceInfo", ""))
                name, version = (
                    source.groups() if source else (package["name"], package["versionInfo"])
                )
                yield "Debian", name, {**place, "version": version}
    except (KeyError, TypeError, AttributeError):
        why = ""
        raise InputError(
            f"not an SPDX document in JSON{why}",
            hint="name a target, or a file that `primus sbom TARGET --json` wrote",
        ) from None


def _entries(osv: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each entry with the name of its file."""
    name = ""
    try:
        for name, text in _texts(osv):
            content = json.loads(text)
            yield from (
                (name, entry) for entry in (content if isinstance(content, list) else [content])
            )
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"OSV data cannot be read: {error}", where=str(osv)) from None
    except (ValueError, RecursionError):
        raise InputError("not an OSV entry", where=name) from None
    if not name:
        raise InputError("no OSV data: there is no .json file", where=str(osv))


def _texts(osv: Path) -> Iterator[tuple[str, bytes]]:
    if osv.suffix == ".zip":
        with zipfile.ZipFile(osv) as archive:
            yield from (
                (name, archive.read(name)) for name in archive.namelist() if name.endswith(".json")
            )
    else:
        if osv.is_dir():
            paths = sorted(osv.rglob("*.json"))
        else:
            paths = [osv]
        yield from ((str(path), path.read_bytes()) for path in paths)


def _affects(affected: Mapping[str, Any], ecosystem: str, version: str) -> str | None:
    """Return the version that mends it, "" if none is known, or None if ``version`` is not
    affected.
    """
    order: Any = NativeVersion
    if ecosystem == "PyPI":
        order = Version
        version = version.partition("+")[0]  # a local build has the faults of its version
    versions = affected.get("versions") or ()
    inside = version in versions
    fixes = list[str]()
    try:
        mine = order(version)
        for events in (
            r["events"] for r in affected.get("ranges") or () if r["type"] == "ECOSYSTEM"
        ):
            pairs = [pair for event in events for pair in event.items() if pair[0] != "limit"]
            since = False
            for kind, at in sorted(pairs, key=lambda pair: (pair[1] != "0", order(pair[1]))):
                reached = at == "0" or mine >= order(at)
                fixes += [at] if kind == "fixed" and not reached else []
                if reached and (kind != "last_affected" or mine != order(at)):
                    since = kind == "introduced"
            inside = inside or since
    except (
        ValueError
    ):  # what cannot be compared is affected, unless all versions that are, are listed
        if inside or not versions:
            return ""
        return None
    if inside:
        return min(fixes, key=order, default="")
    return None


def openvex(findings: Sequence[Vulnerability], name: str, now: str) -> dict[str, Any]:
    """Return the findings as OpenVEX 0.2.0, at the time ``now``."""
    statements = []
    for finding in findings:
        accepted = finding.accepted
        if finding.fixed:
            update = f"update to {finding.fixed}"
        else:
            update = _UNMENDED
        reason, status = (accepted.reason, accepted.status) if accepted else (update, "affected")
        action, impact = (reason, None) if status == "affected" else (None, reason)
        about = {"id": finding.id, "aliases": list(finding.aliases), "purl": finding.purl}
        statements.append(
            form("vex_statement", **about, status=status, action=action, impact=impact)
        )
    identity = f"https://openvex.dev/docs/primus-{re.sub(r'[^A-Za-z0-9.-]', '-', name)}-{now}"
    return form("vex", identity=identity, now=now, statements=statements)


def forbidden_in(documents: Sequence[Document], policy: Policy) -> list[str]:
    """Return the licences and vulnerabilities that a policy forbids, and an SPDX document names,
    one sentence each.
    """
    reasons = []
    today = date.today()
    for bill in (
        json.loads(document.data) for document in documents if document.media_type == SPDX
    ):
        for package in bill["packages"]:
            licences = set(re.findall(r"[A-Za-z0-9.+-]+", package["licenseDeclared"])) & {
                *policy.refused_licences
            }
            reasons += [
                f"{package['name']} {package['versionInfo']} is under {name}"
                for name in sorted(licences)
            ]
        if policy.osv:
            findings, unseen = audit(bill, Path(policy.osv), load_accepted(policy.accepted))
            reasons += [f"{policy.osv}: {sentence}" for sentence in unseen]
            reasons += [finding.sentence(today) for finding in findings if finding.is_open(today)]
    return reasons
