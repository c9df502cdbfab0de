"""``primus releases``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from primus.errors import InputError
from primus.plan.project import Project
from primus.plan.resolve import resolve_all
from primus.release import golden, show
from primus.release.history import History, Release, errors_about, load_history, of_image, select, unconfirmed
from primus.release.inputs import load_inputs, stack_of
from primus.release.present import IMAGE, present, present_names
from primus.terminal import Screen


def open_pins(args: argparse.Namespace) -> Project | None:
    """Open the project of --project or of this folder; None if there is none. The history does not need one."""
    return Project.find(args.project) if args.project or Project.here() else None


def pinned(project: Project, name: str, history: History) -> Release:
    """Return the current pins as a release called ``name``."""
    targets = {one.name: one for one in resolve_all(project, project.target_names())}
    return present(project.versions, targets, name, history.gpu_arch)


def choices(history: History, word: str, project: Project | None) -> Sequence[Release]:
    """Return the releases that ``word`` names in the history or, if there are none, in the current pins.

    Raises InputError if neither knows the name.
    """
    try:
        return select(history, word)
    except InputError:
        if project is None:
            raise
        names = present_names(project.versions, project.target_names())
        bare = word.removeprefix(f"{IMAGE}:")
        if bare in names:
            return (pinned(project, bare, history),)
        if golden.load(project.root, Path(bare).name) is not None:
            # An earlier release of this repository. Its pins are in its own commit; later commits keep its curves.
            return (Release(image=IMAGE, tag=bare, components={}, notes=("Only its golden curves are known here.",)),)
        return select(history, word, also=names)


def run(args: argparse.Namespace) -> int:
    """Print the list or one release."""
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
        if project is not None and args.image in (None, IMAGE, IMAGE.rpartition("/")[2]):
            found.insert(0, pinned(project, project.versions.release, history))
    if args.json:
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
        show_doubts = show.doubts_markdown if args.markdown else show.doubts_text
        print("\n\n".join([*parts, *([show_doubts(doubts, screen)] if doubts else [])]))
    else:
        print(show.list_markdown(found) if args.markdown else show.list_text(found, screen))
        if args.image is None and not args.markdown:
            images = sorted({r.image for r in history.related_images})
            related = "Related images: " + ", ".join(f"primus releases --image {image}" for image in images)
            print("\n".join(screen.wrap(related)))
    return 0


def _of_image(found: list[Release], listed: Sequence[Release], args: argparse.Namespace) -> list[Release]:
    images = {r.image for r in listed}
    kept = [r for r in found if args.image is None or r.image in images]
    if not kept:
        names = ", ".join(r.reference for r in found)
        raise InputError(f"{args.image} has no release {args.name}", hint=f"{args.name} stands for {names}")
    return kept
