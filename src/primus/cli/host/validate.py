"""Build the image, train in it and judge the outcome: every job of the suite in a container of its own.

Writes record.json and report.html below out/validation/<target>/<recipe>/. Exit code 0: every check passed;
1: a job or a check failed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from primus.cli.host.common import add_build_options, add_project_options, add_target, open_project

EXAMPLE = "primus validate cpu --recipe llama3-proxy"

__all__ = ["EXAMPLE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus validate``."""
    add_target(parser)
    parser.add_argument("--recipe", metavar="NAME", help="recipe to train (default: the target's own)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the evidence (default: out/validation)")
    parser.add_argument("--engine", choices=("auto", "embedded", "docker"), default="auto", help="what runs the jobs")
    parser.add_argument("--no-build", action="store_true", help="validate the image as it is in the store")
    add_project_options(parser)
    add_build_options(parser)


def run(args: argparse.Namespace) -> int:
    """Build, train, judge, record."""
    import json

    from primus.release.validation import outcome_text, validate

    project = open_project(args)
    if not args.no_build:
        _build(args)
    record, folder = validate(
        project,
        args.target,
        recipe=args.recipe,
        output=(args.output or project.root / "out" / "validation").absolute(),
        engine=args.engine,
        quiet=args.json,
    )
    if args.json:
        print(json.dumps(record))
    else:
        print(outcome_text(record, folder))
    return 0 if record["passed"] else 1


def _build(args: argparse.Namespace) -> None:
    import contextlib

    from primus.cli.host import build

    options = argparse.Namespace(**{**vars(args), "target": [args.target], "all": False, "json": False})
    options.dry_run = options.rehash = False
    # The digest is the build verb's answer, not this one's.
    with contextlib.redirect_stdout(sys.stderr):
        build.run(options)
