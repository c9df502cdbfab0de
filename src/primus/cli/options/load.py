"""Load an image into the Docker engine of DOCKER_HOST (or of the default socket).

Nothing is sent if the engine already has the image. The last line is the image ID.
"""

from __future__ import annotations

import argparse

from primus.cli.options.common import add_project_options, add_target

EXAMPLE = "primus load cpu --tag rocm/primus:v26.11-cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus load``."""
    add_target(parser)
    parser.add_argument("--tag", metavar="NAME:TAG", help="name in the engine (default: rocm/primus:RELEASE-TARGET)")
    add_project_options(parser)
