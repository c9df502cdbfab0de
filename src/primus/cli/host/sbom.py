"""List the files that a built image is made of, as in its lock.

--json prints the SPDX 2.3 document, with checksums and package URLs, that `primus publish` stores beside the image.
"""

from __future__ import annotations

import argparse

from primus.cli.host.common import add_project_options, add_target, open_project
from primus.errors import InputError

EXAMPLE = "primus sbom cpu --json > cpu.spdx.json"

__all__ = ["EXAMPLE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus sbom``."""
    add_target(parser)
    add_project_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list or the document."""
    import json

    from primus.images.build import compose
    from primus.images.plan import plan_image
    from primus.release.publish import bill, checkout
    from primus.release.sbom import listing

    project = open_project(args)
    name = args.target
    image = compose(project.store, plan_image(project, name, project.lock(name)))
    if image is None:
        raise InputError(
            f"{project.ref(name)} is not built from the current versions.yaml", hint=f"primus build {name}"
        )
    document = bill(project, image, *checkout(project.root))
    print(json.dumps(document, indent=1) if args.json else listing(document))
    return 0
