"""List the published images, or show one: versions, sizes, digests, contradictions between tables.

Values that were not published are shown as not published; they are never taken from elsewhere. Inside a project, the
pins of versions.yaml are listed first, as the next release.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from primus.cli.host.common import add_project
from primus.errors import InputError
from primus.plan.project import Project
from primus.plan.resolve import resolve_all
from primus.release import golden, show
from primus.release.history import (
    IMAGE,
    History,
    Release,
    errors_about,
    load_history,
    of_image,
    pin_names,
    pins,
    select,
    stack_of,
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


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """Declare --project and the formats --json and --markdown, which exclude each other."""
    add_project(parser)
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    formats.add_argument("--markdown", action="store_true", help="print Markdown instead of text")


def complete_release(prefix: str, **_: object) -> list[str]:
    """Return the releases and tags that begin with ``prefix``, for tab completion."""
    return sorted({n for r in load_history().releases for n in (r.name, r.tag) if n.startswith(prefix)})


def open_pins(args: argparse.Namespace) -> Project | None:
    """Open the project of --project or of this folder; None if there is none. The history does not need one."""
    return Project.find(args.project) if args.project or Project.here() else None


def pinned(project: Project, name: str, history: History) -> Release:
    """Return the current pins as a release called ``name``."""
    targets = {target.name: target for target in resolve_all(project, project.target_names())}
    return pins(project.versions, targets, name, history.gpu_arch)


def choices(history: History, word: str, project: Project | None) -> Sequence[Release]:
    """Return the releases that ``word`` names in the history or, if there are none, in the current pins.

    Raises InputError if neither knows the name.
    """
    try:
        return select(history, word)
    except InputError:
        if project is None:
            raise
        names = pin_names(project.versions, project.target_names())
        bare = word.removeprefix(f"{IMAGE}:")
        if bare in names:
            return (pinned(project, bare, history),)
        if golden.load(project.root, Path(bare).name) is not None:
            # An earlier release of this repository. Its pins are in its own commit; later commits keep its curves.
            return (Release(image=IMAGE, tag=bare, components={}, notes=("Only its golden curves are known here.",)),)
        return select(history, word, also=names)


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
    stacks = {release.reference: stack_of(release.reference) for release in releases}
    if args.json:
        document = {
            "releases": [show.plain(release) for release in releases],
            "unconfirmed_tags": [asdict(tag) for tag in doubtful],
            "documentation_errors": [asdict(error) for error in errors],
            "stacks": [stack for stack in stacks.values() if stack is not None],
        }
        print(json.dumps(document, ensure_ascii=False))
        return 0
    screen = Screen.of()
    layout = show.layout_of(markdown=args.markdown, screen=screen)
    if args.name is not None:
        parts = [show.release_page(history, release, stacks[release.reference], layout) for release in releases]
        print("\n\n".join([*parts, *([show.doubts(doubtful, layout)] if doubtful else [])]))
        return 0
    print(show.release_list(releases, layout))
    if args.image is None and not args.markdown:
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
