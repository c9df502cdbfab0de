"""docs/benchmarks/faults.md: which check caught which fault, from a recorded test session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["faults_page"]

_SOURCE = "benchmarks/results/faults.json"
_SILENT = "benchmarks/results/silent-faults.json"


def faults_page(result: Mapping[str, Any]) -> str:
    """The page about one session; every figure in it stands in the result. KeyError when it is no such record."""
    rows = result["faults"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result["versions"].items()))
    if "named_by" in rows[0]:
        return _silent_page(result, rows, versions)
    kinds = list(dict.fromkeys(row["fault"] for row in rows))
    return "\n".join(
        [
            f"<!-- Generated from {_SOURCE} by `nox -s docs`; do not edit. -->",
            "# Seeded faults",
            "",
            f"Recorded on {result['date']} by `{result['command']}`. {len(kinds)} kinds of faults, {len(rows)} cases: "
            "each was put into a real run (a renamed key and a GPU without a known peak need none) and caught by the "
            "check meant for it. No other check failed in that run. The same job without the fault passes.",
            "",
            f"- Python {result['python']}; in the runs: {versions}",
            "- Two ranks on a CPU. What a GPU alone can do wrong is not among them.",
            "",
            "| fault | backend | check that caught it | measured | limit | what it said |",
            "|---|---|---|---|---|---|",
            *(_row(row) for kind in kinds for row in rows if row["fault"] == kind),
            "",
        ]
    )


def _silent_page(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], versions: str) -> str:
    named = sum(bool(row["named_by"]) for row in rows)
    return "\n".join(
        [
            f"<!-- Generated from {_SILENT} by `nox -s docs`; do not edit. -->",
            "# Silent faults",
            "",
            f"Recorded on {result['date']} by `{result['command']}`. Each of {len(rows)} faults was put into a real "
            f"run of two ranks on a CPU; {named} were named by at least one check. None ends the run. "
            "What decides each class of fault: [validation](../validation.md#the-reference).",
            "",
            f"- In the runs: {versions}",
            "",
            "| class | fault | backend | checks that failed |",
            "|---|---|---|---|",
            *(
                f"| {row['kind']} | {row['fault']} | {row['backend']} | {', '.join(row['named_by']) or 'none'} |"
                for row in sorted(rows, key=lambda row: str(row["kind"]))
            ),
            "",
        ]
    )


def _row(row: Mapping[str, str]) -> str:
    cells = (row[key] for key in ("fault", "backend", "check", "measured", "limit", "reason"))
    # A sentence and its hint stand on two lines; a row is one.
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
