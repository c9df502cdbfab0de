"""``primus build``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from primus.cli.host.common import open_project, targets_of
from primus.cli.host.plan import print_plans
from primus.engine.image import Built, Options, current
from primus.engine.note import remember
from primus.engine.summary import full_name, say_channel, summarize
from primus.errors import PrimusError
from primus.gates.rules import rules
from primus.plan.action import ImagePlan
from primus.plan.locking import plan_images
from primus.plan.resolve import resolve_all
from primus.plan.workspace import Workspace


def run(args: argparse.Namespace) -> int:
    """Build what is missing; print a table and the digests."""
    begin, began_ns = time.monotonic(), time.time_ns()
    project = open_project(args)
    workspace, names = project.workspace, targets_of(project, args)
    workspace.stats.trusted = not args.rehash
    try:
        targets = resolve_all(project, names)
        plans = plan_images(targets, workspace.stats, locked=args.locked, offline=args.offline, quiet=args.json)
    except PrimusError:
        # Which lock is stale depends on the channel.
        for name in names:
            say_channel(name, project.choice(name), len(project.target(name).channels))
        raise
    if args.dry_run:
        workspace.stats.save()
        print_plans(plans, workspace.store, as_json=args.json)
        return 0
    options = Options(locked=args.locked, offline=args.offline, rehash=args.rehash, engine=args.engine, quiet=args.json)
    built = build_plans(plans, workspace, options)
    seconds = time.monotonic() - begin
    if args.json:
        print(json.dumps({"images": [asdict(b) for b in built], "seconds": round(seconds, 3)}))
    else:
        # While no input changes, the next build only reads this note.
        for plan, image in zip(plans, built, strict=True):
            remember(workspace, plan, image, full_name(image), began_ns)
        summarize([(image, plan.resolved.choice) for plan, image in zip(plans, built, strict=True)], seconds)
    return 0


def build_plans(plans: Sequence[ImagePlan], workspace: Workspace, options: Options) -> list[Built]:
    """Build the plans, run all gates and return the images. Prints the channel of each image to standard error."""
    done = [] if options.rehash else [current(workspace.store, plan, rules()) for plan in plans]
    built = [image for image in done if image is not None]
    if len(built) < len(plans):
        # Seam "work": importing the code that fetches, builds and checks takes 300 ms. A no-op build does not need it.
        from primus.gates.admit import build_gated

        for plan in plans:
            say_channel(plan.target, plan.resolved.choice, len(plan.resolved.target.channels))
        built = build_gated(plans, workspace, options)
    workspace.stats.save()
    return built
