"""What a release needs: the rules of ``policy.yaml``, and what an image's evidence lacks."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from primus_images.errors import CheckFailed, InputError, nearest
from primus_images.gates.rules import gates
from primus_images.release.artifact import Document
from primus_images.release.documents import GATES, IN_TOTO, SPDX, VALIDATION
from primus_images.release.licences import licence_names, listed_name, unlisted
from primus_images.release.vulnerabilities import audit, load_accepted
from primus_images.schema import build
from primus_images.terminal import some
from primus_images.training.judge.record import NO_GPU, Record
from primus_images.yamlfile import Document as YamlDocument, read

# Seconds of a run of a proxy on two cores, the median of benchmarks/results/healthy-seeds.json.
_SECONDS_OF_RUN = 19


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
    unknown_licences: int | None = None
    osv: str | None = None
    accepted: str | None = None

    @property
    def about_packages(self) -> bool:
        """Whether a rule needs the bill of materials."""
        return bool(self.refused_licences or self.osv) or self.unknown_licences is not None


def of_project(root: Path, path: Path | None) -> Policy:
    """Return the policy in ``path``, or without one, that of the project."""
    file = path or root / "policy.yaml"
    if path or file.exists():
        return load(file)
    return Policy()


def load(path: Path) -> Policy:
    """Read a policy. Paths in it are relative to it. Raises InputError."""
    document = read(path)
    policy = build(Policy, document)
    known = gates()
    for index, name in enumerate(policy.forgiven):
        if name not in known:
            raise InputError(
                f"there is no gate {name!r}{nearest(name, known)}",
                where=document.where(("forgiven", index)),
                hint="docs/gates.md lists the gates",
            )
    licences = set(licence_names().values())
    for index, name in enumerate(policy.refused_licences):
        if name not in licences and not name.startswith("LicenseRef-"):
            now = listed_name(name)
            later = now.replace("-only", "-or-later")
            near = nearest(name, licences)
            if now:
                near = f"; its name is {now}"
            if later != now:
                near += f", and that of the same or a later version {later}"
            raise InputError(
                f"SPDX's list has no licence {name!r}{near}",
                where=document.where(("refused_licences", index)),
                hint="its name there, such as GPL-3.0-only",
            )
    return replace(
        policy,
        osv=_existing(policy.osv, "osv", path, document),
        accepted=_existing(policy.accepted, "accepted", path, document),
    )


def _existing(name: str | None, key: str, policy: Path, document: YamlDocument) -> str | None:
    """Return a path that is relative to the policy. Raises InputError if nothing is there."""
    if not name:
        return None
    path = policy.parent / name
    if not path.exists():
        raise InputError(
            f"there is no file or folder {path}",
            where=document.where((key,)),
            hint="correct the path, which is relative to the policy",
        )
    return str(path)


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
    records: Sequence[Record]
    commit: str | None
    edited: Sequence[str] = ()


def evidence_in(documents: Sequence[Document]) -> Evidence:
    """Return the evidence in the documents about an image.

    Raises CheckFailed without a provenance and findings of gates.
    """
    provenances = list(_contents(documents, IN_TOTO))
    outcomes = list(_contents(documents, GATES))
    if not provenances or not outcomes:
        raise CheckFailed(
            "the image has no provenance or no findings of gates, so nothing is known of it"
        )
    definition = provenances[-1]["predicate"]["buildDefinition"]
    parameters = definition["externalParameters"]
    commit = None
    for source in definition["resolvedDependencies"][:1]:
        commit = source["digest"].get("gitCommit")
    return Evidence(
        target=parameters["target"],
        preview=parameters["preview"],
        gpu=parameters["gpu"],
        recipes=parameters["recipes"],
        components=parameters["components"],
        failed_gates=[gate["gate"] for gate in outcomes[-1]["gates"] if not gate["passed"]],
        records=[Record.of(content) for content in _contents(documents, VALIDATION)],
        commit=commit,
    )


def _contents(documents: Sequence[Document], media_type: str) -> Iterator[Any]:
    for document in documents:
        if document.media_type == media_type:
            yield json.loads(document.data)


def objections(evidence: Evidence, policy: Policy, *, preview: bool) -> tuple[str, ...]:
    """Return the reasons why the image may not be published, one sentence each.

    A release for a GPU must have passed its validations on that GPU. With ``preview``, a CPU is
    sufficient, the forgiven gates may fail, and files of the repository may be edited.
    """
    reasons = []
    if evidence.preview and not preview:
        reasons.append(f"it is a preview: {evidence.preview}")
    for gate in evidence.failed_gates:
        if not (preview and gate in policy.forgiven):
            reasons.append(f"gate {gate} fails")
    reasons += _of_validations(evidence, policy, preview=preview)
    if not preview:
        reasons += _of_source(evidence)
    return tuple(reasons)


def _of_source(evidence: Evidence) -> Iterator[str]:
    if evidence.commit is None:
        yield "the commit it was built from is unknown: this is not a git repository"
    elif evidence.edited:
        files = some(evidence.edited, 3)
        yield f"files differ from commit {evidence.commit[:12]}: {files}"


def _of_validations(evidence: Evidence, policy: Policy, *, preview: bool) -> Iterator[str]:
    """Yield what the validations lack: on the right GPU, of recipes, of runs and of components."""
    if not evidence.recipes:
        yield "its target names no recipe to validate it with"
        return
    records = []
    for record in evidence.records:
        if _counts(record, policy, preview=preview):
            records.append(record)
        else:
            yield _failure(record)
    where = ""
    if evidence.gpu and not preview:
        where = f" on {evidence.gpu}"
        records = [record for record in records if record.gpu == evidence.gpu]
        if not records:
            yield (
                f"nothing was trained in this image{where}, and a run on a CPU does not count for "
                f"the GPU (run primus validate {evidence.target} on a machine with that GPU)"
            )
            return
    yield from _untrained(evidence, records, where)
    if not any(set(record.ran) >= set(policy.runs) for record in records):
        yield (
            f"no validation in this image{where} repeated a run, resumed it and split its batch "
            f"(primus validate {evidence.target})"
        )
    if not preview:
        yield from _not_loaded(evidence, records, where)
    for record in records:
        yield from unmet(record, policy)


def _failure(record: Record) -> str:
    """Return what the newest validation of a cell says against the image.

    It would be published and signed as well, and nobody who verifies the image accepts it.
    """
    where = "the CPU" if record.gpu == NO_GPU else record.gpu
    names = [verdict.name for verdict in record.failed]
    what = some(names, 3) or "not all of its jobs ran"
    recipe = record.recipe
    return (
        f"the newest validation of {recipe.name} ({recipe.precision}) on {where} failed: {what} "
        "(primus validate TARGET --again)"
    )


def _untrained(evidence: Evidence, records: Sequence[Record], where: str) -> Iterator[str]:
    trained = {record.recipe.name for record in records}
    lacking = [name for name in evidence.recipes if name not in trained]
    if lacking:
        minutes = max(1, round(len(lacking) * _SECONDS_OF_RUN / 60))
        yield (
            f"{some(lacking, 3)} did not pass a validation in this image{where} "
            f"(primus validate {evidence.target} --suite quick: at least {minutes} min)"
        )


def _not_loaded(evidence: Evidence, records: Sequence[Record], where: str) -> Iterator[str]:
    loaded: set[str] = set()
    for record in records:
        loaded.update(record.facts.get("loaded", ()))
    idle = [name for name, package in evidence.components.items() if package not in loaded]
    if idle:
        yield (
            f"no validation{where} loaded {some(idle, 3)} (give it a recipe, remove it from the "
            "image, or say in versions.yaml what it is a tool for)"
        )


def unmet(record: Record, policy: Policy) -> Iterator[str]:
    """Yield what the validation lacks of the policy's rules for machines and for the suite."""
    name = record.recipe.name
    if record.gpu != NO_GPU:
        yield from _unmet_version(name, "driver", policy.driver, record.machine.driver)
        yield from _unmet_version(name, "firmware", policy.firmware, record.machine.firmware)
    if policy.found <= 0 and policy.alarms >= 1:
        return
    rates = record.suite.rates
    if rates is None:
        yield f"the validation of {name} says nothing about its suite's own faults"
        return
    if policy.found > 0 and not rates.faults:
        yield "the suite was tried with no fault, so the share that it finds is unknown"
    if policy.alarms < 1 and not rates.healthy:
        yield "the suite was tried with no healthy run, so the share that it refuses is unknown"
    if rates.named < policy.found * rates.faults:
        share = f"{rates.named} of {rates.faults}"
        yield f"the suite finds {share} faults, less than {policy.found:.1%}"
    if rates.refused > policy.alarms * rates.healthy:
        share = f"{rates.refused} of {rates.healthy}"
        yield f"the suite refuses {share} healthy runs, more than {policy.alarms:.1%}"


def _unmet_version(name: str, part: str, needed: str | None, actual: str) -> Iterator[str]:
    if needed and actual != needed:
        yield f"{name} was validated with {part} {actual or 'unknown'}, not {needed}"


def _counts(record: Record, policy: Policy, *, preview: bool) -> bool:
    """Whether a record passed. In that of a preview, the forgiven gates may fail."""
    if not preview:
        return record.passed
    forgiven = {f"gate {gate}" for gate in policy.forgiven}
    failed = {verdict.name for verdict in record.failed}
    all_ran = all(job.ran for job in record.jobs)
    return bool(record.verdicts) and all_ran and failed <= forgiven


def forbidden_in(documents: Sequence[Document], policy: Policy) -> list[str]:
    """Return the licences and vulnerabilities that a policy forbids, one sentence each.

    An SPDX document among ``documents`` names them.
    """
    reasons = []
    today = date.today()
    bills = list(_contents(documents, SPDX))
    if policy.about_packages and not bills:
        reasons.append("it has no bill of materials, so licences and vulnerabilities are unknown")
    for bill in bills:
        for package in bill["packages"]:
            for licence in _refused(package["licenseDeclared"], policy.refused_licences):
                reasons.append(f"{package['name']} {package['versionInfo']} is under {licence}")
        if policy.unknown_licences is not None:
            reasons += _too_many_unknown(bill, policy.unknown_licences)
        if policy.osv:
            findings, unseen = audit(bill, Path(policy.osv), load_accepted(policy.accepted))
            reasons += [f"{policy.osv}: {sentence}" for sentence in unseen]
            reasons += [finding.sentence(today) for finding in findings if finding.is_open(today)]
    return reasons


def _too_many_unknown(bill: Mapping[str, Any], most: int) -> Iterator[str]:
    """Yield that more packages than ``most`` have a licence which no policy can refuse by name."""
    names, in_part, _ = unknown_licences(bill)
    every = [*names, *in_part]
    if len(every) > most:
        sentence = f"the licences of {len(every)} packages are unknown"
        if in_part:
            sentence += f", {len(in_part)} of them in part"
        yield f"{sentence}, more than {most}: {some(every, 5)}"


def licence_line(documents: Sequence[Document]) -> str:
    """Return how many licences in an SPDX document among ``documents`` are unknown."""
    for bill in _contents(documents, SPDX):
        names, in_part, total = unknown_licences(bill)
        line = f"licences: {len(names)} of {total} unknown"
        if names:
            line += f" ({some(names, 5)})"
        if in_part:
            line += f"; {len(in_part)} known in part ({some(in_part, 5)})"
        return line
    return ""


def unknown_licences(bill: Mapping[str, Any]) -> tuple[list[str], list[str], int]:
    """Return the packages of an SPDX document whose licences SPDX's list does not name.

    The second list has those with a licence of SPDX's list and another one. The third value is the
    number of all packages from elsewhere.
    """
    packages = [package for package in bill["packages"] if "externalRefs" in package]
    names = []
    in_part = []
    for package in packages:
        licence = package["licenseDeclared"]
        references = re.findall(r"LicenseRef-[A-Za-z0-9.-]+", licence)
        if unlisted(licence):
            names.append(package["name"])
        elif any(map(unlisted, references)):
            in_part.append(package["name"])
    return names, in_part, len(packages)


def _refused(expression: str, refused: Collection[str]) -> list[str]:
    """Return the licences of an SPDX expression that are refused."""
    names = set(re.findall(r"[A-Za-z0-9.+-]+", expression))
    return sorted(names.intersection(refused))
