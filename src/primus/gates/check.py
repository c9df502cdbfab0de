"""All gates on one built image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus import __version__
from primus.errors import InputError
from primus.gates.coherence import coherence
from primus.gates.coverage import coverage, gpu_libraries
from primus.gates.litter import litter, secrets_in
from primus.gates.model import Finding, GateReport
from primus.gates.pins import pinned_packages, python_packages
from primus.gates.prune import pruning
from primus.gates.sonames import shared_names
from primus.gates.versions_inside import versions_inside
from primus.images.build import current
from primus.images.outline import bytes_text
from primus.images.plan import plan_image
from primus.images.roots import root_of_image

if TYPE_CHECKING:
    from primus.gates.facts import LayerFacts
    from primus.images.action import ImagePlan
    from primus.images.build import Built
    from primus.images.project import Project
    from primus.progress import Progress

__all__ = ["Examined", "Outcome", "check_image", "examine", "outcome_text"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the gates say of one image; ``libraries`` are its GPU libraries with the targets each has code for."""

    target: str
    ref: str
    digest: str
    reports: tuple[GateReport, ...]
    libraries: tuple[dict[str, Any], ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every gate passed."""
        return all(report.passed for report in self.reports)

    def as_json(self) -> dict[str, Any]:
        """Plain data for ``--json`` and for evidence."""
        return {
            "target": self.target,
            "ref": self.ref,
            "digest": self.digest,
            "passed": self.passed,
            "gates": [
                {
                    "gate": report.gate,
                    "passed": report.passed,
                    "summary": report.summary,
                    "findings": [{k: v for k, v in asdict(f).items() if k != "gate"} for f in report.findings],
                }
                for report in self.reports
            ],
            "libraries": list(self.libraries),
        }


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A built image: its plan, what the build recorded, the bytes of its config, the facts of its layers by name."""

    plan: ImagePlan
    built: Built
    config: bytes
    facts: Mapping[str, LayerFacts]


def examine(project: Project, name: str, progress: Progress) -> Examined:
    """Look into every layer of the target's image, bottom first.

    Raises InputError when the store does not hold the image that versions.yaml and the lock describe, HostError when
    a layer is damaged.
    """
    from primus.gates.facts import facts_of

    plan = plan_image(project, name, project.lock(name))
    built = current(project.store, plan)
    if built is None:
        raise InputError(
            f"{plan.ref} is not built as versions.yaml and its lock have it now", hint=f"primus build {name}"
        )
    root = root_of_image(project.store, project.work / "unpacked", name, ref=plan.ref)
    facts: dict[str, LayerFacts] = {}
    for action, ref in zip(plan.layers, root.layers, strict=True):
        progress.start(ref.digest, f"examine {action.name}", None)
        facts[action.name] = facts_of(
            ref, project.store.blob_path(ref.digest), project.work / "cache" / "gates", _needles(project)
        )
        progress.finish(ref.digest)
    return Examined(plan=plan, built=built, config=root.config_bytes, facts=facts)


def check_image(project: Project, name: str, progress: Progress) -> Outcome:
    """Run every gate on the built image of ``name``; see :func:`examine` for what it raises."""
    image = examine(project, name, progress)
    arch, lock, pins = project.arch(name), project.lock(name), project.pins(name)
    base = project.choice(name).base
    wheels = {f.name: f.version for f in python_packages(lock)} if lock else {}
    if "primus" in pins:
        wheels["primus-images"] = __version__
    published = {a.name for a in image.plan.layers if (a.kind == "wheels" and not a.needs) or a.kind == "image"}
    # The packages of a base's image are locked as its layers, not one by one.
    given = {a.name for a in image.plan.layers if a.kind == "image"}
    facts = image.facts.items()
    code = [(layer, f.code) for layer, f in facts]
    unreadable = [(layer, path, why) for layer, f in facts for path, why in f.unreadable.items()]
    reports = (
        coherence(pinned_packages(project, name), arch),
        coverage(code, arch, unreadable),
        pruning(code, arch),
        versions_inside(
            [(layer, [s for s in f.stated if layer not in given or s.kind != "deb"]) for layer, f in facts],
            wheels=wheels,
            debs={f.name: f.version for f in lock.of("deb", base)} if lock and base else {},
            components={component: pin.version for component, pin in pins.items() if pin.version},
        ),
        shared_names([(layer, f.libraries) for layer, f in facts]),
        _with_settings(
            litter([(layer, f.traces) for layer, f in facts], lambda layer: layer not in published), image.config
        ),
        _budget(project, image),
    )
    libraries = tuple(asdict(library) for library in gpu_libraries(code, arch))
    return Outcome(target=name, ref=image.plan.ref, digest=image.built.digest, reports=reports, libraries=libraries)


def _needles(project: Project) -> Sequence[bytes]:
    """Paths of this machine that no image may hold; short ones are left out, an image may have folders called so."""
    paths = {project.root, project.store.root.absolute(), Path.home() / ".cache"}
    return sorted(str(path).encode() for path in paths if len(path.parts) > 3)


def _with_settings(report: GateReport, config: bytes) -> GateReport:
    """The report, with secrets in the image's own settings (environment, labels, history) added."""
    found = tuple(
        Finding(gate=report.gate, severity="error", path="config", message=f"secret: {what} in the image's settings")
        for what in dict.fromkeys(secrets_in(config))
    )
    return GateReport(gate=report.gate, summary=report.summary, findings=(*report.findings, *found))


def _budget(project: Project, image: Examined) -> GateReport:
    plan, size = image.plan, image.built.size
    summary = f"{bytes_text(size)} compressed"
    findings: tuple[Finding, ...] = ()
    if plan.budget_bytes is not None:
        summary += f" of {bytes_text(plan.budget_bytes)}"
        if size > plan.budget_bytes:
            message = f"the image weighs {bytes_text(size)}, its budget is {bytes_text(plan.budget_bytes)}"
            channel = project.choice(plan.target).channel
            own = channel in project.target(plan.target).budgets_gb
            place = project.target_place(plan.target, *(("budgets_gb", channel) if own else ("budget_gb",)))
            findings = (Finding(gate="budget", severity="error", path=place, message=message),)
    return GateReport(gate="budget", summary=summary, findings=findings)


_SIGNS = {"error": "✗", "warning": "!", "note": "·"}


def outcome_text(outcome: Outcome) -> str:
    """One line per gate, and below it its findings: ✗ error, ! warning, · note."""
    width = max(len(report.gate) for report in outcome.reports)
    lines = [f"{outcome.ref} {outcome.digest}"]
    for report in outcome.reports:
        lines.append(f"  {'✓' if report.passed else '✗'} {report.gate:<{width}}  {report.summary}")
        for finding in report.findings:
            inside = finding.layer and finding.path
            place = " ".join(filter(None, (finding.layer, ("/" if inside else "") + finding.path)))
            lines.append(f"      {_SIGNS[finding.severity]} {place + ': ' if place else ''}{finding.message}")
    return "\n".join(lines)
