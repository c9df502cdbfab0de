"""List the published images, or show one: versions, sizes, digests, contradictions between tables.

Values that were not published are shown as not published; they are never taken from elsewhere. Inside a project, the
pins of versions.yaml are listed first, as the next release.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from primus.cli.host.common import add_format_options, choices, complete_release, open_pins, pinned
from primus.errors import InputError
from primus.release import show
from primus.release.history import (
    IMAGE,
    Release,
    errors_about,
    load_history,
    of_image,
    unconfirmed,
)
from primus.terminal import Screen

EXAMPLE = "primus releases v26.4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus releases``."""
    action = parser.add_argument("name", nargs="?", metavar="NAME", help="a release or tag: v26.4, primus:v25.10")
    action.completer = complete_release  # type: ignore[attr-defined]
    parser.add_argument("--image", metavar="IMAGE", help="only this image, for example rocm/primus")
    add_format_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list or one release."""
    history = load_history()
    project = open_pins(args)
    of_this_image = of_image(history, args.image)
    if args.name is not None:
        releases = _of_image(choices(history, args.name, project), of_this_image, args)
        doubtful = unconfirmed(history, args.name)
        errors = tuple(dict.fromkeys(error for release in releases for error in errors_about(history, release)))
    else:
        releases, doubtful, errors = list(of_this_image), history.unconfirmed_tags, history.documentation_errors
        if project is not None and args.image in (None, IMAGE, IMAGE.rpartition("/")[2]):
            releases.insert(0, pinned(project, project.versions.release, history))
    if args.json:
        document = {
            "releases": [show.plain(release) for release in releases],
            "unconfirmed_tags": [asdict(tag) for tag in doubtful],
            "documentation_errors": [asdict(error) for error in errors],
        }
        print(json.dumps(document, ensure_ascii=False))
        return 0
    screen = Screen.of()
    if args.name is not None:
        parts = [show.release_page(history, release, screen) for release in releases]
        print("\n\n".join([*parts, *([show.doubts(doubtful, screen)] if doubtful else [])]))
        return 0
    print(show.release_list(releases, screen))
    if args.image is None:
        images = sorted({release.image for release in history.related_images})
        related = "Related images: " + ", ".join(f"primus releases --image {image}" for image in images)
        print("\n".join(screen.wrap(related)))
    return 0


def _of_image(releases: Sequence[Release], of_image: Sequence[Release], args: argparse.Namespace) -> list[Release]:
    images = {release.image for release in of_image}
    matching = [release for release in releases if args.image is None or release.image in images]
    if not matching:
        names = ", ".join(release.reference for release in releases)
        raise InputError(f"{args.image} has no release {args.name}", hint=f"{args.name} stands for {names}")
    return matching
