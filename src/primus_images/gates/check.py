"""Run all gates on an image, and decide whether a build may name it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from primus_images.errors import CheckFailed
from primus_images.gates.examined import Examined, Finding, GateReport
from primus_images.gates.rules import gates
from primus_images.gates.rules.coverage import GpuLibrary, gpu_libraries
from primus_images.terminal import PLAIN, Screen, Styled

_SIGNS = {"error": Styled("✗", "red"), "warning": Styled("!", "yellow"), "note": Styled("·", "dim")}
_FINDING_INDENT = " " * 8
_PASSED = Styled("✓", "green")


@dataclass(frozen=True)
class Outcome:
    """The verdict of the gates on one image, and its GPU libraries."""

    target: str
    ref: str
    digest: str
    reports: Sequence[GateReport]
    libraries: Sequence[GpuLibrary] = ()

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
            "gates": [{**asdict(report), "passed": report.passed} for report in self.reports],
            "libraries": [library._asdict() for library in self.libraries],
        }


def judge(examined: Examined) -> Outcome:
    """Run every gate on an image."""
    plan = examined.image.plan
    reports = [replace(gate.judge(examined), gate=name) for name, gate in gates().items()]
    libraries = gpu_libraries(examined)
    return Outcome(plan.resolved.name, plan.ref, examined.image.digest, reports, libraries)


def outcome_text(outcome: Outcome, screen: Screen = PLAIN) -> str:
    """Return one line per gate, followed by its findings: ✗ error, ! warning, · note."""
    width = max(len(report.gate) for report in outcome.reports)
    lines = [f"{outcome.ref} {outcome.digest}"]
    for report in outcome.reports:
        sign = screen.paint(_sign_of(report))
        name = report.gate.ljust(width)
        indent = " " * (width + 6)
        lines += screen.wrap(report.summary, f"  {sign} {name}  ", indent)
        for finding in report.findings:
            sign = screen.paint(_SIGNS[finding.severity])
            sentence = _sentence_of(finding)
            lines += screen.wrap(sentence, f"      {sign} ", _FINDING_INDENT)
    return "\n".join(lines)


def _sign_of(report: GateReport) -> Styled:
    severities = {finding.severity for finding in report.findings}
    # A gate that passed with a warning, such as a key in a published package, must not look like a
    # clean one.
    for severity in ("error", "warning"):
        if severity in severities:
            return _SIGNS[severity]
    return _PASSED


def _sentence_of(finding: Finding) -> str:
    place = finding.layer
    if finding.layer and finding.path:
        place = f"{finding.layer} /{finding.path}"
    elif finding.path:
        place = finding.path
    if place:
        return f"{place}: {finding.message}"
    return finding.message


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
    return tuple(failures(outcome.reports))


def failures(reports: Iterable[GateReport]) -> Iterator[str]:
    """Yield one sentence for each gate that fails."""
    for report in reports:
        if not report.passed:
            yield _summary_of(report)


def _summary_of(report: GateReport) -> str:
    first, *others = report.errors
    message = first.message
    if first.path:
        message = f"{first.path}: {message}"
    if others:
        message += f" (and {len(others)} more)"
    return f"{report.gate}: {report.summary}; {message}"
