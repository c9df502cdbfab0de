"""List the files that a built image is made of, as in its lock.

--json prints the SPDX 2.3 document, with checksums and package URLs, that `primus publish` stores beside the image.
"""

from __future__ import annotations

import argparse

from primus.cli.options.common import add_project_options, add_target

EXAMPLE = "primus sbom cpu --json > cpu.spdx.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus sbom``."""
    add_target(parser)
    add_project_options(parser)
