"""Load an image into the Docker engine of DOCKER_HOST (or of the default socket).

Nothing is sent if the engine already has the image. The last line is the image ID.
"""

from __future__ import annotations

import argparse
import json
import re
import sys

from primus.cli.host.common import add_project_options, add_target, image_root
from primus.errors import InputError
from primus.oci.canonical import digest_of
from primus.sandbox.images import load

EXAMPLE = "primus load cpu --tag rocm/primus:v26.11-cpu"
_TAG = re.compile(r"^[a-z0-9]+(?:[._/:-]+[a-z0-9]+)*:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus load``."""
    add_target(parser)
    parser.add_argument("--tag", metavar="NAME:TAG", help="name in the engine (default: rocm/primus:RELEASE-TARGET)")
    add_project_options(parser)


def run(args: argparse.Namespace) -> int:
    """Load the image and print its id."""
    root = image_root(args)
    tag = f"rocm/primus:{root.name}" if args.tag is None else args.tag
    if not _TAG.match(tag):
        raise InputError(f"--tag {tag!r} is not an image name", hint="lower-case NAME:TAG, e.g. rocm/primus:v26.11-cpu")
    image_id, sent = load(root, tag)
    if args.json:
        print(
            json.dumps(
                {"image_id": image_id, "tag": tag, "manifest": digest_of(root.manifest or b""), "bytes_sent": sent}
            )
        )
        return 0
    note = f"sent {sent / 1e6:.1f} MB" if sent else "the engine already has it, nothing sent"
    print(f"{tag}: {note}", file=sys.stderr)
    print(image_id)
    return 0
