"""`primus sbom`: the bill of materials of a built image."""

import argparse
import json

from primus_images.cli.host.examined import examined_target
from primus_images.release.bills import Contents, contents, cyclonedx, listing, spdx
from primus_images.release.git import checkout
from primus_images.release.licences import licences


def sbom(args: argparse.Namespace) -> int:
    """List the files that a built image is made of, as in its lock, with their licences."""
    inside = contents_of_target(args)
    # As in the registry: every character that is not ASCII is escaped.
    if args.cyclonedx:
        print(json.dumps(cyclonedx(inside), indent=1))
    elif args.json:
        print(json.dumps(spdx(inside), indent=1))
    else:
        print(listing(inside))
    return 0


def contents_of_target(args: argparse.Namespace) -> Contents:
    """Return what the image of the requested target is made of."""
    resolved, examined = examined_target(args)
    stated = [item for layer in examined.facts.values() for item in layer.stated]
    source = checkout(resolved.root)
    return contents(examined.image, source, licences(examined.facts), stated)
