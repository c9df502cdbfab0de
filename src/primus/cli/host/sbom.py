"""List the files that a built image is made of, as in its lock.

--json prints the SPDX 2.3 document, with checksums and package URLs, that `primus publish` stores beside the image.
"""

from __future__ import annotations

import argparse
import json

from primus.cli.host.common import add_project_options, add_target, resolved_target
from primus.engine.image import compose
from primus.errors import InputError
from primus.plan.layers import plan_image
from primus.release.documents import bill, checkout, listing

EXAMPLE = "primus sbom cpu --json > cpu.spdx.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus sbom``."""
    add_target(parser)
    add_project_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list of files, or the SPDX document."""
    resolved, workspace = resolved_target(args)
    image = compose(workspace.store, plan_image(resolved, workspace.stats))
    if image is None:
        raise InputError(
            f"{resolved.ref} is not built from the current versions.yaml", hint=f"primus build {resolved.name}"
        )
    document = bill(image, *checkout(resolved.root))
    print(json.dumps(document, indent=1) if args.json else listing(document))
    return 0
