"""Show what a build would do, layer by layer: + build, = reuse.

For each layer to build, the plan gives the reason: what changed since the last build. For several targets, it only
counts the layers to reuse, and shows how many bytes each image shares with the others. --full lists every layer and the
images that contain it.
"""

from __future__ import annotations

import argparse

from primus.cli.host.common import add_planning_options, open_project, targets_of

EXAMPLE = "primus plan cpu"

__all__ = ["EXAMPLE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus plan``."""
    add_planning_options(parser)
    parser.add_argument("--full", action="store_true", help="list every layer, also for several targets")


def run(args: argparse.Namespace) -> int:
    """Print the plan; nothing is fetched or built."""
    from primus.images.builder import plan_images
    from primus.images.explain import changes
    from primus.images.outline import outline, outline_text
    from primus.images.sharing import sharing_json, sharing_of, sharing_text
    from primus.terminal import Screen

    project = open_project(args)
    plans = plan_images(project, targets_of(project, args), locked=args.locked, offline=args.offline, quiet=args.json)
    images = sharing_of(project.store, plans) if len(plans) > 1 else []
    lines = [(plan, outline(project.store, plan)) for plan in plans]
    project.stats.save()
    if args.json:
        import json

        shares = sharing_json(images)
        print(
            json.dumps(
                [
                    {"target": p.target, "ref": p.ref, "key": p.key, "layers": rows, **shares.get(p.target, {})}
                    for p, rows in lines
                ]
            )
        )
    else:
        screen = Screen.of()
        full = len(plans) == 1 or getattr(args, "full", False)
        texts = []
        for plan, rows in lines:
            state = project.store.record("targets", plan.state)
            texts.append(outline_text(plan, rows, changes(state, plan) if state else None, screen, full=full))
        print(("\n\n" if full else "\n").join(texts))
        if images:
            print("\n" + sharing_text(images, screen, full=full))
    return 0
