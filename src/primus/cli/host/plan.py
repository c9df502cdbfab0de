"""Show what a build would do, layer by layer: + build, = reuse.

For several targets also which layers they share: = shared, + of one image alone, with the bytes of both per target and
the share of every two images. What is not built has unknown bytes.
"""

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
    from primus.images.sharing import sharing_json, sharing_of, sharing_text

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
        texts = [outline_text(plan, rows) for plan, rows in lines]
        print("\n\n".join([*texts, *([sharing_text(images)] if images else [])]))
    return 0
