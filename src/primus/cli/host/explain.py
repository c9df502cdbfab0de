"""Show the inputs that changed since the last build, old → new, with their lines.

Exit code 0 if there is nothing to do, 1 if a build would do something.
"""

from __future__ import annotations

import argparse

from primus.cli.host.common import add_planning_options, open_project, targets_of

EXAMPLE = "primus explain cpu"

__all__ = ["EXAMPLE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus explain``."""
    add_planning_options(parser)


def run(args: argparse.Namespace) -> int:
    """Compare the plan with what was built last."""
    from primus.images.builder import plan_images
    from primus.images.explain import changes, explain_text

    project = open_project(args)
    names = targets_of(project, args)
    plans = plan_images(project, names, locked=args.locked, offline=args.offline, quiet=args.json)
    found = {plan.target: changes(project.store.record("targets", plan.state), plan) for plan in plans}
    project.stats.save()
    if args.json:
        import json
        from dataclasses import asdict

        print(json.dumps({target: [asdict(c) for c in several] for target, several in found.items()}))
    else:
        from primus.terminal import Screen

        screen = Screen.of()
        print("\n".join(explain_text(plan, found[plan.target], project.store, screen) for plan in plans))
    return 1 if any(found.values()) else 0
