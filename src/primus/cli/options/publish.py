"""Publish a built image with its evidence: bill of materials, provenance, gates, lock and validations.

An image is refused, with all reasons, if it fails a gate, if exactly this image was not validated, or if its commit is
not clean. The tag of a release is never moved. Exit code 1 if refused. The last line is the image name with its digest.
"""

from __future__ import annotations

import argparse

from primus.cli.arguments import folder
from primus.cli.options.common import add_project_options, add_targets

EXAMPLE = "primus publish cpu --to registry.example.com/rocm/primus --dry-run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus publish``."""
    add_targets(parser)
    parser.add_argument("--to", default="", metavar="REPOSITORY", help="registry and path, without a tag (required)")
    parser.add_argument(
        "--preview",
        action="store_true",
        help="publish as -preview: no validation on the GPU is needed, and the coverage gate may fail",
    )
    parser.add_argument(
        "--records",
        type=folder("--records"),
        metavar="DIR",
        help="folder of validation records (default: out/validation)",
    )
    parser.add_argument(
        "--key", metavar="KEY", help="sign with cosign: key file or key service; password in COSIGN_PASSWORD"
    )
    parser.add_argument("--dry-run", action="store_true", help="check and print only; contact no registry")
    add_project_options(parser)
