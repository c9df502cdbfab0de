"""What a release needs: the rules of ``policy.yaml``, and what the evidence about an image lacks of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primus.errors import CheckFailed
from primus.release.documents import GATES, IN_TOTO, VALIDATION
from primus.release.registry import Document
from primus.schema import build, described
from primus.terminal import some
from primus.yamlfile import read

# Seconds of a run of a proxy on two cores, the median of benchmarks/results/healthy-seeds.json.
_SECONDS_OF_RUN = 19


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a release needs. Without a file, the defaults apply."""

    runs: tuple[str, ...] = described(
        "runs that at least one validation has: a quick suite proves neither that runs repeat nor that they resume",
        default=("base", "repeat", "resume", "accumulation"),
    )
    forgiven: tuple[str, ...] = described(
        "gates that a preview may fail: Debian's ROCm has no code for some GPUs", default=("coverage",)
    )
    driver: str | None = described("driver of every validation on a GPU", default=None)
    firmware: str | None = described("firmware of every validation on a GPU", default=None)
    found: float = described("least share of injected faults that the suite finds", default=0.0)
    alarms: float = described("largest share of healthy runs that the suite refuses", default=1.0)
    refused_licences: tuple[str, ...] = described("SPDX licences that no package of the image has", default=())
    osv: str | None = described("file or folder of OSV data: no package has a vulnerability of it", default=None)
    accepted: str | None = described("file of accepted vulnerabilities, with reasons and dates", default=None)


def load(path: Path) -> Policy:
    """Read a policy. Paths in it are relative to it. Raises InputError."""
    policy = build(Policy, read(path))
    osv, accepted = (value and str(path.parent / value) for value in (policy.osv, policy.accepted))
    return replace(policy, osv=osv, accepted=accepted)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence about an image.

    ``preview`` is the reason why it is a preview; empty for a release. ``gpu`` is the GPU generation that it is for.
    ``recipes`` are those that its ``target`` names. ``records`` are its validations. ``commit`` is that of the
    repository, and ``edited`` are files that differ from it.
    """

    target: str
    preview: str
    gpu: str | None
    recipes: Sequence[str]
    failed_gates: Sequence[str]
    records: Sequence[Mapping[str, Any]]
    commit: str | None
    edited: Sequence[str] = ()


def evidence_in(documents: Sequence[Document]) -> Evidence:
    """Return the evidence in the documents about an image. Raises CheckFailed without a provenance and findings of
    gates.
    """

    def of(media_type: str) -> list[Any]:
        return [json.loads(document.data) for document in documents if document.media_type == media_type]

    if not (provenances := of(IN_TOTO)) or not (outcomes := of(GATES)):
        raise CheckFailed("the image has no provenance or no findings of gates, so nothing is known of it")
    definition = provenances[-1]["predicate"]["buildDefinition"]
    source = definition["resolvedDependencies"][:1]
    return Evidence(
        **{name: definition["externalParameters"][name] for name in ("target", "preview", "gpu", "recipes")},
        failed_gates=[gate["gate"] for gate in outcomes[-1]["gates"] if not gate["passed"]],
        records=of(VALIDATION),
        commit=source[0]["digest"].get("gitCommit") if source else None,
    )


def objections(evidence: Evidence, policy: Policy, *, preview: bool) -> tuple[str, ...]:
    """Return the reasons why the image may not be published, one sentence each; empty if it may.

    A release for a GPU must have passed its validations on that GPU. With ``preview``, a CPU is sufficient, the
    forgiven gates may fail, and files of the repository may be edited.
    """
    reasons = []
    if evidence.preview and not preview:
        reasons.append(f"it is a preview: {evidence.preview}")
    reasons += [f"gate {gate} fails" for gate in evidence.failed_gates if not (preview and gate in policy.forgiven)]
    reasons += _of_validation(evidence, policy, preview)
    if evidence.commit is None and not preview:
        reasons.append("the commit it was built from is unknown: this is not a git repository")
    elif evidence.commit and evidence.edited and not preview:
        reasons.append(f"files differ from commit {evidence.commit[:12]}: {some(evidence.edited, 3)}")
    return tuple(reasons)


def _of_validation(evidence: Evidence, policy: Policy, preview: bool) -> list[str]:
    if not evidence.recipes:
        return ["its target names no recipe to validate it with"]
    records, where = [record for record in evidence.records if _passed(record, policy, preview)], ""
    if evidence.gpu and not preview:
        records, where = [record for record in records if record["gpu"] == evidence.gpu], f" on {evidence.gpu}"
        if not records:
            return [
                f"nothing was trained in this image on {evidence.gpu}, and a run on a CPU does not count for the GPU "
                f"(run primus validate {evidence.target} on a machine with that GPU)"
            ]
    trained = {record["recipe"]["name"] for record in records}
    reasons = []
    if lacking := [name for name in evidence.recipes if name not in trained]:
        minutes = len(lacking) * _SECONDS_OF_RUN / 60
        reasons.append(
            f"{some(lacking, 3)} did not pass a validation in this image{where} "
            f"(primus validate {evidence.target} --suite quick: at least {max(1, round(minutes))} min)"
        )
    if not any({job["name"] for job in record["jobs"] if job["ran"]} >= {*policy.runs} for record in records):
        reasons.append(
            f"no validation in this image{where} repeated a run, resumed it and split its batch "
            f"(primus validate {evidence.target})"
        )
    return [*reasons, *(reason for record in records for reason in unmet(record, policy))]


def unmet(record: Mapping[str, Any], policy: Policy) -> list[str]:
    """Return what the validation lacks of the policy's rules for machines and for the suite."""
    reasons, machine, rates = [], record.get("machine", {}), record.get("suite", {}).get("rates")
    for part in ("driver", "firmware"):
        needed, there = getattr(policy, part), machine.get(part)
        if needed and record["gpu"] != "none" and there != needed:
            reasons.append(f"{record['recipe']['name']} was validated with {part} {there or 'unknown'}, not {needed}")
    if policy.found > 0 or policy.alarms < 1:
        if not rates:
            return [*reasons, f"the validation of {record['recipe']['name']} says nothing about its suite's own faults"]
        if rates["named"] < policy.found * rates["faults"]:
            reasons.append(
                f"the suite finds {rates['named']} of {rates['faults']} faults, less than {policy.found:.1%}"
            )
        if rates["refused"] > policy.alarms * rates["healthy"]:
            share = f"{rates['refused']} of {rates['healthy']}"
            reasons.append(f"the suite refuses {share} healthy runs, more than {policy.alarms:.1%}")
    return reasons


def _passed(record: Mapping[str, Any], policy: Policy, preview: bool) -> bool:
    if not preview:
        return record["passed"] is True
    failed = {verdict["name"] for verdict in record["verdicts"] if not verdict["passed"]}
    ran = all(job["ran"] for job in record["jobs"])
    return bool(record["verdicts"]) and ran and failed <= {f"gate {gate}" for gate in policy.forgiven}
