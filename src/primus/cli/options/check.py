"""Run every gate on a built image, using the contents of its layers.

The gates check ROCm versions, GPU code for the target's architecture, kernel files of other GPUs, versions against the
lock, duplicate library names, secrets and unwanted files, and the size budget. Exit code 1 if a gate fails. Layers are
read once; findings are cached until the layer or a rule changes.
"""

from __future__ import annotations

import argparse

from primus.cli.options.common import add_project_options, add_targets

EXAMPLE = "primus check cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus check``."""
    add_targets(parser)
    parser.add_argument("--record", action="store_true", help="save the findings for README's table of targets")
    add_project_options(parser)
