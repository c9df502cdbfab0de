"""``primus diff``."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from primus.cli.host.releases import choices, open_pins
from primus.release import show
from primus.release.compare import diff, one_of
from primus.release.history import load_history
from primus.terminal import Screen

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Print the differences."""
    history = load_history()
    project = open_pins(args)
    old, new = (one_of(choices(history, word, project), word) for word in (args.old, args.new))
    found = diff(old, new)
    if args.json:
        print(json.dumps(asdict(found), ensure_ascii=False))
    else:
        print(show.diff_markdown(found) if args.markdown else show.diff_text(found, Screen.of()))
    return 0
