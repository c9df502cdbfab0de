"""The input of a gate, an image with the facts about its layers, and its output, a report with findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Literal

from primus.engine.image import Composed, stored
from primus.errors import InputError
from primus.gates.codeobjects import Code
from primus.gates.facts import LayerFacts, facts_of, has_facts
from primus.oci.contents import reference
from primus.oci.store import Layer, LeftOut
from primus.plan.action import ImagePlan
from primus.plan.workspace import Workspace
from primus.progress import Progress

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence about one thing. An ``error`` fails the gate. ``layer`` and ``path`` may be empty.

    ``path`` is a path in the image without a leading slash or, for gates that judge the pins, ``file:line:col`` of
    the project.
    """

    severity: Severity
    message: str
    layer: str = ""
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """One gate's result. ``summary`` states briefly what was examined, so that an empty list of findings is not
    misread. ``gate`` is the gate's name, which :func:`primus.gates.check.judge` adds.
    """

    summary: str
    findings: tuple[Finding, ...] = ()
    gate: str = ""

    @property
    def errors(self) -> list[Finding]:
        """The findings that fail the gate."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def passed(self) -> bool:
        """Whether no finding is an error."""
        return not self.errors


@dataclass(frozen=True, kw_only=True)
class Examined:
    """An image, the facts about its layers by name (bottom first), and the workspace with its store."""

    image: Composed
    facts: Mapping[str, LayerFacts]
    workspace: Workspace

    @property
    def arch(self) -> str | None:
        """The GPU architecture that the image is for; None for an image without one."""
        return self.image.plan.resolved.arch

    @property
    def code(self) -> list[tuple[str, tuple[Code, ...]]]:
        """The GPU code of each layer."""
        return [(layer, facts.code) for layer, facts in self.facts.items()]

    @property
    def left_out(self) -> LeftOut:
        """The GPU code that the build left out of the image."""
        return LeftOut.sum(layer.left_out for layer in self.image.layers)


def machine_paths(workspace: Workspace) -> Sequence[bytes]:
    """Return the paths of this machine that no image may contain, but not those that folders of an image may have."""
    paths = {workspace.folder.parent, workspace.store.root.absolute(), Path.home() / ".cache"}
    return sorted(str(path).encode() for path in paths if len(path.parts) > 3)


def examine_layer(workspace: Workspace, layer: Layer, stop: Event | None = None) -> LayerFacts:
    """Return the facts about a layer, which is read once. Raises as :func:`primus.gates.facts.facts_of`."""
    blob = workspace.store.blob_path(layer.blob.digest)
    return facts_of(reference(layer), blob, workspace.facts, machine_paths(workspace), stop)


def examine(plan: ImagePlan, workspace: Workspace, progress: Progress) -> Examined:
    """Examine every layer of the plan's image, bottom first.

    Raises InputError if the store does not hold exactly this image, HostError if a layer is damaged.
    """
    image = stored(workspace.store, plan)
    if image is None:
        raise InputError(
            f"{plan.ref} is not built from the current versions.yaml and lock", hint=f"primus build {plan.target}"
        )
    facts: dict[str, LayerFacts] = {}
    for action, layer in zip(plan.layers, image.layers, strict=True):
        is_new = not has_facts(layer.blob.digest, workspace.facts, machine_paths(workspace))
        if is_new:
            progress.start(layer.blob.digest, f"examine {action.name}", None)
        facts[action.name] = examine_layer(workspace, layer)
        if is_new:
            progress.finish(layer.blob.digest)
    return Examined(image=image, facts=facts, workspace=workspace)
