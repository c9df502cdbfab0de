"""List the published images, or show one: versions, sizes, digests, contradictions between tables.

Values that were not published are shown as not published; they are never taken from elsewhere. Inside a project, the
pins of versions.yaml are listed first, as the next release.
"""

from __future__ import annotations

import argparse

from primus.cli.options.common import add_project

EXAMPLE = "primus releases v26.4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus releases``."""
    action = parser.add_argument("name", nargs="?", metavar="NAME", help="a release or tag: v26.4, primus:v25.10")
    action.completer = complete_release  # type: ignore[attr-defined]
    parser.add_argument("--image", metavar="IMAGE", help="only this image, for example rocm/primus")
    add_format_options(parser)


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """Declare --project and the formats --json and --markdown, which exclude each other."""
    add_project(parser)
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    formats.add_argument("--markdown", action="store_true", help="print Markdown instead of text")


def complete_release(prefix: str, **_: object) -> list[str]:
    """Return the releases and tags that begin with ``prefix``, for tab completion."""
    # Seam "completion": `--help` does not need it.
    from primus.release.history import load_history

    return sorted({n for r in load_history().releases for n in (r.name, r.tag) if n.startswith(prefix)})
