"""List the published images, or show one: versions, sizes, digests, contradictions between tables.

Values that were not published are shown as not published; they are never taken from elsewhere. Inside a project, the
pins of versions.yaml are listed first, as the next release.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from primus.cli.arguments import path

if TYPE_CHECKING:
    from primus.images.project import Project
    from primus.release.history import History, Release

__all__ = ["EXAMPLE", "add_arguments", "add_format_options", "choices", "complete_release", "open_pins", "run"]

EXAMPLE = "primus releases v26.4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus releases``."""
    action = parser.add_argument("name", nargs="?", metavar="NAME", help="a release or tag: v26.4, primus:v25.10")
    action.completer = complete_release  # type: ignore[attr-defined]
    parser.add_argument("--image", metavar="IMAGE", help="only this image, for example rocm/primus")
    add_format_options(parser)


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """--project and the two formats, of which one at most."""
    parser.add_argument(
        "--project",
        type=path("--project"),
        metavar="DIR",
        help="folder with versions.yaml (default: this folder or a parent)",
    )
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    formats.add_argument("--markdown", action="store_true", help="print Markdown instead of text")


def complete_release(prefix: str, **_: object) -> list[str]:
    """Names for tab completion."""
    from primus.release.history import load_history

    return sorted({n for r in load_history().releases for n in (r.name, r.tag) if n.startswith(prefix)})


def open_pins(args: argparse.Namespace) -> Project | None:
    """The project of --project or of this folder; None where there is none, since the history needs none."""
    from primus.images.project import Project

    return Project.find(args.project) if args.project or Project.here() else None


def choices(history: History, word: str, project: Project | None) -> Sequence[Release]:
    """What ``word`` names, in the history or, failing that, in the present pins. InputError when it is nothing."""
    from primus.errors import InputError
    from primus.release.history import select

    try:
        return select(history, word)
    except InputError:
        if project is None:
            raise
        from primus.release.present import IMAGE, present, present_names

        names = present_names(project)
        bare = word.removeprefix(f"{IMAGE}:")
        return (present(project, bare, history.gpu_arch),) if bare in names else select(history, word, also=names)


def run(args: argparse.Namespace) -> int:
    """Print the list or one release."""
    from primus.release import show
    from primus.release.history import errors_about, load_history, of_image, unconfirmed
    from primus.release.inputs import load_inputs, stack_of
    from primus.terminal import Screen

    screen = Screen.of()
    history = load_history()
    project = open_pins(args)
    listed = of_image(history, args.image)
    if args.name is not None:
        found = list(choices(history, args.name, project))
        found = _of_image(found, listed, args)
        doubts = unconfirmed(history, args.name)
    else:
        found, doubts = list(listed), history.unconfirmed_tags
        from primus.release.present import IMAGE, present

        if project is not None and args.image in (None, IMAGE, IMAGE.rpartition("/")[2]):
            found.insert(0, present(project, project.versions.release, history.gpu_arch))
    if args.json:
        import json
        from dataclasses import asdict

        errors = dict.fromkeys(e for r in found for e in errors_about(history, r)) if args.name is not None else ()
        inputs = load_inputs()
        stacks = [s for s in (stack_of(inputs, r.reference) for r in found) if s is not None]
        document = {
            "releases": [show.plain(r) for r in found],
            "unconfirmed_tags": [asdict(t) for t in doubts],
            "documentation_errors": [
                asdict(e) for e in (errors if args.name is not None else history.documentation_errors)
            ],
            "stacks": [asdict(s) for s in stacks],
        }
        print(json.dumps(document, ensure_ascii=False))
    elif args.name is not None:
        inputs = load_inputs()
        shape = show.one_markdown if args.markdown else show.one_text
        parts = [shape(history, r, stack_of(inputs, r.reference), screen) for r in found]
        told = show.doubts_markdown if args.markdown else show.doubts_text
        print("\n\n".join([*parts, *([told(doubts, screen)] if doubts else [])]))
    else:
        print(show.list_markdown(found) if args.markdown else show.list_text(found, screen))
        if args.image is None and not args.markdown:
            images = sorted({r.image for r in history.related_images})
            related = "Related images: " + ", ".join(f"primus releases --image {image}" for image in images)
            print("\n".join(screen.wrap(related)))
    return 0


def _of_image(found: list[Release], listed: Sequence[Release], args: argparse.Namespace) -> list[Release]:
    from primus.errors import InputError

    images = {r.image for r in listed}
    kept = [r for r in found if args.image is None or r.image in images]
    if not kept:
        names = ", ".join(r.reference for r in found)
        raise InputError(f"{args.image} has no release {args.name}", hint=f"{args.name} stands for {names}")
    return kept
