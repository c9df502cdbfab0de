"""``primus load``."""

from __future__ import annotations

import argparse
import json
import re
import sys

from primus.cli.host.image_root import image_root
from primus.errors import InputError
from primus.oci.canonical import digest_of
from primus.sandbox.load import load

_TAG = re.compile(r"^[a-z0-9]+(?:[._/:-]+[a-z0-9]+)*:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")


def run(args: argparse.Namespace) -> int:
    """Load the image and print its id."""
    root = image_root(args)
    tag = f"rocm/primus:{root.name}" if args.tag is None else args.tag
    if not _TAG.match(tag):
        raise InputError(f"--tag {tag!r} is not an image name", hint="lower-case NAME:TAG, e.g. rocm/primus:v26.11-cpu")
    sent = 0

    def count(amount: int) -> None:
        nonlocal sent
        sent += amount

    image_id = load(root, tag, sent=count)
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
