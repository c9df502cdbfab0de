"""Run all gates on an image: on request, or while a build creates its layers."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from threading import Event
from typing import Any

from primus.errors import CheckFailed
from primus.gates.examined import Examined, GateReport, LayerFacts, examine_layer
from primus.gates.rules import gates
from primus.gates.rules.coverage import gpu_libraries
from primus.oci.store import Layer
from primus.plan.image import Composed
from primus.plan.workspace import Workspace
from primus.terminal import PLAIN, Screen, Styled

_SIGNS = {"error": Styled("✗", "red"), "warning": Styled("!", "yellow"), "note": Styled("·", "dim")}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The verdict of the gates on one image. ``libraries`` are its GPU libraries, with the targets of their code."""

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
        """Return the outcome as JSON data, for ``--json`` and for evidence."""
        gates = [{**asdict(report), "passed": report.passed} for report in self.reports]
        fields = {"target": self.target, "ref": self.ref, "digest": self.digest, "passed": self.passed}
        return {**fields, "gates": gates, "libraries": list(self.libraries)}


def judge(examined: Examined) -> Outcome:
    """Run every gate on an image."""
    image = examined.image
    return Outcome(
        target=image.plan.resolved.name,
        ref=image.plan.ref,
        digest=image.digest,
        reports=tuple(replace(gate.judge(examined), gate=name) for name, gate in gates().items()),
        libraries=tuple(asdict(library) for library in gpu_libraries(examined)),
    )


def outcome_text(outcome: Outcome, screen: Screen = PLAIN) -> str:
    """Return one line per gate, followed by its findings: ✗ error, ! warning, · note."""
    width = max(len(report.gate) for report in outcome.reports)
    lines = [f"{outcome.ref} {outcome.digest}"]
    for report in outcome.reports:
        # A gate that passed with a warning, such as a key in a published package, must not look like a clean one.
        warned = report.passed and any(finding.severity == "warning" for finding in report.findings)
        sign = screen.paint(_SIGNS["warning"]) if warned else screen.verdict(report.passed)
        head = f"  {sign} {report.gate:<{width}}  "
        lines += screen.wrap(report.summary, head, " " * (width + 6))
        for finding in report.findings:
            inside = finding.layer and finding.path
            place = " ".join(filter(None, (finding.layer, ("/" if inside else "") + finding.path)))
            sign = screen.paint(_SIGNS[finding.severity])
            lines += screen.wrap(f"{place + ': ' if place else ''}{finding.message}", f"      {sign} ", " " * 8)
    return "\n".join(lines)


class Gatekeeper:
    """Decides which images of a build get their name.

    Worker threads examine the layers while the build runs. A release that fails a gate gets no name. A preview gets its
    name, and the build reports the failed gates.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        # The pool starts no thread before the first submission.
        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="gates")
        self._facts: dict[str, Future[LayerFacts]] = {}
        self._stop = Event()

    def look(self, layer: Layer) -> None:
        """Examine the layer in a worker thread. Errors are raised when an image with the layer is judged."""
        if layer.blob.digest not in self._facts:
            self._facts[layer.blob.digest] = self._pool.submit(examine_layer, self._workspace, layer, self._stop)

    def judge(self, image: Composed) -> tuple[str, ...]:
        """Judge an image by the facts about its layers.

        Raises CheckFailed with all findings if a release fails a gate, HostError if a layer is damaged.
        """
        for layer in image.layers:
            self.look(layer)
        facts = {action.name: self._facts[layer.blob.digest].result() for action, layer in image.rows}
        outcome = judge(Examined(image=image, facts=facts, workspace=self._workspace))
        if not outcome.passed and not image.plan.resolved.choice.preview:
            raise CheckFailed(
                f"{image.plan.ref} fails a gate, so there is no such image:\n{outcome_text(outcome)}",
                hint="only an image of a preview channel may fail one",
            )
        return tuple(_sentence(report) for report in outcome.reports if not report.passed)

    def close(self) -> None:
        """Stop all examinations. Called when the build ends or is interrupted."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)


def _sentence(report: GateReport) -> str:
    first, *others = report.errors
    more = f" (and {len(others)} more)" if others else ""
    return f"{report.gate}: {report.summary}; {first.path + ': ' if first.path else ''}{first.message}{more}"
