"""Build the image, train in it and check the results. Each job of the suite runs in its own container.

If this machine has the GPU that the target is for, all such GPUs are used, otherwise the CPU; the record says which.
Writes record.json and report.html to out/validation/<target>/<recipe>/. A validation that passed for the same image
content, recipe, suite and GPU is not run again. Exit code 0: every check passed; 1: a job or a check failed.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from primus.cli.arguments import folder
from primus.cli.host.common import add_build_options, add_project_options, add_target, open_project
from primus.terminal import Screen
from primus.training.levels import LEVELS

if TYPE_CHECKING:
    from primus.images.project import Project
    from primus.release.cells import Cell

EXAMPLE = "primus validate cpu --suite quick"

__all__ = ["EXAMPLE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus validate``."""
    add_target(parser)
    parser.add_argument("--recipe", metavar="NAME", help="recipe to train (default: those that the target names)")
    parser.add_argument(
        "--suite",
        choices=LEVELS,
        help="quick: one run; standard: also repeated, resumed and with a split batch; full: also in another layout "
        "and in every precision. With this option, every recipe of the target is trained by every backend and in every "
        "mode that it supports, in the target's precisions (trained_in)",
    )
    parser.add_argument(
        "--again", action="store_true", help="also run what has already passed for the same image and recipe"
    )
    parser.add_argument(
        "--output",
        type=folder("--output"),
        metavar="DIR",
        help="folder for records and reports (default: out/validation)",
    )
    parser.add_argument("--engine", choices=("auto", "embedded", "docker"), default="auto", help="sandbox engine")
    parser.add_argument(
        "--gpus",
        metavar="all|N|none",
        help="GPUs of this machine to use (default: all if the target is for them, otherwise none)",
    )
    parser.add_argument("--no-build", action="store_true", help="validate the image in the store without building")
    add_project_options(parser)
    add_build_options(parser)


def run(args: argparse.Namespace) -> int:
    """Build, train, judge, record."""
    import json

    from primus.release import hardware
    from primus.release.validation import outcome_text, table, validate

    project = open_project(args)
    found = hardware.choose(args.gpus, project.gpu(args.target))
    if not args.json and (found.names or found.why):
        print(f"GPUs: {', '.join(found.names) or f'none ({found.why})'}", file=sys.stderr)
    planned = _planned(project, args, found.gpu)
    if not args.no_build:
        _build(args)
    validated = validate(
        project,
        args.target,
        planned,
        output=(args.output or project.root / "out" / "validation").absolute(),
        engine=args.engine,
        quiet=args.json,
        again=args.again,
        hardware=found,
    )
    records = [one.record for one in validated]
    if args.json:
        print(json.dumps(records if len(planned) > 1 or args.suite else records[0]))
    elif len(validated) == 1:
        print(Screen.of().fit(outcome_text(records[0], validated[0].folder)))
    else:
        print(Screen.of().fit(table(validated)))
    return 0 if all(record["passed"] for record in records) else 1


def _planned(project: Project, args: argparse.Namespace, gpu: str) -> tuple[tuple[Cell, str], ...]:
    """Each cell to train, with its level of the suite."""
    import os

    from primus.errors import InputError
    from primus.recipes.choose import CPU
    from primus.release.cells import cells_of
    from primus.release.hardware import NO_GPU

    # The same folder that the image's recipes layer is made from, wherever this code is installed.
    os.environ["PRIMUS_RECIPES"] = str(project.root / "recipes")
    target = project.target(args.target)
    if not target.recipes and not args.recipe:
        raise InputError(
            f"target {args.target} names no recipe",
            where=project.target_place(args.target),
            hint="primus validate --recipe NAME",
        )
    names = (args.recipe,) if args.recipe else target.recipes
    device = CPU if gpu == NO_GPU else gpu
    if args.suite:
        cells = cells_of(names, every=True, gpu=device, precisions=target.trained_in)
        return tuple((cell, args.suite) for cell in cells)
    # One recipe shows that runs repeat and resume; the others only have to train.
    (first,) = cells_of(names[:1], every=False, gpu=device)
    whole = target.trained_in and not args.recipe
    rest = cells_of(names, every=True, gpu=device, precisions=target.trained_in) if whole else ()
    return (first, "standard"), *((cell, "quick") for cell in rest)


def _build(args: argparse.Namespace) -> None:
    import contextlib

    from primus.cli.host import build

    options = argparse.Namespace(**{**vars(args), "target": [args.target], "all": False, "json": False})
    options.dry_run = options.rehash = False
    # The digest is the build verb's answer, not this one's.
    with contextlib.redirect_stdout(sys.stderr):
        build.run(options)
