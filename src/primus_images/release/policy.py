"""What a release needs: the rules of ``policy.yaml``, and what the evidence about an image lacks of
them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from primus_images.errors import CheckFailed, InputError, nearest
from primus_images.gates.rules import gates
from primus_images.refusals import refusal
from primus_images.release.artifact import Document
from primus_images.release.documents import GATES, IN_TOTO, SPDX, VALIDATION
from primus_images.release.licences import licence_names
from primus_images.release.vulnerabilities import audit, load_accepted
from primus_images.schema import build
from primus_images.terminal import some
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


def of_project(root: Path, path: Path | None) -> Policy:
    """Return the policy in ``path``, or without one, that of the project."""
    file = path or root / "policy.yaml"
    if path or file.exists():
        return load(file)
    return Policy()


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
