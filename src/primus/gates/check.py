"""Run all gates on one built image."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from primus.gates.examined import Examined, examine
from primus.gates.finding import GateReport
from primus.gates.rules import gates
from primus.gates.rules.coverage import gpu_libraries
from primus.terminal import PLAIN, Screen, Styled

if TYPE_CHECKING:
    from primus.plan.action import ImagePlan
    from primus.plan.workspace import Workspace
    from primus.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The verdict of the gates on one image. ``libraries`` are its GPU libraries, each with the targets it has code
    for.
    """

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
                    "findings": [asdict(finding) for finding in report.findings],
                }
                for report in self.reports
            ],
            "libraries": list(self.libraries),
        }


def check_image(plan: ImagePlan, workspace: Workspace, progress: Progress) -> Outcome:
    """Run every gate on the built image; see :func:`primus.gates.examined.examine` for the exceptions."""
    return judge(examine(plan, workspace, progress))


def judge(examined: Examined) -> Outcome:
    """Run every gate on an image."""
    image = examined.image
    found = ((name, gate.judge(examined)) for name, gate in gates().items())
    return Outcome(
        target=image.plan.resolved.name,
        ref=image.plan.ref,
        digest=image.digest,
        reports=tuple(replace(report, gate=name) for name, report in found if report is not None),
        libraries=tuple(asdict(library) for library in gpu_libraries(examined.code, examined.arch)),
    )


_SIGNS = {"error": Styled("✗", "red"), "warning": Styled("!", "yellow"), "note": Styled("·", "dim")}


def outcome_text(outcome: Outcome, screen: Screen = PLAIN) -> str:
    """Return one line per gate, followed by its findings: ✗ error, ! warning, · note."""
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
