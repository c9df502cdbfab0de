"""``primus check``."""

from __future__ import annotations

import argparse
import json

from primus.cli.host.common import resolved_targets
from primus.display import choose_progress
from primus.gates.check import judge, outcome_text
from primus.gates.examined import examine
from primus.plan.layers import plan_image
from primus.release.gate_record import gate_record, write_gate_record
from primus.terminal import Screen


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
