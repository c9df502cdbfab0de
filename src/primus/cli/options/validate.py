"""Build the image, train in it and check the results. Each job of the suite runs in its own container.

If this machine has the GPU that the target is for, all such GPUs are used, otherwise the CPU; the record says which.
Writes record.json and report.html to out/validation/<target>/<recipe>/. A validation that passed for the same image
content, recipe, suite and GPU is not run again. Exit code 0: every check passed; 1: a job or a check failed.
"""

from __future__ import annotations

import argparse

from primus.cli.arguments import folder
from primus.cli.options.common import add_build_options, add_engine, add_project_options, add_target, complete_recipe
from primus.training.suite import LEVELS

EXAMPLE = "primus validate cpu --suite quick"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus validate``."""
    add_target(parser)
    recipe = parser.add_argument(
        "--recipe", metavar="NAME", help="recipe to train (default: those that the target names)"
    )
    recipe.completer = complete_recipe  # type: ignore[attr-defined]
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
        "--record-golden",
        action="store_true",
        help="write the FP32 curves of all recipes, or of --recipe, to benchmarks/golden, to compare later validations "
        "and releases with; needs --suite, and implies --again",
    )
    parser.add_argument(
        "--output",
        type=folder("--output"),
        metavar="DIR",
        help="folder for records and reports (default: out/validation)",
    )
    add_engine(parser)
    parser.add_argument(
        "--gpus",
        metavar="all|N|none",
        help="GPUs of this machine to use (default: all if the target is for them, otherwise none)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the jobs; build and train nothing")
    parser.add_argument("--no-build", action="store_true", help="validate the image in the store without building")
    add_project_options(parser)
    add_build_options(parser)
