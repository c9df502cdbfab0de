"""Show what a build would do, layer by layer: + build, = reuse.

For each layer to build, the plan gives the reason: what changed since the last build. For several targets, it only
counts the layers to reuse, and shows how many bytes each image shares with the others. --full lists every layer.
"""

from __future__ import annotations

import argparse

from primus.cli.host.common import add_project_options, add_targets, print_plans, resolved_targets
from primus.plan.layers import plan_images

EXAMPLE = "primus plan cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus plan``."""
    add_targets(parser)
    add_project_options(parser)
    parser.add_argument("--full", action="store_true", help="list every layer, also for several targets")


def run(args: argparse.Namespace) -> int:
    """Print the plan; nothing is fetched or built."""
    targets, workspace = resolved_targets(args)
    plans = plan_images(targets, workspace.stats)
    workspace.stats.save()
    print_plans(plans, workspace.store, as_json=args.json, full=args.full)
    return 0
