"""The result of a validation as text: one cell in full, or a table of several."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from primus_images.terminal import PLAIN
from primus_images.training.judge.record import Record

# What the names of gates begin with among the checks of a record.
GATE = "gate "
_BLOCKS = "▁▂▃▄▅▆▇█"


class Validated(NamedTuple):
    """The evidence of one cell, its folder, and whether it is from an earlier validation."""

    record: Record
    folder: Path
    earlier: bool = False


def table(validated: Sequence[Validated]) -> str:
    """Return one line per cell, and a summary line."""
    rows = [_row(cell) for cell in validated]
    passed = sum(cell.record.passed for cell in validated)
    faults = sorted({verdict.name for cell in validated for verdict in cell.record.failed})
    summary = "passed" if passed == len(validated) else "FAILED"
    summary += f": {passed} of {len(validated)} passed"
    # Gates concern the image and fail in every cell, which must not hide that the jobs passed.
    if faults and all(name.startswith(GATE) for name in faults):
        summary += f"; every job passed, but the image fails {', '.join(faults)}"
    return "\n".join([*PLAIN.table(rows), summary])


def _row(cell: Validated) -> tuple[str, ...]:
    record = cell.record
    losses = _losses(record)
    curve = "no loss"
    if losses:
        curve = f"loss {losses[0]:.3f} → {losses[-1]:.3f}"
    checks = f"{len(record.verdicts)} checks"
    failed = [verdict.name for verdict in record.failed if not verdict.skipped]
    if failed:
        causes = [job.cause for job in record.jobs if job.cause]
        checks = f"✗ {', '.join(failed)}"
        if causes:
            checks += f": {causes[0]}"
    if cell.earlier:
        checks += "  (kept)"
    name = f"{mark(record.passed)} {cell.folder.name}"
    return (name, record.recipe.precision, f"{len(record.jobs)} runs", curve, checks)


def mark(passed: bool) -> str:
    """Return the sign of a verdict, or of a whole record."""
    return "✓" if passed else "✗"


def outcome_text(record: Record, folder: Path) -> str:
    """Return the verdicts and the loss curve as a few lines."""
    lines = [*_verdict_lines(record)]
    lines += [f"  – not run: {sentence}" for sentence in record.not_run]
    losses = _losses(record)
    if losses:
        curve = f"loss {losses[0]:.4f} → {losses[-1]:.4f} over {len(losses)} steps"
        lines.append(f"  {curve}  {_spark(losses)}")
    skipped = sum(verdict.skipped for verdict in record.verdicts)
    passed = len(record.verdicts) - len(record.failed)
    summary = "passed" if record.passed else "FAILED"
    summary += f": {passed} checks passed, {len(record.failed) - skipped} failed"
    if skipped:
        summary += f", {skipped} skipped"
    return "\n".join([*lines, summary, f"  → {os.path.relpath(folder / 'report.html')}"])


def _verdict_lines(record: Record) -> list[str]:
    """Return the verdicts: causes of failure, what passed by job, the rest, and what was skipped.

    The causes come first, because all skipped checks follow from them.
    """
    causes = []
    by_job: dict[str, list[str]] = {job.name: [] for job in record.jobs}
    others = []
    skipped: dict[str, list[str]] = {}
    for verdict in record.verdicts:
        job, _, check = verdict.name.partition(": ")
        if verdict.skipped:
            skipped.setdefault(verdict.reason, []).append(verdict.name)
        elif verdict.passed and check and job in by_job:
            by_job[job].append(check)
        elif check == "exit code" and not verdict.passed:
            causes.append(f"  ✗ {job} failed: {verdict.reason}")
        else:
            others.append(f"  {mark(verdict.passed)} {verdict.name}: {verdict.reason}")
    passed = [f"  ✓ {job}: {', '.join(checks)}" for job, checks in by_job.items() if checks]
    left_out = [f"  – {reason}: {', '.join(names)}" for reason, names in skipped.items()]
    return [*causes, *passed, *others, *left_out]


def _losses(record: Record) -> list[float]:
    """Return the losses of the first job; none if one is missing or not finite (null)."""
    losses = [step["loss"] for step in record.jobs[0].steps]
    return [] if None in losses else losses


def _spark(values: list[float]) -> str:
    low = min(values)
    span = max(values) - low or 1
    step = max(1, len(values) // 40)
    heights = [round((value - low) / span * (len(_BLOCKS) - 1)) for value in values[::step]]
    return "".join(_BLOCKS[height] for height in heights)
