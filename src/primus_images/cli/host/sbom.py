"""`primus sbom`: the bill of materials of a built image."""

import json
from dataclasses import dataclass

from primus_images.cli.host.common import SingleOptions
from primus_images.cli.host.examined import examined_target
from primus_images.release.bills import Contents, contents, cyclonedx, listing, spdx
from primus_images.release.git import checkout
from primus_images.release.licences import licences


@dataclass(frozen=True, kw_only=True)
class SbomOptions(SingleOptions):
    """The options of ``sbom``."""

    cyclonedx: bool


def sbom(options: SbomOptions) -> int:
    """List the files that a built image is made of, as in its lock, with their licences."""
    inside = contents_of_target(options)
    # As in the registry: every character that is not ASCII is escaped.
    if options.cyclonedx:
        print(json.dumps(cyclonedx(inside), indent=1))
    elif options.json:
        print(json.dumps(spdx(inside), indent=1))
    else:
        print(listing(inside))
    return 0


def contents_of_target(options: SingleOptions) -> Contents:
    """Return what the image of the requested target is made of."""
    resolved, examined = examined_target(options)
    stated = [item for layer in examined.facts.values() for item in layer.stated]
    source = checkout(resolved.root)
    return contents(examined.image, source, licences(examined.facts), stated)
