"""Generate all documents of the repository, or check that they are up to date."""

from __future__ import annotations

import argparse
from pathlib import Path

from primus.cli.arguments import path

EXAMPLE = "primus docs --check"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus docs``."""
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a file is out of date")
    parser.add_argument("--vendored", action="store_true", help="also update files of other projects, through npm")
    parser.add_argument(
        "--project", type=path("--project"), default=Path(), metavar="DIR", help="repository (default: this folder)"
    )
    parser.add_argument("--json", action="store_true", help="print the paths as JSON")
