"""Build images. Rebuilds only what changed; the last line is the manifest digest.

Each image must pass the gates of `primus check` before it is named. An image of a preview channel may fail a gate; the
summary names the gates that failed.
"""

from __future__ import annotations

import argparse

from primus.cli.options.common import add_engine, add_planning_options

EXAMPLE = "primus build cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus build``."""
    add_planning_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop, like `primus plan`")
    parser.add_argument("--rehash", action="store_true", help="verify every blob first and rebuild damaged ones")
    add_engine(parser)
