"""Show what a build would do, layer by layer: + build, = reuse.

For each layer to build, the plan gives the reason: what changed since the last build. For several targets, it only
counts the layers to reuse, and shows how many bytes each image shares with the others. --full lists every layer and the
images that contain it.
"""

from __future__ import annotations

import argparse

from primus.cli.options.common import add_planning_options

EXAMPLE = "primus plan cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus plan``."""
    add_planning_options(parser)
    parser.add_argument("--full", action="store_true", help="list every layer, also for several targets")
