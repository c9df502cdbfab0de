"""The result of a gate: findings, and one report per gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    def passed(self) -> bool:
        """Whether no finding is an error."""
        return not any(f.severity == "error" for f in self.findings)
