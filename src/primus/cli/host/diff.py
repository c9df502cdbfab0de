"""Compare two releases: components, sizes, GPUs, and contradictions between their published tables.

Either side may be the current pins: the release in versions.yaml, one of its targets (v26.11-cpu), or `versions.yaml`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from primus.cli.host.common import add_format_options, choices, complete_release, open_pins
from primus.release import golden, show
from primus.release.diff import diff, one_of
from primus.release.history import load_history
from primus.terminal import Screen

EXAMPLE = "primus diff v25.10 v26.8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus diff``."""
    for side, text in (("old", "the older side"), ("new", "the newer side")):
        action = parser.add_argument(side, metavar=side.upper(), help=f"{text}: a release or tag")
        action.completer = complete_release  # type: ignore[attr-defined]
    add_format_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the differences."""
    history = load_history()
    project = open_pins(args)
    old, new = (one_of(choices(history, word, project), word) for word in (args.old, args.new))
    difference = diff(old, new)
    if project is not None:
        difference = replace(difference, curves=_curves(project.root, old.tag, new.tag))
    if args.json:
        print(json.dumps(asdict(difference), ensure_ascii=False))
    else:
        print(show.diff_page(difference, Screen.of()))
    return 0


def _curves(root: Path, old: str, new: str) -> tuple[str, ...]:
    before, after = golden.load(root, old), golden.load(root, new)
    if before is None and after is None:
        return ()
    if before is None or after is None:
        return (f"{old if before is None else new} has no golden curves, so training was not compared",)
    return golden.changes(before, after) or (f"all {len(after['curves'])} golden curves agree",)
