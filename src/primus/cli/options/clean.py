"""Free disk space: remove what no image, lock or last build needs.

Images keep their layers and names. A removed file is made or downloaded again when something needs it.
"""

from __future__ import annotations

import argparse

from primus.cli.options.common import add_project_options, complete_image

EXAMPLE = "primus clean --dry-run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus clean``."""
    image = parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="NAME",
        help="also remove this image, for example v26.10-cpu; can be given several times",
    )
    image.completer = complete_image  # type: ignore[attr-defined]
    parser.add_argument(
        "--caches", action="store_true", help="also remove all downloaded files, unpacked layers and caches"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be removed")
    add_project_options(parser)
