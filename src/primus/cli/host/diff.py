"""Compare two releases: components, sizes, GPUs, and contradictions between their published tables.

Either side may be the current pins: the release in versions.yaml, one of its targets (v26.11-cpu), or `versions.yaml`.
"""

from __future__ import annotations

import argparse

from primus.cli.host.releases import add_format_options, choices, complete_release, open_pins

__all__ = ["EXAMPLE", "add_arguments", "run"]

EXAMPLE = "primus diff v25.10 v26.8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus diff``."""
    for side, text in (("old", "the older side"), ("new", "the newer side")):
        action = parser.add_argument(side, metavar=side.upper(), help=f"{text}: a release or tag")
        action.completer = complete_release  # type: ignore[attr-defined]
    add_format_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the differences."""
    from primus.release.compare import diff, one_of
    from primus.release.history import load_history

    history = load_history()
    project = open_pins(args)
    old, new = (one_of(choices(history, word, project), word) for word in (args.old, args.new))
    found = diff(old, new)
    if args.json:
        import json
        from dataclasses import asdict

        print(json.dumps(asdict(found), ensure_ascii=False))
    else:
        from primus.release import show
        from primus.terminal import Screen

        print(show.diff_markdown(found) if args.markdown else show.diff_text(found, Screen.of()))
    return 0
