"""All gates on one built image."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus import __version__
from primus.build.image import compose, current
from primus.errors import InputError
from primus.gates.aot import ask_image, turbo
from primus.gates.coherence import coherence
from primus.gates.coverage import coverage, gpu_libraries
from primus.gates.facts import LayerFacts, facts_of, known
from primus.gates.finding import Finding, GateReport
from primus.gates.litter import Trace, litter, secrets_in
from primus.gates.loadable import loadable
from primus.gates.pins import pinned_packages, python_packages
from primus.gates.prune import pruning
from primus.gates.sonames import shared_names
from primus.gates.versions_inside import versions_inside
from primus.oci.left_out import LeftOut
from primus.oci.roots import reference
from primus.sandbox.container import RootFs
from primus.terminal import PLAIN, Screen, Styled, bytes_text
from primus.versions.suites import upstream

if TYPE_CHECKING:
    from threading import Event

    from primus.build.image import Composed
    from primus.oci.store import Layer
    from primus.plan.action import ImagePlan
    from primus.plan.resolve import ResolvedTarget
    from primus.plan.workspace import Workspace
    from primus.progress import Progress

__all__ = [
    "Examined",
    "Outcome",
    "check_image",
    "examine",
    "judge",
    "look_into",
    "needles_of",
    "outcome_text",
]


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
    """An image and the facts of its layers by name."""

    image: Composed
    facts: Mapping[str, LayerFacts]


def look_into(workspace: Workspace, layer: Layer, stop: Event | None = None) -> LayerFacts:
    """What lies in the layer, read once and kept; see :func:`primus.gates.facts.facts_of` for what it raises."""
    blob = workspace.store.blob_path(layer.blob.digest)
    return facts_of(reference(layer), blob, workspace.facts, needles_of(workspace), stop)


def examine(plan: ImagePlan, workspace: Workspace, progress: Progress) -> Examined:
    """Look into every layer of the plan's image, bottom first.

    Raises InputError when the store does not hold exactly this image, HostError when a layer is damaged.
    """
    store = workspace.store
    image = compose(store, plan) if current(store, plan) else None
    if image is None:
        raise InputError(
            f"{plan.ref} is not built from the current versions.yaml and lock", hint=f"primus build {plan.target}"
        )
    facts: dict[str, LayerFacts] = {}
    for action, layer in zip(plan.layers, image.layers, strict=True):
        new = not known(layer.blob.digest, workspace.facts, needles_of(workspace))
        if new:
            progress.start(layer.blob.digest, f"examine {action.name}", None)
        facts[action.name] = look_into(workspace, layer)
        if new:
            progress.finish(layer.blob.digest)
    return Examined(image=image, facts=facts)


def check_image(plan: ImagePlan, workspace: Workspace, progress: Progress) -> Outcome:
    """Run every gate on the built image; see :func:`examine` for what it raises."""
    return judge(examine(plan, workspace, progress), workspace)


def judge(examined: Examined, workspace: Workspace) -> Outcome:
    """Run every gate on an image."""
    image = examined.image
    resolved, actions = image.plan.resolved, image.plan.layers
    arch, lock, pins = resolved.arch, resolved.lock, resolved.pins
    base = resolved.choice.base
    wheels = {f.name: f.version for f in python_packages(lock)} if lock else {}
    if "primus" in pins:
        wheels["primus-images"] = __version__
    published = {a.name for a in actions if a.kind in ("image", "wheels", "kernels") and not a.needs}
    bases = {a.name for a in actions if a.kind == "debs"}

    def is_ours(layer: str, trace: Trace) -> bool:
        # Below /usr lie the packages' own files, such as libgnutls with the key it tests itself with; keys that are
        # made when a package is installed lie in /etc or /var.
        packaged = layer in bases and trace.rule == "secret" and trace.path.startswith("usr/")
        return layer not in published and not packaged

    # The packages of a base's image are locked as its layers, not one by one.
    given = {a.name for a in actions if a.kind == "image"}
    left_out = LeftOut.sum(layer.left_out for layer in image.layers)
    facts = examined.facts.items()
    code = [(layer, f.code) for layer, f in facts]
    unreadable = [(layer, path, why) for layer, f in facts for path, why in f.unreadable.items()]
    reports = (
        coherence(pinned_packages(resolved), arch),
        coverage(code, arch, unreadable, left_out),
        pruning(code, arch, left_out),
        versions_inside(
            [(layer, [s for s in f.stated if layer not in given or s.kind != "deb"]) for layer, f in facts],
            wheels=wheels,
            debs={f.name: f.version for f in lock.of("deb", base)} if lock and base else {},
            components=_own_versions(resolved),
            inside={c: p.inside or "" for c, p in resolved.inside.items()},
        ),
        shared_names([(layer, f.libraries) for layer, f in facts]),
        loadable([(layer, f.libraries) for layer, f in facts]),
        _with_settings(litter([(layer, f.traces) for layer, f in facts], is_ours), image.config),
        _budget(image),
        *_turbo(image, workspace),
    )
    libraries = tuple(asdict(library) for library in gpu_libraries(code, arch))
    return Outcome(target=resolved.name, ref=image.plan.ref, digest=image.digest, reports=reports, libraries=libraries)


def _own_versions(resolved: ResolvedTarget) -> dict[str, str]:
    """Component → version that a header or a library must state. A component inside another's files may be pinned by
    the version of what holds it, since its makers publish no other; then nothing is compared.
    """
    base, lock = resolved.choice.base, resolved.lock
    debs = {f.name: upstream(f.version) for f in lock.of("deb", base)} if lock and base else {}
    holders = {**debs, **{component: pin.version for component, pin in resolved.pins.items()}}
    inside = {c: p.version for c, p in resolved.inside.items() if p.version != holders.get(p.inside or "")}
    return {
        c: version for c, version in (*((c, p.version) for c, p in resolved.pins.items()), *inside.items()) if version
    }


def _turbo(image: Composed, workspace: Workspace) -> Sequence[GateReport]:
    """What the image says of its own kernels, where it should have some."""
    if not image.plan.resolved.target.turbo:
        return ()
    root = RootFs(
        layers=tuple(map(reference, image.layers)),
        config=json.loads(image.config),
        blob=workspace.store.blob_path,
        cache=workspace.unpacked,
        name=image.plan.ref,
        config_bytes=image.config,
        manifest=image.manifest,
    )
    return (turbo(ask_image(root, image.digest, workspace.facts)),)


def needles_of(workspace: Workspace) -> Sequence[bytes]:
    """Paths of this machine that no image may hold; short ones are left out, an image may have folders called so."""
    paths = {workspace.folder.parent, workspace.store.root.absolute(), Path.home() / ".cache"}
    return sorted(str(path).encode() for path in paths if len(path.parts) > 3)


def _with_settings(report: GateReport, config: bytes) -> GateReport:
    """The report, with secrets in the image's own settings (environment, labels, history) added."""
    found = tuple(
        Finding(gate=report.gate, severity="error", path="config", message=f"secret: {what} in the image's settings")
        for what in dict.fromkeys(secrets_in(config))
    )
    return GateReport(gate=report.gate, summary=report.summary, findings=(*report.findings, *found))


def _budget(image: Composed) -> GateReport:
    plan, size, budget = image.plan, image.size, image.plan.resolved.budget_gb
    summary = f"{bytes_text(size)} compressed"
    findings: tuple[Finding, ...] = ()
    if budget is not None:
        most = round(budget * 1e9)
        summary += f" of {bytes_text(most)}"
        if size > most:
            ranked = sorted(zip(plan.layers, image.layers, strict=True), key=lambda pair: -pair[1].blob.size)
            largest = ", ".join(f"{a.name} {bytes_text(layer.blob.size)}" for a, layer in ranked[:5])
            message = f"it weighs {bytes_text(size)}, its budget is {bytes_text(most)}: {largest}"
            findings = (Finding(gate="budget", severity="error", path=plan.resolved.budget_place, message=message),)
    return GateReport(gate="budget", summary=summary, findings=findings)


_SIGNS = {"error": Styled("✗", "red"), "warning": Styled("!", "yellow"), "note": Styled("·", "dim")}


def outcome_text(outcome: Outcome, screen: Screen = PLAIN) -> str:
    """One line per gate, and below it its findings: ✗ error, ! warning, · note."""
    width = max(len(report.gate) for report in outcome.reports)
    lines = [f"{outcome.ref} {outcome.digest}"]
    for report in outcome.reports:
        head = f"  {screen.verdict(report.passed)} {report.gate:<{width}}  "
        lines += screen.wrap(report.summary, head, " " * (width + 6))
        for finding in report.findings:
            inside = finding.layer and finding.path
            place = " ".join(filter(None, (finding.layer, ("/" if inside else "") + finding.path)))
            sign = screen.paint(_SIGNS[finding.severity])
            lines += screen.wrap(f"{place + ': ' if place else ''}{finding.message}", f"      {sign} ", " " * 8)
    return "\n".join(lines)
