"""Run every gate on a built image: what lies in its layers, not what was asked for.

Gates: one ROCm version, GPU code for the target's architecture, kernel files of others, versions as locked, library
names with two owners, secrets and litter, the size budget, kernels compiled ahead of time. Exit code 1 when one fails.
Layers are read once; what was seen is kept until the layer or a rule changes.
"""

from __future__ import annotations

import argparse

from primus.cli.host.common import add_project_options, add_targets, open_project, targets_of

EXAMPLE = "primus check cpu"

__all__ = ["EXAMPLE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus check``."""
    add_targets(parser)
    add_project_options(parser)


def run(args: argparse.Namespace) -> int:
    """Check the images, print one line per gate and its findings."""
    import json

    from primus.gates.check import check_image, outcome_text
    from primus.images.display import choose_progress

    project = open_project(args)
    with choose_progress(args.json) as progress:
        outcomes = [check_image(project, name, progress) for name in targets_of(project, args)]
    passed = all(outcome.passed for outcome in outcomes)
    if args.json:
        print(json.dumps({"images": [outcome.as_json() for outcome in outcomes], "passed": passed}))
    else:
        print("\n\n".join(map(outcome_text, outcomes)))
    return 0 if passed else 1
