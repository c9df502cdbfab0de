"""``primus docs``."""

from __future__ import annotations

import argparse
import json
import sys

from primus.errors import InputError
from primus.release import docs


def run(args: argparse.Namespace) -> int:
    """Write or check the generated files. Returns 0, or 1 if --check found one out of date."""
    if not (args.project / "versions.yaml").is_file():
        raise InputError(f"there is no versions.yaml in {args.project}")
    if args.vendored:
        docs.refresh_vendored(args.project)
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
