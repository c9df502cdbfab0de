"""Generate all documents of the repository, or check that they are up to date."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from primus.cli.arguments import path
from primus.errors import InputError
from primus.release import docs

EXAMPLE = "primus docs --check"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus docs``."""
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a file is out of date")
    parser.add_argument(
        "--project", type=path("--project"), default=Path(), metavar="DIR", help="repository (default: this folder)"
    )
    parser.add_argument("--json", action="store_true", help="print the paths as JSON")


def run(args: argparse.Namespace) -> int:
    """Write or check the generated files. Returns 0, or 1 if --check found one out of date."""
    if not (args.project / "versions.yaml").is_file():
        raise InputError(f"there is no versions.yaml in {args.project}")
    names = tuple(docs.stale(args.project)) if args.check else docs.write(args.project)
    if args.json:
        print(json.dumps({"stale" if args.check else "written": names}))
    else:
        for name in names:
            print(f"{'out of date' if args.check else 'written'}: {name}")
        if not names:
            print("every generated file is up to date")
    if args.check and names:
        print("  → nox -s docs updates them", file=sys.stderr)
        return 1
    return 0
