"""Rebuild into an empty store from the same downloaded files; compare the digests and run every gate.

If the digests differ, the first differing layer and file are named, and the exit code is 1. The gates are those of
`primus check`.
"""

from __future__ import annotations

import argparse
import sys

from primus.cli.host.common import add_project_options, add_targets, open_project, targets_of

EXAMPLE = "primus verify cpu"

__all__ = ["EXAMPLE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus verify``."""
    add_targets(parser)
    add_project_options(parser)
    parser.add_argument("--keep", action="store_true", help="keep the second store if it differs")


def run(args: argparse.Namespace) -> int:
    """Build twice, compare."""
    import json
    import shutil
    import tempfile
    from pathlib import Path

    from primus.gates.admit import Gatekeeper
    from primus.gates.check import check_image, outcome_text
    from primus.images.builder import build_images, plan_images
    from primus.images.compare import first_difference
    from primus.images.display import choose_progress
    from primus.images.project import Project
    from primus.terminal import Screen

    project = open_project(args)
    names = targets_of(project, args)
    plans = plan_images(project, names, locked=True, quiet=args.json)
    first = build_images(project, plans, gates=Gatekeeper, locked=True, rehash=True, quiet=args.json)
    project.work.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="verify-", dir=project.work))
    failed: dict[str, str] = {}
    try:
        twin = Project(project.root, store=scratch / "store", channel=args.channel)
        again = plan_images(twin, names, locked=True)
        second = build_images(twin, again, gates=None, locked=True, quiet=args.json)
        for one, other in zip(first, second, strict=True):
            if (where := first_difference((project.store, one), (twin.store, other))) is not None:
                failed[one.target] = where
    finally:
        if not (failed and args.keep):
            shutil.rmtree(scratch, ignore_errors=True)
    with choose_progress(args.json) as progress:
        outcomes = {name: check_image(project, name, progress) for name in names}
    passed = not failed and all(outcome.passed for outcome in outcomes.values())
    if args.json:
        rows = [
            {
                "target": b.target,
                "digest": b.digest,
                "difference": failed.get(b.target),
                "gates": outcomes[b.target].as_json()["gates"],
            }
            for b in first
        ]
        print(json.dumps({"images": rows, "passed": passed}))
    else:
        for image in first:
            verdict = f"differs: {failed[image.target]}" if image.target in failed else "same bytes twice"
            print(f"{image.ref} {image.digest}: {verdict}")
            print(outcome_text(outcomes[image.target], Screen.of()).partition("\n")[2])
        if failed and args.keep:
            print(f"the second store is {scratch}", file=sys.stderr)
    return 0 if passed else 1
