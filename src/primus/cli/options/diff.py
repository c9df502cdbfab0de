"""Compare two releases: components, sizes, GPUs, and contradictions between their published tables.

Either side may be the current pins: the release in versions.yaml, one of its targets (v26.11-cpu), or `versions.yaml`.
"""

from __future__ import annotations

import argparse

from primus.cli.options.releases import add_format_options, complete_release

EXAMPLE = "primus diff v25.10 v26.8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus diff``."""
    for side, text in (("old", "the older side"), ("new", "the newer side")):
        action = parser.add_argument(side, metavar=side.upper(), help=f"{text}: a release or tag")
        action.completer = complete_release  # type: ignore[attr-defined]
    add_format_options(parser)
