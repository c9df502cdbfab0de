"""Show what a build would do, layer by layer: + build, = reuse."""

from __future__ import annotations

import argparse

from primus.cli.host.common import add_planning_options, open_project, targets_of

EXAMPLE = "primus plan cpu"

__all__ = ["EXAMPLE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus plan``."""
    add_planning_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan; nothing is fetched or built."""
    from primus.images.builder import plan_images
    from primus.images.outline import outline, outline_text

    project = open_project(args)
    plans = plan_images(project, targets_of(project, args), locked=args.locked, offline=args.offline, quiet=args.json)
    lines = [(plan, outline(project.store, plan)) for plan in plans]
    project.stats.save()
    if args.json:
        import json

        print(json.dumps([{"target": p.target, "ref": p.ref, "key": p.key, "layers": rows} for p, rows in lines]))
    else:
        print("\n\n".join(outline_text(plan, rows) for plan, rows in lines))
    return 0
