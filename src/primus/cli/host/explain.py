"""Show the inputs that changed since the last build, old → new, with their lines.

Exit code 0 if there is nothing to do, 1 if a build would do something.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from primus.cli.host.common import add_project_options, add_targets, resolved_targets
from primus.plan.explain import changes, explain_text
from primus.plan.layers import plan_images
from primus.terminal import Screen

EXAMPLE = "primus explain cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus explain``."""
    add_targets(parser)
    add_project_options(parser)


def run(args: argparse.Namespace) -> int:
    """Compare the plan with the last build. Returns 1 if something would be built."""
    targets, workspace = resolved_targets(args)
    plans = plan_images(targets, workspace.stats)
    changed = {plan.target: changes(workspace.store.record("targets", plan.state), plan) for plan in plans}
    workspace.stats.save()
    if args.json:
        print(json.dumps({target: [asdict(c) for c in rows] for target, rows in changed.items()}))
    else:
        screen = Screen.of()
        print("\n".join(explain_text(plan, changed[plan.target], workspace.store, screen) for plan in plans))
    return 1 if any(changed.values()) else 0
