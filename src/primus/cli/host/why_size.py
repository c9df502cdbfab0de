"""Show what makes an image large: unpacked bytes per layer and folder, largest first."""

from __future__ import annotations

import argparse
import json

from primus.cli.arguments import whole
from primus.cli.host.common import add_project_options, add_target, resolved_target
from primus.display import choose_progress
from primus.gates.examined import examine
from primus.gates.size import size_text, size_tree
from primus.plan.layers import plan_image
from primus.terminal import Screen

EXAMPLE = "primus why-size cpu --depth 4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus why-size``."""
    add_target(parser)
    parser.add_argument(
        "--depth", type=whole(least=0), default=2, metavar="N", help="depth of folders to show (default: 2)"
    )
    add_project_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tree of layers and folders by size."""
    resolved, workspace = resolved_target(args)
    with choose_progress(args.json) as progress:
        examined = examine(plan_image(resolved, workspace.stats), workspace, progress)
    layers = [(layer, facts.folders) for layer, facts in examined.facts.items()]
    tree = size_tree(examined.image.plan.ref, layers, args.depth)
    print(json.dumps(tree.as_json()) if args.json else size_text(tree, Screen.of()))
    return 0
