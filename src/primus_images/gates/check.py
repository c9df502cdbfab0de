"""Run all gates on an image, and decide whether a build may name it."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from primus_images.errors import CheckFailed
from primus_images.gates.examined import Examined, GateReport
from primus_images.gates.rules import gates
from primus_images.gates.rules.coverage import gpu_libraries
from primus_images.terminal import PLAIN, Screen, Styled

_SIGNS = {"error": Styled("✗", "red"), "warning": Styled("!", "yellow"), "note": Styled("·", "dim")}
_PASSED = Styled("✓", "green")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The verdict of the gates on one image. ``libraries`` are its GPU libraries, with the targets
    of their code.
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
        gates = [{**asdict(report), "passed": report.passed} for report in self.reports]
        fields = {
            "target": self.target,
            "ref": self.ref,
            "digest": self.digest,
            "passed": self.passed,
        }
        return {**fields, "gates": gates, "libraries": list(self.libraries)}


def judge(examined: Examined) -> Outcome:
    """Run every gate on an image."""
    image = examined.image
    return Outcome(
        target=image.plan.resolved.name,
        ref=image.plan.ref,
        digest=image.digest,
        reports=tuple(replace(gate.judge(examined), gate=name) for name, gate in gates().items()),
        libraries=tuple(library._asdict() for library in gpu_libraries(examined)),
    )


def outcome_text(outcome: Outcome, screen: Screen = PLAIN) -> str:
    """Return one line per gate, followed by its findings: ✗ error, ! warning, · note."""
    width = max(len(report.gate) for report in outcome.reports)
    lines = [f"{outcome.ref} {outcome.digest}"]
    for report in outcome.reports:
        # A gate that passed with a warning, such as a key in a published package, must not look
        # like a clean one.
        warned = report.passed and any(finding.severity == "warning" for finding in report.findings)
        sign = screen.paint(
            _SIGNS["warning"] if warned else _PASSED if report.passed else _SIGNS["error"]
        )
        lines += screen.wrap(
            report.summary, f"  {sign} {report.gate:<{width}}  ", " " * (width + 6)
        )
        for finding in report.findings:
            inside = finding.layer and finding.path
            place = " ".join(filter(None, (finding.layer, ("/" if inside else "") + finding.path)))
            sign = screen.paint(_SIGNS[finding.severity])
            lines += screen.wrap(
                f"{place + ': ' if place else ''}{finding.message}", f"      {sign} ", " " * 8
            )
    return "\n".join(lines)


def admit(examined: Examined) -> tuple[str, ...]:
    """Return one sentence for each gate that a preview fails; the build reports them.

    Raises CheckFailed with all findings if a release fails a gate. It then gets no name.
    """
    outcome = judge(examined)
    plan = examined.image.plan
    if not outcome.passed and not plan.resolved.choice.preview:
        raise CheckFailed(
            f"{plan.ref} fails a gate, so there is no such image:\n{outcome_text(outcome)}",
            hint="only an image of a preview channel may fail one",
        )
    return tuple(_sentence(report) for report in outcome.reports if not report.passed)


def _sentence(report: GateReport) -> str:
    first, *others = report.errors
    more = ""
    if others:
        more = f" (and {len(others)} more)"
    return (
        f"{report.gate}: {report.summary}; "
        f"{first.path + ': ' if first.path else ''}{first.message}{more}"
    )
