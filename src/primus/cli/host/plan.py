"""Show what a build would do, layer by layer: + build, = reuse.

For each layer to build, the plan gives the reason: what changed since the last build. For several targets, it only
counts the layers to reuse, and shows how many bytes each image shares with the others. --full lists every layer and the
images that contain it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from primus.cli.host.common import add_planning_options, resolved_targets
from primus.oci.store import Store
from primus.plan.action import ImagePlan
from primus.plan.explain import changes, outline, outline_text
from primus.plan.locking import plan_images
from primus.plan.sharing import images_of, sharing, sharing_text
from primus.terminal import Screen

EXAMPLE = "primus plan cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus plan``."""
    add_planning_options(parser)
    parser.add_argument("--full", action="store_true", help="list every layer, also for several targets")


def run(args: argparse.Namespace) -> int:
    """Print the plan; nothing is fetched or built."""
    targets, workspace = resolved_targets(args)
    plans = plan_images(targets, workspace.stats, locked=args.locked, offline=args.offline, quiet=args.json)
    workspace.stats.save()
    print_plans(plans, workspace.store, as_json=args.json, full=args.full)
    return 0


def print_plans(plans: Sequence[ImagePlan], store: Store, *, as_json: bool, full: bool = False) -> None:
    """Print what building ``plans`` into ``store`` would do; a single plan is always shown in full."""
    images = images_of(store, plans) if len(plans) > 1 else {}
    lines = [(plan, outline(store, plan)) for plan in plans]
    if as_json:
        shares = {target: {"sharing": row} for target, row in sharing(images).items()}
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
        full = full or len(plans) == 1
        texts = []
        for plan, rows in lines:
            state = store.record("targets", plan.state)
            texts.append(outline_text(plan, rows, changes(state, plan) if state else None, screen, full=full))
        print(("\n\n" if full else "\n").join(texts))
        if images:
            print("\n" + sharing_text(images, screen, full=full))
