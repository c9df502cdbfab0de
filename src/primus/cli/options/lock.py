"""Resolve versions.yaml to exact files (name, version, file name, size, sha256): one lock per target and channel.

Unchanged pins and their dependencies keep their locked versions. --refresh takes the newest versions that match.
--report FILE records every request and its answer, without logins, also when the lock fails.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from primus.cli.options.common import add_project_options, add_targets

EXAMPLE = "primus lock cpu --check"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus lock``."""
    add_targets(parser, required=False)
    add_project_options(parser)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with code 1 if a lock is stale")
    parser.add_argument("--refresh", action="store_true", help="take the newest versions that match the pins")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write every request to a source, and its answer, to FILE"
    )
