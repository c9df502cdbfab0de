"""Run every gate on a built image, using the contents of its layers.

The gates check ROCm versions, GPU code for the target's architecture, kernel files of other GPUs, versions against the
lock, duplicate library names, secrets and unwanted files, the size budget, and kernels compiled ahead of time. Exit
code 1 if a gate fails. Layers are read once; findings are cached until the layer or a rule changes.
"""

from __future__ import annotations

import argparse

from primus.cli.host.common import add_project_options, add_targets, open_project, targets_of

EXAMPLE = "primus check cpu"

__all__ = ["EXAMPLE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus check``."""
    add_targets(parser)
    parser.add_argument("--record", action="store_true", help="save the findings for docs/gates.md")
    add_project_options(parser)


def run(args: argparse.Namespace) -> int:
    """Check the images, print one line per gate and its findings."""
    import json

    from primus.gates.check import examine, judge, outcome_text
    from primus.images.display import choose_progress
    from primus.release.gate_record import gate_record, write_gate_record

    project = open_project(args)
    outcomes = []
    with choose_progress(args.json) as progress:
        for name in targets_of(project, args):
            examined = examine(project, name, progress)
            outcomes.append(judge(project, examined))
            if args.record:
                progress.say(f"→ {write_gate_record(project, gate_record(project, examined, outcomes[-1])).name}")
    passed = all(outcome.passed for outcome in outcomes)
    if args.json:
        print(json.dumps({"images": [outcome.as_json() for outcome in outcomes], "passed": passed}))
    else:
        from primus.terminal import Screen

        screen = Screen.of()
        print("\n\n".join(outcome_text(outcome, screen) for outcome in outcomes))
    return 0 if passed else 1
