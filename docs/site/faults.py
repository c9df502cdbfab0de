"""The page of silent faults: each fault injected into a run, and the checks that named it."""

import json
from collections import Counter
from pathlib import Path

from primus_images.release.diff import table


def faults(root: Path) -> str:
    """Return the page, from the record of benchmarks/results."""
    record = json.loads((root / "benchmarks/results/silent-faults.json").read_text("utf-8"))
    every = record["faults"]
    script, comma, place = record["command"].partition(",")
    escaped = [one for one in every if not one["named_by"]]
    classes = []
    for kind in sorted({one["kind"] for one in every}):
        mine = [one for one in every if one["kind"] == kind]
        named = Counter(check for one in mine for check in one["named_by"])
        checks = ", ".join(f"{check} ({count})" for check, count in named.most_common(4))
        classes.append((kind, len(mine), sum(bool(one["named_by"]) for one in mine), checks))
    rows = [
        (one["kind"], one["fault"], one["backend"], ", ".join(one["named_by"]) or "**escaped**")
        for one in every
    ]
    return "\n".join(
        [
            "# Silent faults",
            "",
            f"Each of {len(every)} faults was injected into a run of two ranks on a CPU, by "
            f"`{script}`{comma}{place}, "
            f"on {record['date']}. At least one check named {len(every) - len(escaped)} of them; "
            f"{len(escaped)} escaped. The record has the "
            "[notes](../../benchmarks/results/silent-faults.json) on runs "
            "that were repeated. [Validation](../validation.md#the-reference) explains the checks.",
            "",
            "## Classes",
            "",
            *table(
                ("class", "faults", "named", "checks that failed most often (in how many runs)"),
                classes,
            ),
            "",
            "## Every fault",
            "",
            *table(("class", "fault", "backend", "checks that failed"), rows),
            "",
        ]
    )
