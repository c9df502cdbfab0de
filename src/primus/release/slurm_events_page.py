"""``docs/benchmarks/slurm-events.md`` and ``fleet.md``: faults in jobs of a real Slurm, in machines and in tunings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from primus.release.markdown import table

_WHAT = {
    "node lost": "The daemon of one of the job's nodes and all its processes are killed. The job must be requeued, "
    "continue from its newest complete checkpoint and reach the last step.",
    "rank killed": "A rank is killed. The job must fail without being requeued and name the rank.",
    "preempted": "Slurm announces the end of the job. It must be requeued, continue and reach the last step.",
    "disk full": "Another file fills the disk with the results. The job must fail and name the disk; after room is "
    "made, a second job must continue and reach the last step.",
    "slow rank": "A rank is stopped several times for up to 1.5 seconds. The job must reach the last step.",
    "hung rank": "A rank is stopped for good. The job must fail without being requeued and name the rank.",
}


def slurm_events_page(result: Mapping[str, Any]) -> str:
    """Return the page. Every figure comes from ``result``. Raises KeyError for another format."""
    rows, lines, wrong = result["rows"], [], []
    for event, what in _WHAT.items():
        mine = [row for row in rows if row["event"] == event]
        if not mine:
            continue
        seconds = [row["seconds"] for row in mine if "seconds" in row]
        taken = f"{statistics.median(seconds):.0f} ({min(seconds):.0f}–{max(seconds):.0f})" if seconds else "–"
        steps = sum(row.get("steps with equal loss", 0) for row in mine)
        lines.append(
            [
                event, what, f"{sum(not row['wrong'] for row in mine)} of {len(mine)}",
                taken, f"{steps:,}" if steps else "–",
                f"{sum(row.get('checkpoints', 0) for row in mine):,}",
            ]
        )  # fmt: skip
        wrong += [f"- {event}, repetition {row['repetition']}: {one}" for row in mine for one in row["wrong"]]
    head = (
        "event", "what is done, and what must follow", "right", "seconds until the end", "steps compared",
        "checkpoints compared",
    )  # fmt: skip
    return "\n".join(
        [
            "<!-- Generated from benchmarks/results/slurm-events.json by `nox -s docs`; do not edit. -->",
            "# Faults in Slurm jobs",
            "",
            f"Recorded on {result['date']} by `{result['command']}` with Slurm {result['slurm']}: one controller and "
            "several nodes, all on one host with two CPU cores. Each job trains a proxy on two nodes with one rank "
            f"each, over gloo, for {result['steps']} steps with a checkpoint every {result['checkpoint_interval']}; "
            "half of the jobs use torchtitan, half the backend `fsdp`. A fault comes at a random moment, while the "
            "ranks start or after a random step. The times are those of a busy host; Slurm's wait of two minutes "
            "before a requeued job starts is skipped.",
            "",
            "Each repetition also requires that every complete checkpoint equals that of an undisturbed job byte for "
            "byte, and that a continued job begins after its newest complete checkpoint and has exactly the losses "
            "of the undisturbed job.",
            "",
            *table(head, lines),
            "",
            *(["What was wrong:", "", *wrong, ""] if wrong else []),
            *(line for note in result.get("notes", ()) for line in (note, "")),
        ]
    )


def fleet_page(result: Mapping[str, Any]) -> str:
    """Return the page about tests of preflight and tuning. Raises KeyError for another format."""
    preflight, tuning = result["rows"]["preflight"], result["rows"]["tuning"]
    lines = [
        [
            "preflight", f"{preflight['faults']} faults, one at a time, in the files of a simulated machine",
            f"{preflight['named']} named with their remedy; the slowest check took "
            f"{preflight['slowest_seconds']:.2f} s",
        ],
        [
            "`tune gemm`", f"{tuning['shapes']:,} GEMMs on {tuning['workers']} workers with a stand-in for "
            f"`hipblaslt-bench`; the command was killed {tuning['kills']} times at random and run again",
            f"{tuning['measured']:,} measured, {tuning['lost']} lost, {tuning['twice']} measured twice",
        ],
    ]  # fmt: skip
    return "\n".join(
        [
            "<!-- Generated from benchmarks/results/fleet.json by `nox -s docs`; do not edit. -->",
            "# Faults in machines and interrupted tunings",
            "",
            f"Recorded on {result['date']} by `{result['command']}`.",
            "",
            *table(("command", "what was done", "result"), lines),
            "",
        ]
    )
