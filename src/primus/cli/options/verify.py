"""Rebuild into an empty store from the same downloaded files; compare the digests and run every gate.

If the digests differ, the first differing layer and file are named, and the exit code is 1. The gates are those of
`primus check`.
"""

from __future__ import annotations

import argparse

from primus.cli.options.common import add_project_options, add_targets

EXAMPLE = "primus verify cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus verify``."""
    add_targets(parser)
    add_project_options(parser)
    parser.add_argument("--keep", action="store_true", help="keep the second store if it differs")
