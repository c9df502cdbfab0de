"""Show the inputs that changed since the last build, old → new, with their lines.

Exit code 0 if there is nothing to do, 1 if a build would do something.
"""

from __future__ import annotations

import argparse

from primus.cli.options.common import add_planning_options

EXAMPLE = "primus explain cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus explain``."""
    add_planning_options(parser)
