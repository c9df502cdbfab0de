"""The result of a validation as text: one cell in full, or a table of several."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from primus_images.terminal import PLAIN

# What the names of gates begin with among the checks of a record.
GATE = "gate "


class Validated(NamedTuple):
    """The evidence of one cell, its folder, and whether it is from an earlier validation."""

    record: dict[str, Any]
    folder: Path
    earlier: bool = False


def table(validated: Sequence[Validated]) -> str:
    """Return one line per cell, and a summary line."""
    rows = []
    for cell in validated:
        record = cell.record
        losses = _losses(record)
        curve = "no loss"
        if losses:
            curve = f"loss {losses[0]:.3f} → {losses[-1]:.3f}"
        failed = [v["name"] for v in record["verdicts"] if not v["passed"] and not v.get("skipped")]
        cause = next((f": {job['cause']}" for job in record["jobs"] if job.get("cause")), "")
        if failed:
            checks = f"✗ {', '.join(failed)}{cause}"
        else:
            checks = f"{len(record['verdicts'])} checks"
        runs = f"{len(record['jobs'])} runs"
        earlier = ""
        if cell.earlier:
            earlier = "  (kept)"
        name = f"{mark(record)} {cell.folder.name}"
        rows.append((name, record["recipe"]["precision"], runs, curve, f"{checks}{earlier}"))
    passed = sum(cell.record["passed"] for cell in validated)
    faults = {v["name"] for cell in validated for v in cell.record["verdicts"] if not v["passed"]}
    # Gates concern the image and fail in every cell, which must not hide that the jobs passed.
    image_only = faults and all(name.startswith(GATE) for name in faults)
    because = ""
    if image_only:
        because = f"; every job passed, but the image fails {', '.join(sorted(faults))}"
    summary = "FAILED"
    if passed == len(validated):
        summary = "passed"
    return "\n".join(
        [*PLAIN.table(rows), f"{summary}: {passed} of {len(validated)} passed{because}"]
    )


def mark(verdict: Mapping[str, Any]) -> str:
    """Return the sign of a verdict, or of a whole record."""
    if verdict["passed"]:
        return "✓"
    return "✗"


def outcome_text(record: dict[str, Any], folder: Path) -> str:
    """Return the verdicts and the loss curve as a few lines."""
    lines = []
    jobs: dict[str, list[str]] = {job["name"]: [] for job in record["jobs"]}
    skipped: dict[str, list[str]] = {}
    causes = []
    for verdict in record["verdicts"]:
        job, colon, name = verdict["name"].partition(": ")
        if verdict.get("skipped"):
            skipped.setdefault(verdict["reason"], []).append(verdict["name"])
        elif verdict["passed"] and colon and job in jobs:
            jobs[job].append(name)
        elif name == "exit code" and not verdict["passed"]:
            causes.append(f"  ✗ {job} failed: {verdict['reason']}")
        else:
            lines.append(f"  {mark(verdict)} {verdict['name']}: {verdict['reason']}")
    # The cause comes first, because all skipped checks follow from it.
    lines = [
        *causes,
        *(f"  ✓ {job}: {', '.join(names)}" for job, names in jobs.items() if names),
        *lines,
    ]
    lines += [f"  – {reason}: {', '.join(names)}" for reason, names in skipped.items()]
    lines += [f"  – not run: {sentence}" for sentence in record.get("not_run", ())]
    losses = _losses(record)
    if losses:
        lines.append(
            f"  loss {losses[0]:.4f} → {losses[-1]:.4f} over {len(losses)} steps  {_spark(losses)}"
        )
    left_out = sum(map(len, skipped.values()))
    passed = sum(verdict["passed"] for verdict in record["verdicts"])
    failed = len(record["verdicts"]) - passed - left_out
    more = ""
    if left_out:
        more = f", {left_out} skipped"
    summary = "FAILED"
    if record["passed"]:
        summary = "passed"
    lines.append(f"{summary}: {passed} checks passed, {failed} failed{more}")
    lines.append(f"  → {os.path.relpath(folder / 'report.html')}")
    return "\n".join(lines)


def _losses(record: dict[str, Any]) -> list[float]:
    """Return the losses of the first job; none if one of them is missing or not finite, which a
    record has as null.
    """
    losses = [row["loss"] for row in record["jobs"][0].get("series", [])]
    if None in losses:
        return []
    return losses


def _spark(values: list[float]) -> str:
    low = min(values)
    high = max(values)
    blocks = "▁▂▃▄▅▆▇█"
    step = max(1, len(values) // 40)
    return "".join(blocks[round((v - low) / (high - low or 1) * 7)] for v in values[::step])
