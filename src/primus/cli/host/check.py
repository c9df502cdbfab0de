"""Run every gate on a built image, using the contents of its layers.

The gates check ROCm versions, GPU code for the target's architecture, kernel files of other GPUs, versions against the
lock, duplicate library names, secrets and unwanted files, and the size budget. Exit code 1 if a gate fails. Layers are
read once; findings are cached until the layer or a rule changes.
"""

from __future__ import annotations

import argparse
import json

from primus.cli.host.common import add_project_options, add_targets, resolved_targets
from primus.gates.check import judge, outcome_text
from primus.gates.examined import examine
from primus.plan.layers import plan_image
from primus.progress import choose_progress
from primus.release.gate_record import gate_record, write_gate_record
from primus.terminal import Screen

EXAMPLE = "primus check cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus check``."""
    add_targets(parser)
    parser.add_argument("--record", action="store_true", help="save the findings for README's table of targets")
    add_project_options(parser)


def run(args: argparse.Namespace) -> int:
    """Check the images and print one line per gate with its findings. Returns 0, or 1 if a gate failed."""
    targets, workspace = resolved_targets(args)
    outcomes = []
    with choose_progress(args.json) as progress:
        for resolved in targets:
            examined = examine(plan_image(resolved, workspace.stats), workspace, progress)
            outcomes.append(judge(examined))
            if args.record:
                path = write_gate_record(resolved.root, gate_record(examined, outcomes[-1]))
                progress.say(f"→ {path.name}")
    passed = all(outcome.passed for outcome in outcomes)
    if args.json:
        print(json.dumps({"images": [outcome.as_json() for outcome in outcomes], "passed": passed}))
    else:
        screen = Screen.of()
        print("\n\n".join(outcome_text(outcome, screen) for outcome in outcomes))
    return 0 if passed else 1
