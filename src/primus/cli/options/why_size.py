"""Show what makes an image large: unpacked bytes per layer and folder, largest first."""

from __future__ import annotations

import argparse

from primus.cli.arguments import whole
from primus.cli.options.common import add_project_options, add_target

EXAMPLE = "primus why-size cpu --depth 4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus why-size``."""
    add_target(parser)
    parser.add_argument(
        "--depth", type=whole(least=0), default=2, metavar="N", help="depth of folders to show (default: 2)"
    )
    add_project_options(parser)
