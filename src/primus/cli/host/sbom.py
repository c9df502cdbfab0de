"""Print what a built image is made of, as SPDX 2.3: every file of its lock with its checksum and package URL."""

from __future__ import annotations

import argparse

from primus.cli.host.common import add_project_options, add_target, open_project
from primus.errors import InputError

EXAMPLE = "primus sbom cpu > cpu.spdx.json"

__all__ = ["EXAMPLE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus sbom``."""
    add_target(parser)
    add_project_options(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """Print the document; it is the one that `primus publish` lays beside the image."""
    import json

    from primus.images.build import compose
    from primus.images.plan import plan_image
    from primus.release.publish import bill

    project = open_project(args)
    name = args.target
    image = compose(project.store, plan_image(project, name, project.lock(name)))
    if image is None:
        raise InputError(f"{project.ref(name)} is not built as versions.yaml has it now", hint=f"primus build {name}")
    print(json.dumps(bill(project, image), indent=1))
    return 0
