"""What a gate says: findings, and one report per gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence about one thing. An ``error`` fails the gate; ``layer`` and ``path`` are empty where none is meant.

    ``path`` is a path in the image without leading slash, or ``file:line:col`` of the project for gates that judge
    the pins.
    """

    gate: str
    severity: Severity
    message: str
    layer: str = ""
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """One gate's outcome; ``summary`` says in a few words what was looked at, so that silence is no pass."""

    gate: str
    summary: str
    findings: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no finding is an error."""
        return not any(f.severity == "error" for f in self.findings)

    def count(self, severity: Severity) -> int:
        """How many findings have this severity."""
        return sum(f.severity == severity for f in self.findings)
