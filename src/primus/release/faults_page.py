"""The pages docs/benchmarks/*faults.md: which check caught which fault, from a recorded test session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from primus.release.markdown import table

_SOURCE = "benchmarks/results/faults.json"
_SILENT = "benchmarks/results/silent-faults.json"


def faults_page(result: Mapping[str, Any]) -> str:
    """Return the page about one session; every figure comes from ``result``. Raises KeyError for another format."""
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
            "each was injected into a real run (a renamed key and a GPU without a known peak need no run) and caught "
            "by the check meant for it. No other check failed in that run. The same job without the fault passes.",
            "",
            f"- Python {result['python']}; in the runs: {versions}",
            "- Two ranks on a CPU. Faults that can occur only on a GPU are not included.",
            "",
            *table(
                ("fault", "backend", "check that caught it", "measured", "limit", "message"),
                [_row(row) for kind in kinds for row in rows if row["fault"] == kind],
            ),
            "",
        ]
    )


def input_faults_page(result: Mapping[str, Any]) -> str:
    """Return the page about faults of stores and inputs. Every figure comes from ``result``."""
    rows = [[kind, str(number)] for kind, number in result["kinds"].items()]
    wrong = [f"- {name}: {said}" for name, said in result["wrong"].items()]
    return "\n".join(
        [
            "<!-- Generated from benchmarks/results/input-faults.json by `nox -s docs`; do not edit. -->",
            "# Faults of stores and inputs",
            "",
            f"Recorded on {result['date']} by `{result['command']}`. Each of {result['faults']} faults was injected "
            "into a copy of a built project. The engine must repair it, or end with exit code 1, 2 or 3 and one "
            "sentence. It must never crash, hang or build a different image. Afterwards, `primus build --rehash` on "
            "the clean project must give the original image, with every blob of the store intact.",
            "",
            f"{len(wrong)} answers were wrong. The slowest answer took {result['slowest answer in seconds']:g} s.",
            *wrong,
            "",
            *table(("kind", "faults"), rows),
            "",
        ]
    )


def _silent_page(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], versions: str) -> str:
    named = sum(bool(row["named_by"]) for row in rows)
    left = result.get("not_run", ())
    kinds: dict[str, Counter[str]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], Counter()).update(row["named_by"])
    classes = [
        [kind, str(sum(row["kind"] == kind for row in rows)), ", ".join(f"{n} ({c})" for n, c in checks.most_common(4))]
        for kind, checks in sorted(kinds.items())
    ]
    return "\n".join(
        [
            f"<!-- Generated from {_SILENT} by `nox -s docs`; do not edit. -->",
            "# Silent faults",
            "",
            f"Recorded on {result['date']} by `{result['command']}`. Each of {len(rows)} faults was injected into a "
            f"real run of two ranks on a CPU; at least one check named {named} of them. No run failed by itself. "
            "[Validation](../validation.md#the-reference) explains how each class of faults is detected.",
            *(f"\n{sentence}" for sentence in result.get("notes", ())),
            "",
            f"- In the runs: {versions}",
            *([f"- {len(left)} further faults of the suite were not run for this record."] if left else []),
            "",
            *table(("class", "faults", "checks that failed most often (in how many runs)"), classes),
            "",
            *table(
                ("class", "fault", "backend", "checks that failed"),
                [
                    (row["kind"], row["fault"], row["backend"], ", ".join(row["named_by"]) or "none")
                    for row in sorted(rows, key=lambda row: str(row["kind"]))
                ],
            ),
            "",
        ]
    )


def _row(row: Mapping[str, str]) -> list[str]:
    # A message and its hint are two lines; a table row is one.
    return [" ".join(row[key].split()) for key in ("fault", "backend", "check", "measured", "limit", "reason")]
